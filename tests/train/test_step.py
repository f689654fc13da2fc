"""A step's sums against plain autograd over full logits, and against loops over blocks."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dflash_offline.train.batch import RowBatch
from dflash_offline.train.blocks import dense_mask
from dflash_offline.train.config import OBJECTIVE_NAMES, TOKEN_OBJECTIVES, WEIGHT_NAMES, LossConfig, OptimConfig
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.loss import BlockLoss
from dflash_offline.train.optim import MasterOptimizer
from dflash_offline.train.slot import RowArrays, RowShape
from dflash_offline.train.slot_weights import decay_weights, dpace_weights, first_error_weights
from dflash_offline.train.spec import DrafterSpec
from dflash_offline.train.step import StepSums, TrainStep
from torch import Tensor

CPU = torch.device("cpu")
SHAPE = RowShape(row_tokens=128, anchors=16, block_size=8)
QUIRKS = {"embedding_scale": 3.0, "output_multiplier": 0.7, "logit_softcap": 4.0}


def frozen(seed: int = 5) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(48, 32, generator=rng), torch.randn(48, 32, generator=rng) / 3


def rows_of(random_sample, fill_row) -> list[RowArrays]:
    first = fill_row(SHAPE, [random_sample(0, 40), random_sample(1, 60)], [3, 9, 10, 37, 44, 70, 98])
    second = fill_row(SHAPE, [random_sample(2, 128)], [5, 30, 31, 90, 125, None])
    return [first, second]


def run(step: TrainStep, rows: Sequence[RowArrays]) -> None:
    batch = RowBatch(step.drafter.spec, SHAPE, CPU, step.embedding.dtype, has_last=step.config.needs_last)
    for row in rows:
        batch.load(row)
        step.accumulate(batch)


def with_last(rows: list[RowArrays], spread: float = 1.0) -> list[RowArrays]:
    """The rows with last states: random ones, zeros where nothing is recorded (ends of samples, padding)."""
    rng = np.random.default_rng(11)
    result = []
    for row in rows:
        states = torch.from_numpy(spread * rng.standard_normal((128, 32))).to(torch.bfloat16)
        sample_ids = torch.from_numpy(np.append(row.sample_ids, -1))
        states[(sample_ids[:-1] < 0) | (sample_ids[1:] != sample_ids[:-1])] = 0
        result.append(dataclasses.replace(row, last=states.view(torch.uint8).numpy()))
    return result


TARGET_EPS = 0.3  # of the target's final norm; the drafter's own is another


def final_norm_weight() -> Tensor:
    return 0.5 + torch.rand(32, generator=torch.Generator().manual_seed(6))


def plain_numbers(drafter: Drafter, embedding: Tensor, head: Tensor, row: RowArrays, config: LossConfig):
    """value, hit, weights, validity, alpha [A, B-1] of a row with nothing fast: loops, full logits, F.cross_entropy."""
    spec = drafter.spec
    taps = torch.from_numpy(row.taps).view(torch.bfloat16).float()
    taps = torch.cat(list(taps), dim=1)
    starts = [int((row.sample_ids == row.sample_ids[a]).argmax()) for a in row.anchors]
    ids, labels, valid = [], [], []
    for anchor, keep in zip(row.anchors.tolist(), row.keep.tolist()):
        ids.append([int(row.ids[anchor]) if keep else spec.mask_token_id] + [spec.mask_token_id] * 7)
        labels.append([int(row.ids[anchor + k]) for k in range(1, 8)])
        inside = [anchor + k < 128 and row.sample_ids[anchor + k] == row.sample_ids[anchor] for k in range(1, 8)]
        fine = [keep and ok and bool(row.loss_mask[anchor + k + 1]) for k, ok in enumerate(inside)]
        valid.append([float(all(fine[: k + 1])) for k in range(7)])
    anchors = torch.from_numpy(row.anchors).long()
    positions = torch.from_numpy(row.positions).long()
    block_positions = (positions[anchors][:, None] + torch.arange(8)).flatten()
    mask = dense_mask(anchors, torch.tensor(starts), SHAPE)
    embeds = embedding[torch.tensor(ids).flatten()] * spec.embedding_scale
    hidden = drafter(taps, embeds, positions, block_positions, (mask,)).view(16, 8, -1)[:, 1:]
    logits = hidden @ head.T * spec.output_multiplier
    if spec.logit_softcap:
        logits = spec.logit_softcap * torch.tanh(logits / spec.logit_softcap)
    target = torch.tensor(labels)
    nll = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(16, 7)
    weights = torch.tensor(valid)
    if config.weights == "decay":
        weights = weights * decay_weights(8, 4.0)
    if config.weights == "dpace":
        weights = weights * dpace_weights(nll, weights > 0, config.dpace_alpha)
    hit = logits.argmax(-1) == target
    if config.weights == "first_error":
        weights = weights * first_error_weights(hit, weights > 0)
    value, alpha = plain_objective(config.objective, nll, torch.softmax(logits, -1), plain_teacher(spec, head, row))
    return value, hit, weights, torch.tensor(valid), alpha


def plain_teacher(spec: DrafterSpec, head: Tensor, row: RowArrays, eps: float = TARGET_EPS) -> Tensor | None:
    """The target's distribution for the token at a+k, from its last state at a+k-1: [A, B-1, V], slot by slot."""
    if row.last is None:
        return None
    last = torch.from_numpy(row.last).view(torch.bfloat16).float()
    rows = torch.stack([last[[min(a + k - 1, 127) for k in range(1, 8)]] for a in row.anchors.tolist()])
    normed = rows / torch.sqrt((rows * rows).mean(-1, keepdim=True) + eps) * final_norm_weight()
    logits = normed @ head.T * spec.output_multiplier
    if spec.logit_softcap:
        logits = spec.logit_softcap * torch.tanh(logits / spec.logit_softcap)
    return torch.softmax(logits, -1)


