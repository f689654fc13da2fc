"""The training step on a CUDA device: its gradients, its compiled frames, and the paths that must not exist.

Needs a GPU: compiled flex attention with gradients exists only there (a CPU takes the dense mask).
"""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from dflash_offline.train.batch import RowBatch
from dflash_offline.train.config import OBJECTIVE_NAMES, LossConfig
from dflash_offline.train.device import compiled_once
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.evaluate.walk import HeldOutSample, walk
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.slot import RowArrays, RowShape
from dflash_offline.train.step import TrainStep
from torch import Tensor
from torch._dynamo.exc import RecompileError
from torch._dynamo.utils import counters

pytestmark = pytest.mark.gpu
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SHAPE = RowShape(row_tokens=1024, anchors=64, block_size=8)
FULL, CAUSAL = AttentionKind(), AttentionKind(is_causal=True)
SLIDING, SLIDING_CAUSAL = AttentionKind(100), AttentionKind(40, True)
MIXED = {"attention": (SLIDING_CAUSAL, SLIDING, FULL, SLIDING_CAUSAL), "num_layers": 4}
KINDS = [{"attention": (kind, kind)} for kind in (FULL, SLIDING_CAUSAL, SLIDING, CAUSAL)] + [MIXED]
FRAMES = 1  # the drafter's forward; the loss has kernels of its own where it needs the text alone
TEACHER_FRAMES = 2  # and the arithmetic of a chunk of the loss
C31_LENGTHS = (128, 256, 384, 512, 640, 768)  # the lengths of case c31


@pytest.fixture(autouse=True)
def no_frame_of_another_test():
    torch._dynamo.reset()
    counters.clear()


def wide(tiny_spec, **changes):
    """A head dimension that the Triton kernel takes (16 at least)."""
    return tiny_spec(head_dim=16, **changes)


def frozen() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(5)
    return torch.randn(48, 32, generator=rng), torch.randn(48, 32, generator=rng) / 3


