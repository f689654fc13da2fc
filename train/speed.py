"""How fast an update was, how much memory it took, and how far ahead the loader was. Knows clocks and the device."""

import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .clock import Moment, StepTimes
from .facts import RunFacts
from .order import RowCounts
from .staging import StagedRow

PEAK_SIZE, PEAK_ROUNDS, PEAK_CALLS = 8192, 5, 10
KIB = 1024


def measured_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of a square matrix product on a CUDA device, the median of a few rounds; None on a CPU.

    Takes about 0.1 s, and 0.4 GB that it gives back. To be called once, before anything else is on the device.
    """
    if device.type != "cuda":
        return None
    a, b = (torch.randn(PEAK_SIZE, PEAK_SIZE, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    taken_s = []
    for _ in range(PEAK_ROUNDS + 1):
        began = Moment(device)
        for _ in range(PEAK_CALLS):
            torch.mm(a, b, out=out)
        taken_s.append(began.seconds_to(Moment(device)))
    del a, b, out
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return 2 * PEAK_SIZE**3 * PEAK_CALLS / statistics.median(taken_s[1:])


def row_numbers(
    facts: RunFacts, step: int, counts: RowCounts, rows: Sequence[StagedRow], device: torch.device
) -> dict[str, Any]:
    """What update `step` worked on, by the names of metrics.jsonl: known as soon as it was sent to the device.

    `counts` are those of the rows of all ranks, `rows` this rank's.
    """
    return {
        "epoch": step * facts.rows_per_step / facts.rows_per_epoch,
        "num_samples": counts.num_samples,
        "num_tokens": counts.num_tokens,
        "num_blocks": counts.num_anchors,
        "fill": counts.num_tokens / (facts.rows_per_step * facts.shape.row_tokens),
        "memory_peak_bytes": memory_peak_bytes(device),
        "rows_ready": statistics.mean(row.num_ready for row in rows),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpeed:
    """How fast an update was, to be read when the device has done it."""

    times: StepTimes
    num_tokens: int  # of all ranks
    num_positions: int  # draft positions of all ranks' rows, spare ones too
    flops: float  # of this rank's rows
    peak_flops: float | None

    def numbers(self) -> dict[str, float]:
        """Times and rates by their names in metrics.jsonl; waits for the end of the update."""
        step_s = self.times.step_s()
        rate = self.flops / step_s
        return {
            "step_s": step_s,
            "wait_s": self.times.wait_s(),
            "rate_block_tok_s": self.num_positions / step_s,
            "rate_tok_s": self.num_tokens / step_s,
            "rate_tflops": rate / 1e12,
            **({} if self.peak_flops is None else {"mfu": rate / self.peak_flops}),
        }


def memory_peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