def plain_objective(name: str, nll: Tensor, q: Tensor, p: Tensor | None) -> tuple[Tensor, Tensor]:
    """value and alpha [A, B-1]; alpha 0 where p is not known."""
    if p is None:
        return (nll if name == "ce" else 1 - torch.exp(-nll)), torch.zeros_like(nll)
    alpha, kl = torch.minimum(p, q).sum(-1), (p * (p.log() - q.log())).sum(-1)
    share = torch.exp(-3.0 * alpha.detach())
    values = {"kl": kl, "tv": 1 - alpha, "lk": -alpha.log(), "lk_hybrid": share * kl + (1 - share) * (1 - alpha)}
    return values[name], alpha.detach()


@pytest.mark.parametrize(
    ("objective", "weights"), [*(("ce", name) for name in WEIGHT_NAMES), *((name, "dpace") for name in OBJECTIVE_NAMES)]
)
@pytest.mark.parametrize("quirks", [{}, QUIRKS])
def test_sums_equal_plain_autograd(
    objective, weights, quirks, tiny_spec, tiny_drafter, random_sample, fill_row
) -> None:
    config = LossConfig(objective=objective, weights=weights, chunk_blocks=5)
    drafter, slow = (tiny_drafter(tiny_spec(**quirks)) for _ in range(2))
    embedding, head = frozen()
    rows = rows_of(random_sample, fill_row)
    if config.needs_last:
        rows = with_last(rows)
    step = TrainStep(drafter, embedding, head, SHAPE, config, norm=final_norm_weight(), norm_eps=TARGET_EPS)
    run(step, rows)

    loss = total = blocks = accepted = expected = slots = 0.0
    for row in rows:
        value, hit, used, valid, alpha = plain_numbers(slow, embedding, head, row, config)
        part = (value * used).sum()
        part.backward()
        loss, total = loss + part.item(), total + float(used.sum())
        expected, slots = expected + float((alpha * valid).sum()), slots + float(valid.sum())
        for block in range(16):
            if valid[block, 0]:
                blocks += 1
                run_of_hits = [bool(h) and bool(v) for h, v in zip(hit[block], valid[block])]
                accepted += run_of_hits.index(False) if False in run_of_hits else 7
    for (name, parameter), gradient in zip(slow.named_parameters(), step.gradients):
        assert parameter.grad is not None
        torch.testing.assert_close(gradient, parameter.grad, atol=3e-4, rtol=1e-3, msg=name)
        assert gradient.abs().max() > 0
    metrics = step.sums.metrics()
    assert float(step.sums.weight) == pytest.approx(total, rel=1e-5)
    assert metrics["loss"] == pytest.approx(loss / total, rel=1e-5)
    assert metrics["accepted_drafts_teacher_forced"] == pytest.approx(accepted / blocks)
    assert metrics["acceptance_length_teacher_forced"] == pytest.approx(accepted / blocks + 1)
    assert metrics.get("acceptance_expected", 0.0) == pytest.approx(expected / slots, rel=1e-5)
    assert ("acceptance_expected" in metrics) == (objective not in TOKEN_OBJECTIVES)


