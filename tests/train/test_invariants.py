"""What must hold for any drafter and any row (the invariants of dflash-spec 7, by their numbers)."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from dflash_offline.train.batch import RowBatch
from dflash_offline.train.config import WEIGHT_NAMES, LossConfig, OptimConfig
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.loss import Head, frozen_head_loss, make_chunk_loss
from dflash_offline.train.optim import MasterOptimizer
from dflash_offline.train.slot import RowArrays, RowShape
from dflash_offline.train.slot_weights import static_weights
from dflash_offline.train.step import TrainStep
from torch import Tensor

CPU = torch.device("cpu")
FULL, CAUSAL = AttentionKind(), AttentionKind(is_causal=True)
SLIDING, SLIDING_CAUSAL = AttentionKind(7), AttentionKind(7, True)
KINDS = [
    *({"attention": (kind, kind)} for kind in (FULL, CAUSAL, SLIDING, SLIDING_CAUSAL)),
    *({"attention": (kind, FULL)} for kind in (CAUSAL, SLIDING, SLIDING_CAUSAL)),
    {"attention": (CAUSAL, SLIDING)},
    {"attention": (SLIDING_CAUSAL, SLIDING, FULL, CAUSAL, AttentionKind(12), SLIDING), "num_layers": 6},
    {"attention": (AttentionKind(4), AttentionKind(4)), "block_size": 6},
]
ANCHORS = [0, 3, 5, 17, 18, 40, 66, 70, 88, 92]  # overlapping blocks, two samples of 60 and 40 tokens


def shape_of(drafter: Drafter, row_tokens: int = 128, anchors: int = 16) -> RowShape:
    return RowShape(row_tokens=row_tokens, anchors=anchors, block_size=drafter.spec.block_size)


def frozen() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(5)
    return torch.randn(48, 32, generator=rng), torch.randn(48, 32, generator=rng) / 3


def loaded(drafter: Drafter, row: RowArrays, shape: RowShape) -> tuple[TrainStep, RowBatch]:
    batch = RowBatch(drafter.spec, shape, CPU, torch.float32)
    batch.load(row)
    return TrainStep(drafter, *frozen(), shape, LossConfig()), batch


@torch.no_grad()
def outputs(drafter: Drafter, row: RowArrays, shape: RowShape) -> Tensor:
    """[A, B, H] of a row's blocks by the training forward."""
    step, batch = loaded(drafter, row, shape)
    embeds = step.block_embeds(batch)
    out = drafter(batch.taps, embeds, batch.positions, batch.block_positions, batch.masks)
    return out.view(shape.anchors, shape.stride, -1)[:, : shape.block_size]


def sums(drafter: Drafter, rows: Sequence[RowArrays], shape: RowShape) -> tuple[Tensor, Tensor]:
    """Flat gradient and numbers of rows."""
    step, batch = loaded(drafter, rows[0], shape)
    for row in rows:
        batch.load(row)
        step.accumulate(batch)
    return step.gradient_sum, step.sums.values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [1, 3])
