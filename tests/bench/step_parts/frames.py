"""How often torch compiles while rows of random lengths are trained on and exams come between."""

from collections.abc import Iterator

import numpy as np
import torch
from dflash_offline.store.samples import eligible_anchors
from dflash_offline.train.evaluate.walk import HeldOutSample, walk
from dflash_offline.train.packing import choose_anchors, pack_rows
from dflash_offline.train.slot import RowArrays, RowSlot
from torch._dynamo.utils import counters

from .cases import Case
from .ours import Choices, Ours
from .table import Part

EXAM_EVERY = 10  # rows
EXAM_SAMPLES = 9
LONGEST = 0.5  # of a row


def random_rows(case: Case, count: int) -> Iterator[RowArrays]:
    """Packed by the package from samples of random lengths, the question's tokens not trained on."""
    rng, shape = np.random.default_rng(0), case.shape
    lengths = rng.integers(16, int(case.row_tokens * LONGEST), 20 * count)
    packed = pack_rows(lengths, np.zeros(len(lengths)), case.row_tokens, seed=0, epoch=0, shuffle_segments=1)
    row = RowSlot(shape=shape, num_taps=case.taps, hidden_size=case.hidden, codec_name="raw").allocate()
    assert len(packed) >= count
    for number, samples in enumerate(packed[:count]):
        fill(row, lengths[samples], case.vocabulary, rng)
        eligible = np.zeros(case.row_tokens, np.bool_)
        for sample in range(len(samples)):
            own = np.flatnonzero(row.sample_ids == sample)
            eligible[own] = eligible_anchors(row.loss_mask[own])
        row.anchors[:], row.keep[:] = choose_anchors(
            eligible, row.sample_ids, shape.anchors, unit=shape.unit, seed=0, epoch=0, row=number
        )
        yield row


def fill(row: RowArrays, lengths: np.ndarray, vocabulary: int, rng: np.random.Generator) -> None:
    """Samples of these lengths one after another, padding behind them."""
    end = 0
    row.ids[:], row.loss_mask[:], row.taps[:] = 0, False, 0
    row.sample_ids[:], row.positions[:] = -1, 0
    for number, length in enumerate(lengths.tolist()):
        begin, end = end, end + length
        row.ids[begin:end] = rng.integers(0, vocabulary - 1, length)
        row.loss_mask[begin + int(rng.integers(1, length - 2)) : end] = True
        row.sample_ids[begin:end], row.positions[begin:end] = number, np.arange(length)
        row.taps[:, begin : end - 1] = random_bits(rng, row.taps[:, begin : end - 1].shape)


def random_bits(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random bfloat16 as bytes [..., row_bytes]."""
    drawn = torch.from_numpy(rng.standard_normal((*shape[:-1], shape[-1] // 2), np.float32))
    return drawn.to(torch.bfloat16).view(torch.uint8).numpy()


def random_exam(case: Case) -> list[HeldOutSample]:
    """Recorded samples of random lengths."""
    rng = np.random.default_rng(1)
    samples = []
    for length in rng.integers(20, int(case.row_tokens * LONGEST), EXAM_SAMPLES).tolist():
        bits = random_bits(rng, (case.taps, length - 1, 2 * case.hidden)).view(np.uint16)
        ids = rng.integers(0, case.vocabulary - 1, length)
        samples.append(HeldOutSample(ids, np.arange(length) >= length // 4, bits))
    return samples


def measure(part: Part, case: Case, device: torch.device, num_rows: int) -> None:
    """Frames after one exam and one row, and what was compiled in all rows and exams after them."""
    ours, exam = Ours(case, device, Choices()), random_exam(case)
    head = ours.step.head.weight

    def examine() -> None:
        walk(ours.drafter, ours.step.embedding, head, exam, case.shape, forward=ours.step.infer)

    rows = random_rows(case, num_rows + 1)
    examine()
    ours.run([next(rows)])
    warm = counters["stats"]["unique_graphs"]
    losses, num_exams = [], 0
    for number, row in enumerate(rows):
        if number % EXAM_EVERY == 0:
            examine()
            num_exams += 1
        ours.run([row])
        losses.append(ours.step.sums.metrics()["loss"])
    assert len(losses) == num_rows
    assert np.isfinite(losses).all()
    if device.type != "cuda":
        part.left_out["recompiles"] = "nothing is compiled on a CPU"
        return
    part.put("recompiles", counters["stats"]["unique_graphs"] - warm, "count")
    part.put("compiled_frames", warm, "count")
    part.put("recompile_limits_hit", sum(counters["recompile_limit"].values()), "count")
    part.put("graph_breaks", sum(counters["graph_break"].values()), "count")
    part.put("recompiles_rows", num_rows, "count")
    part.put("recompiles_exams", num_exams, "count")