def random_row(rng: np.random.Generator, random_sample, fill_row, lengths=None, shape: RowShape = SHAPE) -> RowArrays:
    """Samples of random lengths (or of the given ones) until the row is full, anchors anywhere but at their ends."""
    samples, room, anchors = [], shape.row_tokens, []
    while room > 8:
        length = int(lengths[len(samples) % len(lengths)]) if lengths else int(rng.integers(8, 400))
        length = min(length, room)
        begin = shape.row_tokens - room
        anchors += (begin + rng.integers(0, length - 1, size=1 + length // 20)).tolist()
        samples.append(random_sample(int(rng.integers(1 << 30)), length, answer=0))
        room -= length
    chosen = sorted(rng.permutation(anchors)[: int(rng.integers(1, shape.anchors + 1))].tolist())
    return fill_row(shape, samples, chosen)


def gradients(
    drafter: Drafter, rows: list[RowArrays], device: torch.device, config: LossConfig | None = None
) -> dict[str, Tensor]:
    """Summed over the rows, by name, in fp64 on the CPU."""
    config = config or LossConfig()
    step = TrainStep(drafter, *frozen(), SHAPE, config, norm=torch.linspace(0.5, 1.5, 32))
    batch = RowBatch(drafter.spec, SHAPE, device, drafter.fc.weight.dtype, has_last=config.needs_last)
    for row in rows:
        batch.load(row)
        step.accumulate(batch)
    return {n: g.double().cpu() for (n, _), g in zip(drafter.named_parameters(), step.gradients)}


def flat(gradient: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in gradient.values()])


def with_last(row: RowArrays, seed: int) -> RowArrays:
    """The row with random last states of its tokens."""
    rng = np.random.default_rng(seed)
    states = torch.from_numpy(rng.standard_normal((SHAPE.row_tokens, 32))).to(torch.bfloat16)
    return dataclasses.replace(row, last=states.view(torch.uint8).numpy())


@pytest.mark.parametrize("weights", ["dpace", "first_error"])
@pytest.mark.parametrize("objective", OBJECTIVE_NAMES)
def test_every_objective_has_the_gradients_of_the_cpu(
    objective, weights, tiny_spec, tiny_drafter, random_sample, fill_row
) -> None:
    """The compiled chunk in float32 against the plain one in float64; the cap bends."""
    config = LossConfig(objective=objective, weights=weights, chunk_blocks=16)
    drafter = tiny_drafter(wide(tiny_spec, output_multiplier=0.7, logit_softcap=4.0))
    dense = copy.deepcopy(drafter).double()
    rng = np.random.default_rng(3)
    rows = [with_last(random_row(rng, random_sample, fill_row), seed) for seed in range(2)]
    fast, slow = (flat(gradients(d, rows, where, config)) for d, where in ((drafter.to(CUDA), CUDA), (dense, CPU)))
    assert (fast - slow).norm() / slow.norm() < 1e-4
    assert counters["stats"]["unique_graphs"] == (TEACHER_FRAMES if config.needs_last else FRAMES)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_gradients_equal_the_dense_reference(
    kind, dtype, tolerance, tiny_spec, tiny_drafter, random_sample, fill_row
) -> None:
    """The reference is the dense mask on a CPU in float64, with the same rounded weights."""
    drafter = tiny_drafter(wide(tiny_spec, **kind)).to(dtype)
    dense = copy.deepcopy(drafter).double()
    rng = np.random.default_rng(3)
    rows = [random_row(rng, random_sample, fill_row) for _ in range(3)]
    fast = gradients(drafter.to(CUDA), rows, CUDA)
    slow = gradients(dense, rows, CPU)
    assert (flat(fast) - flat(slow)).norm() / flat(slow).norm() < tolerance
    for name, gradient in slow.items():
        assert (fast[name] - gradient).norm() / gradient.norm() < 3 * tolerance, name


def test_checkpointed_layers_have_the_same_gradients(tiny_spec, tiny_drafter, random_sample, fill_row) -> None:
    found = []
    for is_checkpointed in (False, True):
        drafter = tiny_drafter(wide(tiny_spec, **MIXED)).to(CUDA)
        drafter.is_checkpointed = is_checkpointed
        rng = np.random.default_rng(3)
        rows = [random_row(rng, random_sample, fill_row) for _ in range(2)]
        found.append(flat(gradients(drafter, rows, CUDA)))
        assert counters["stats"]["unique_graphs"] == FRAMES
        torch._dynamo.reset()
        counters.clear()
    assert (found[0] - found[1]).norm() / found[0].norm() < 1e-6


def held_out(rng: np.random.Generator, random_sample, count: int) -> list[HeldOutSample]:
    samples = [random_sample(int(rng.integers(1 << 30)), int(rng.integers(20, 300))) for _ in range(count)]
    return [HeldOutSample(s.ids, s.loss_mask, s.taps[:, :-1]) for s in samples]


def work_through(step: TrainStep, rows, exams, every: int) -> list[float]:
    """Trains on rows with an exam after each `every`; gives the loss of each row."""
    batch, losses = RowBatch(step.drafter.spec, SHAPE, CUDA, torch.bfloat16), []
    for number, row in enumerate(rows):
        if number % every == 0:
            walk(step.drafter, step.embedding, step.head.weight, exams, SHAPE, forward=step.infer)
        step.reset()
        batch.load(row)
        step.accumulate(batch)
        losses.append(step.sums.metrics()["loss"])
    return losses


@pytest.mark.parametrize("has_graph", [False, True])
@pytest.mark.parametrize("kind", [{}, MIXED], ids=["one kind", "three kinds"])
def test_200_rows_of_random_lengths_and_exams_between_compile_nothing_more(
    kind, has_graph, tiny_spec, tiny_drafter, random_sample, fill_row
) -> None:
    rng = np.random.default_rng(0)
    drafter = tiny_drafter(wide(tiny_spec, **kind)).to(CUDA, torch.bfloat16)
    step = TrainStep(drafter, *frozen(), SHAPE, LossConfig(chunk_blocks=16), has_graph=has_graph)
    rows = (random_row(rng, random_sample, fill_row) for _ in range(200))
    with compiled_once(CUDA):
        losses = work_through(step, rows, held_out(rng, random_sample, 9), every=25)
    assert len(losses) == 200
    assert np.isfinite(losses).all()
    assert (0 if step.replay is None else step.replay.num_replays) == (198 if has_graph else 0)
    assert counters["stats"]["unique_graphs"] == FRAMES
    assert not counters["recompile_limit"]
    assert not counters["graph_break"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_gives_the_bits_of_its_launches(dtype, tiny_spec, tiny_drafter, random_sample, fill_row) -> None:
    """Six rows, an exam after the fourth, weights that move in between, and a last row over two others' sums."""
    found = []
    for has_graph in (False, True):
        rng = np.random.default_rng(4)
        drafter = tiny_drafter(wide(tiny_spec, **MIXED)).to(CUDA, dtype)
        step = TrainStep(drafter, *frozen(), SHAPE, LossConfig(weights="dpace"), has_graph=has_graph)
        batch, bits = RowBatch(drafter.spec, SHAPE, CUDA, dtype), []
        for number in range(6):
            batch.load(random_row(rng, random_sample, fill_row))
            step.accumulate(batch)
            bits.append((step.gradient_sum.clone(), step.sums.values.clone()))
            if number < 4:
                step.reset()
                with torch.no_grad():
                    drafter.fc.weight.mul_(1.01)
            if number == 3:
                walk(
                    drafter,
                    step.embedding,
                    step.head.weight,
                    held_out(rng, random_sample, 3),
                    SHAPE,
                    forward=step.infer,
                )
        found.append(bits)
        torch._dynamo.reset()
    for (left, left_sums), (right, right_sums) in zip(*found):
        assert torch.equal(left, right)
        assert torch.equal(left_sums, right_sums)
    assert step.replay is not None
    with pytest.raises(RuntimeError, match="number 0 is another"):
        step.accumulate(RowBatch(drafter.spec, SHAPE, CUDA, dtype))


def test_c31_many_lengths_need_no_frame_of_their_own_and_another_shape_is_refused(
    tiny_spec, tiny_drafter, random_sample, fill_row
) -> None:
    """Six lengths, each with gradients and without: torch's limit of eight versions is never near."""
    rng = np.random.default_rng(1)
    drafter = tiny_drafter(wide(tiny_spec)).to(CUDA, torch.bfloat16)
    step = TrainStep(drafter, *frozen(), SHAPE, LossConfig())
    rows = [random_row(rng, random_sample, fill_row, lengths=[length]) for length in C31_LENGTHS]
    with compiled_once(CUDA):
        work_through(step, rows, held_out(rng, random_sample, 3), every=1)
        assert counters["stats"]["unique_graphs"] == FRAMES
        longer = RowShape(row_tokens=2048, anchors=64, block_size=8)
        batch = RowBatch(drafter.spec, longer, CUDA, torch.bfloat16)
        batch.load(random_row(rng, random_sample, fill_row, shape=longer))
        with pytest.raises(RecompileError):
            step.accumulate(batch)


def test_neither_a_dense_nor_an_uncompiled_step_runs(tiny_spec, tiny_drafter, random_sample, fill_row) -> None:
    step = TrainStep(tiny_drafter(wide(tiny_spec)).to(CUDA, torch.bfloat16), *frozen(), SHAPE, LossConfig())
    batch = RowBatch(step.drafter.spec, SHAPE, CUDA, torch.bfloat16)
    batch.load(random_row(np.random.default_rng(2), random_sample, fill_row))
    inputs = batch.taps, step.block_embeds(batch), batch.positions, batch.block_positions
    with pytest.raises(RuntimeError, match=r"under torch\.compile"):
        step.drafter(*inputs, batch.masks)
    dense = torch.ones(SHAPE.num_queries, SHAPE.num_keys, dtype=torch.bool, device=CUDA)
    with pytest.raises(RuntimeError, match="a dense attention step is never run there"):
        step.forward(*inputs, (dense,))