def test_1_2_training_forward_equals_cached_inference(
    kind, chunks, tiny_spec, tiny_drafter, random_sample, fill_row
) -> None:
    drafter = tiny_drafter(tiny_spec(**kind))
    shape, size = shape_of(drafter), drafter.spec.block_size
    samples = [random_sample(0, 60, 0), random_sample(1, 40, 0)]
    trained = outputs(drafter, fill_row(shape, samples, ANCHORS), shape)
    embedding, _ = frozen()
    for block, anchor in enumerate(ANCHORS):
        sample, place = (samples[0], anchor) if anchor < 60 else (samples[1], anchor - 60)
        taps = torch.from_numpy(sample.taps[:, :place]).view(torch.bfloat16).float()
        taps = torch.cat(list(taps), dim=1)  # [place, Lt*H]
        cache = drafter.new_cache()
        for part in np.array_split(np.arange(place), chunks):
            drafter.extend(cache, taps[part[0] : part[-1] + 1] if len(part) else taps[:0], torch.from_numpy(part))
        ids = torch.tensor([sample.ids[place]] + [drafter.spec.mask_token_id] * (size - 1))
        served = drafter.propose(cache, embedding[ids], torch.arange(place, place + size))
        torch.testing.assert_close(trained[block], served, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_3_no_block_sees_its_anchor_s_state_or_anything_later(
    kind, tiny_spec, tiny_drafter, random_sample, fill_row
) -> None:
    drafter = tiny_drafter(tiny_spec(**kind))
    shape = shape_of(drafter)
    samples = [random_sample(0, 60), random_sample(1, 40)]
    before = outputs(drafter, fill_row(shape, samples, ANCHORS), shape)
    for block, anchor in enumerate(ANCHORS):
        changed = fill_row(shape, samples, ANCHORS)
        other = fill_row(shape, [random_sample(8, 60), random_sample(9, 40)], ANCHORS)
        changed.taps[:, anchor:100] = other.taps[:, anchor:100]
        changed.ids[anchor + 1 : 100] = (changed.ids[anchor + 1 : 100] + 1) % 47
        assert torch.equal(outputs(drafter, changed, shape)[block], before[block])
        if anchor not in (0, 60):
            changed.taps[:, anchor - 1] = other.taps[:, anchor - 1]
            assert not torch.equal(outputs(drafter, changed, shape)[block], before[block])
        changed = fill_row(shape, samples, ANCHORS)
        changed.ids[anchor] = (changed.ids[anchor] + 1) % 47
        assert not torch.equal(outputs(drafter, changed, shape)[block], before[block])


def test_3_no_block_sees_another_sample(tiny_spec, tiny_drafter, random_sample, fill_row) -> None:
    drafter = tiny_drafter(tiny_spec())
    shape = shape_of(drafter)
    before = outputs(drafter, fill_row(shape, [random_sample(0, 60), random_sample(1, 40)], ANCHORS), shape)
    after = outputs(drafter, fill_row(shape, [random_sample(7, 60), random_sample(1, 40)], ANCHORS), shape)
    assert torch.equal(before[6:10], after[6:10])
    assert not torch.equal(before[1:6], after[1:6])


@pytest.mark.parametrize("kind", KINDS)
def test_4_a_block_does_not_depend_on_the_other_anchors(kind, tiny_spec, tiny_drafter, random_sample, fill_row) -> None:
    drafter = tiny_drafter(tiny_spec(**kind))
    shape = shape_of(drafter, anchors=32)  # two tiles of 16 blocks
    samples = [random_sample(0, 60), random_sample(1, 40)]
    first = [3, 17, 40, 70, *range(71, 83)]
    before = outputs(drafter, fill_row(shape, samples, [*first, 85, 90]), shape)
    elsewhere = outputs(drafter, fill_row(shape, samples, [*first, *range(83, 97)]), shape)
    assert torch.equal(before[:16], elsewhere[:16])
    # inside a tile other anchors may change which keys are computed at all, hence the rounding
    others = outputs(drafter, fill_row(shape, samples, [9, 17, 18, 70, 71, 90]), shape)
    twice = outputs(drafter, fill_row(shape, samples, [40, 40, 3, 17]), shape)  # overlapping, in another order
    torch.testing.assert_close(others[[1, 3]], before[[1, 3]], atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(twice[:4], before[[2, 2, 0, 1]], atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_5_samples_packed_together_are_as_each_alone(kind, tiny_spec, tiny_drafter, random_sample, fill_row) -> None:
    drafter = tiny_drafter(tiny_spec(**kind))
    shape = shape_of(drafter)
    samples = [random_sample(0, 60), random_sample(1, 40)]
    own = [[a for a in ANCHORS if a < 60], [a - 60 for a in ANCHORS if a >= 60]]
    together = fill_row(shape, samples, ANCHORS)
    alone = [fill_row(shape, [sample], anchors) for sample, anchors in zip(samples, own)]
    packed = outputs(drafter, together, shape)
    apart = [outputs(drafter, row, shape)[: len(anchors)] for row, anchors in zip(alone, own)]
    torch.testing.assert_close(packed[: len(ANCHORS)], torch.cat(apart), atol=2e-6, rtol=1e-5)
    gradient, numbers = sums(drafter, [together], shape)
    gradient_apart, numbers_apart = sums(drafter, alone, shape)
    torch.testing.assert_close(gradient, gradient_apart, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(numbers, numbers_apart, atol=1e-5, rtol=1e-6)


def test_6_padding_changes_nothing(tiny_spec, tiny_drafter, random_sample, fill_row) -> None:
    drafter = tiny_drafter(tiny_spec())
    samples = [random_sample(0, 60), random_sample(1, 40)]
    results = []
    for row_tokens, anchors in [(128, 16), (384, 16), (128, 64), (256, 32)]:
        shape = shape_of(drafter, row_tokens, anchors)
        results.append(sums(drafter, [fill_row(shape, samples, ANCHORS)], shape))
    for gradient, numbers in results[1:]:
        torch.testing.assert_close(gradient, results[0][0], atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(numbers, results[0][1], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_7_a_shift_of_all_positions_changes_nothing(kind, tiny_spec, tiny_drafter, random_sample, fill_row) -> None:
    drafter = tiny_drafter(tiny_spec(**kind))
    shape = shape_of(drafter)
    row = fill_row(shape, [random_sample(0, 60), random_sample(1, 40)], ANCHORS)
    before, gradient = outputs(drafter, row, shape), sums(drafter, [row], shape)[0]
    row.positions[:] += 37
    torch.testing.assert_close(outputs(drafter, row, shape), before, atol=2e-5, rtol=1e-4)
    assert (sums(drafter, [row], shape)[0] - gradient).norm() < 1e-5 * gradient.norm()
    row.positions[:40] += 1  # but a shift of a part does change something
    assert (outputs(drafter, row, shape) - before).abs().max() > 1e-3


def test_15_labels_end_at_the_turn_and_the_text(tiny_spec, tiny_drafter, random_sample, fill_row) -> None:
    drafter = tiny_drafter(tiny_spec())
    shape = shape_of(drafter)
    sample = random_sample(0, 60)
    sample.loss_mask[30:32] = False
    row = fill_row(shape, [sample, random_sample(1, 40)], [26, 50, 57])
    before = sums(drafter, [row], shape)
    for token in (30, 31, 33, 60, 61):  # behind the turn's end, in the user's turn, in the next turn and sample
        row.ids[token] = (row.ids[token] + 1) % 47
    after = sums(drafter, [row], shape)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    row.ids[29] = (row.ids[29] + 1) % 47
    assert not torch.equal(sums(drafter, [row], shape)[0], before[0])


def test_15_a_toy_loss_by_hand() -> None:
    """Two tokens with the logits h and -h, blocks of 3, slot 2 weighs exp(-1/2); slot 0 and the fourth never count."""
    hidden = torch.tensor([[9.0, 0.5, -1.0, 9.0], [9.0, 2.0, 9.0, 9.0]]).view(8, 1)
    head, labels = Head(weight=torch.tensor([[1.0], [-1.0]])), torch.tensor([[0, 0], [1, 0]])
    config = LossConfig(gamma=2.0)
    weights = torch.tensor([[1.0, 1.0], [1.0, 0.0]]) * static_weights(config, 3)
    result = frozen_head_loss(hidden, head, labels, weights, chunk_blocks=1, chunk_loss=make_chunk_loss(config, head))
    later = math.exp(-0.5)
    losses = math.log(1 + math.exp(-1)), later * math.log(1 + math.exp(2)), math.log(1 + math.exp(4))
    slopes = [-2 / (1 + math.exp(1)), -2 * later / (1 + math.exp(-2)), 2 / (1 + math.exp(-4))]
    assert float(result.loss) == pytest.approx(sum(losses))
    assert float(result.weights.sum()) == pytest.approx(2 + later)
    assert result.hit[:, 0].tolist() == [True, False]
    assert result.gradient.flatten().tolist() == pytest.approx([0, slopes[0], slopes[1], 0, 0, slopes[2], 0, 0])


@pytest.mark.parametrize("weights", WEIGHT_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_28_a_row_without_a_label_changes_nothing(
    dtype, weights, tiny_spec, tiny_drafter, random_sample, fill_row
) -> None:
    """A row whose blocks count but hold nothing to train on, one without blocks, and one of padding alone."""
    drafter = tiny_drafter(tiny_spec()).to(dtype)
    shape = shape_of(drafter)
    samples = [random_sample(0, 60), random_sample(1, 40)]
    full, masked = (fill_row(shape, samples, ANCHORS) for _ in range(2))
    masked.loss_mask[:] = False
    config = LossConfig(weights=weights)
    step, batch = TrainStep(drafter, *frozen(), shape, config), RowBatch(drafter.spec, shape, CPU, dtype)
    found = []
    for rows in ([full], [masked, full, fill_row(shape, samples, []), fill_row(shape, [], [])]):
        step.reset()
        for row in rows:
            batch.load(row)
            step.accumulate(batch)
        found.append((step.gradient_sum.clone(), step.sums.values.clone()))
    assert all(torch.equal(one, other) for one, other in zip(*found))
    assert found[0][0].abs().max() > 0


def test_26_one_short_row_can_be_learned_by_heart(tiny_spec, random_sample, fill_row) -> None:
    drafter = Drafter(tiny_spec())
    drafter.init_weights(0)
    shape = shape_of(drafter)
    anchors = list(range(3, 59, 4))
    row = fill_row(shape, [random_sample(0, 60)], anchors)
    step, batch = loaded(drafter, row, shape)
    optimizer = MasterOptimizer(drafter.named_parameters(), OptimConfig(), 200)
    for _ in range(200):
        step.reset()
        step.accumulate(batch)
        optimizer.step(step.gradients, step.sums.weight)
    step.reset()
    step.accumulate(batch)
    metrics = step.sums.metrics()
    assert metrics["accuracy"] > 0.99
    assert metrics["acceptance_length_teacher_forced"] > 7.5