def test_metrics_of_a_drafter_that_is_right_count_every_slot() -> None:
    sums = StepSums(4, CPU)
    valid = torch.tensor([[1.0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]])
    hit = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 1, 1]]).bool()
    sums.add(BlockLoss(torch.tensor(12.0), valid * 2, valid, valid, hit, None, valid), valid)
    metrics = sums.metrics()
    assert metrics["loss"] == 1.0
    assert metrics["accepted_drafts_teacher_forced"] == pytest.approx((3 + 1 + 0) / 3)
    assert metrics["accuracy"] == pytest.approx(5 / 6)
    assert [metrics[f"accuracy_slot_{k}"] for k in (1, 2, 3)] == pytest.approx([2 / 3, 1.0, 1.0])
    assert [metrics[f"survival_slot_{k}"] for k in (1, 2, 3)] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    sums.zero()
    assert sums.metrics() == {}


@pytest.mark.parametrize("objective", OBJECTIVE_NAMES)
def test_rows_dealt_to_ranks_add_up_to_the_same_step(
    objective, tiny_spec, tiny_drafter, random_sample, fill_row
) -> None:
    rows = with_last(rows_of(random_sample, fill_row))
    config = LossConfig(objective=objective)

    def sums_of(part: Sequence[RowArrays]) -> tuple[Tensor, Tensor]:
        step = TrainStep(tiny_drafter(tiny_spec()), *frozen(), SHAPE, config, norm=final_norm_weight())
        run(step, part)
        return step.gradient_sum.clone(), step.sums.values.clone()

    together = sums_of(rows)
    for split in ([rows[:1], rows[1:]], [rows[1:], rows[:1]], [rows, []]):
        parts = [sums_of(part) for part in split]
        torch.testing.assert_close(parts[0][0] + parts[1][0], together[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(parts[0][1] + parts[1][1], together[1], atol=1e-5, rtol=1e-6)


def test_bf16_parameters_are_summed_in_fp32(tiny_spec, tiny_drafter, random_sample, fill_row) -> None:
    rows = rows_of(random_sample, fill_row)
    drafter = tiny_drafter(tiny_spec()).to(torch.bfloat16)
    step = TrainStep(drafter, *frozen(), SHAPE, LossConfig())
    alone = []
    for row in rows:
        step.reset()
        run(step, [row])
        alone.append(step.gradient_sum.clone())
        assert torch.equal(alone[-1], alone[-1].bfloat16().float())  # one row's gradient is what bf16 holds
    step.reset()
    run(step, rows * 3)
    assert step.gradient_sum.dtype == torch.float32
    torch.testing.assert_close(step.gradient_sum, 3 * (alone[0] + alone[1]), atol=1e-5, rtol=1e-5)
    assert all(parameter.grad is None for parameter in drafter.parameters())


def test_reset_forgets_everything(tiny_spec, tiny_drafter, random_sample, fill_row) -> None:
    rows = rows_of(random_sample, fill_row)
    step = TrainStep(tiny_drafter(tiny_spec()), *frozen(), SHAPE, LossConfig())
    run(step, rows)
    first = step.gradient_sum.clone(), step.sums.values.clone()
    step.reset()
    assert step.gradient_sum.abs().sum() == step.sums.values.abs().sum() == 0
    run(step, rows)
    assert torch.equal(step.gradient_sum, first[0])
    assert torch.equal(step.sums.values, first[1])


def test_an_exam_forward_leaves_no_gradient(tiny_spec, tiny_drafter, random_sample, fill_row) -> None:
    step = TrainStep(tiny_drafter(tiny_spec()), *frozen(), SHAPE, LossConfig())
    batch = RowBatch(step.drafter.spec, SHAPE, CPU, torch.float32)
    batch.load(rows_of(random_sample, fill_row)[0])
    inputs = batch.taps, step.block_embeds(batch), batch.positions, batch.block_positions, batch.masks
    hidden = step.infer(*inputs)
    assert not hidden.requires_grad
    assert torch.equal(hidden, step.drafter(*inputs).detach())


@pytest.mark.parametrize("name", ["muon", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_update_moves_every_weight_and_no_frozen_one(
    name, dtype, tiny_spec, tiny_drafter, random_sample, fill_row
) -> None:
    drafter = tiny_drafter(tiny_spec()).to(dtype)
    embedding, head = frozen()
    step = TrainStep(drafter, embedding, head, SHAPE, LossConfig())
    optimizer = MasterOptimizer(drafter.named_parameters(), OptimConfig(name=name, lr=1e-4, warmup_share=0.0), 10)
    before = [master.clone() for master in optimizer.masters]
    inside = step.embedding.clone(), step.head.weight.clone()
    run(step, rows_of(random_sample, fill_row))
    optimizer.step(step.gradients, step.sums.weight)
    for parameter_name, old, new in zip(optimizer.names, before, optimizer.masters):
        assert (old != new).float().mean() > 0.9, parameter_name
    assert torch.equal(step.embedding, inside[0])
    assert torch.equal(step.head.weight, inside[1])
    assert step.embedding.grad is None
    assert step.head.weight.grad is None


def test_a_tied_head_is_held_once(tiny_spec, tiny_drafter) -> None:
    embedding, _ = frozen()
    step = TrainStep(tiny_drafter(tiny_spec()).to(torch.bfloat16), embedding, embedding, SHAPE, LossConfig())
    assert step.head.weight.data_ptr() == step.embedding.data_ptr()


def test_a_row_without_anchors_adds_nothing_and_stays_finite(tiny_spec, tiny_drafter, random_sample, fill_row) -> None:
    rows = rows_of(random_sample, fill_row)
    empty = fill_row(SHAPE, [random_sample(7, 50)], [])
    void = fill_row(SHAPE, [], [])
    for weights in ("decay", "dpace"):
        step = TrainStep(tiny_drafter(tiny_spec()), *frozen(), SHAPE, LossConfig(weights=weights))
        run(step, [empty, void])
        assert step.gradient_sum.abs().sum() == step.sums.values.abs().sum() == 0
        run(step, rows)
        alone = TrainStep(tiny_drafter(tiny_spec()), *frozen(), SHAPE, LossConfig(weights=weights))
        run(alone, rows)
        assert torch.equal(step.gradient_sum, alone.gradient_sum)
        assert torch.isfinite(step.gradient_sum).all()


@pytest.mark.parametrize("objective", [name for name in OBJECTIVE_NAMES if name not in TOKEN_OBJECTIVES])
def test_only_the_states_that_labels_follow_from_are_read(
    objective, tiny_spec, tiny_drafter, random_sample, fill_row
) -> None:
    """The token at a+k follows from the state at a+k-1: the anchor's own is the first, the last label's is not one."""
    row = with_last([fill_row(SHAPE, [random_sample(0, 40), random_sample(1, 60)], [10, 35, 70])])[0]
    assert row.last is not None
    read = [*range(10, 17), *range(35, 39), *range(70, 77)]
    unread = np.setdiff1d(np.arange(128), read)

    def gradient(last: np.ndarray) -> Tensor:
        config = LossConfig(objective=objective)
        step = TrainStep(tiny_drafter(tiny_spec()), *frozen(), SHAPE, config, norm=final_norm_weight())
        run(step, [dataclasses.replace(row, last=last)])
        return step.gradient_sum

    before = gradient(row.last)
    poisoned = row.last.copy()
    poisoned.view(np.uint16)[unread] = 0x7FC0  # NaN
    assert torch.equal(gradient(poisoned), before)
    for place in read:
        changed = row.last.copy()
        changed[place] = row.last[50 if place != 50 else 51]
        assert not torch.equal(gradient(changed), before), place
