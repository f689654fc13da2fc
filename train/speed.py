"""How fast an update was, how much memory it took, and how far ahead the loader was. Knows clocks and the device."""

import resource
import statistics
from collections.abc import Sequence
from typing import Any

import torch

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
    taken_ms = []
    for _ in range(PEAK_ROUNDS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(device))
        for _ in range(PEAK_CALLS):
            torch.mm(a, b, out=out)
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        taken_ms.append(begin.elapsed_time(end))
    del a, b, out
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return 2 * PEAK_SIZE**3 * PEAK_CALLS / statistics.median(taken_ms[1:]) * 1e3


def throughput(facts: RunFacts, step: int, counts: RowCounts, step_s: float, wait_s: float) -> dict[str, float]:
    """What the rows of update `step` held, those of all ranks, and how fast they went."""
    shape, num_rows = facts.shape, facts.rows_per_step
    return {
        "epoch": step * num_rows / facts.rows_per_epoch,
        "num_samples": counts.num_samples,
        "num_tokens": counts.num_tokens,
        "num_blocks": counts.num_anchors,
        "fill": counts.num_tokens / (num_rows * shape.row_tokens),
        "step_s": step_s,
        "wait_s": wait_s,
        "rate_block_tok_s": num_rows * shape.anchors * shape.block_size / step_s,
    }


def speed_numbers(
    rows: Sequence[StagedRow], num_tokens: int, step_s: float, device: torch.device, peak_flops: float | None
) -> dict[str, Any]:
    """Rates, memory and queue of an update, by their names in metrics.jsonl.

    `rows` are this rank's, `num_tokens` those of all ranks.
    """
    rate = sum(row.flops for row in rows) / step_s
    return {
        "rate_tok_s": num_tokens / step_s,
        "rate_tflops": rate / 1e12,
        "memory_peak_bytes": memory_peak_bytes(device),
        "rows_ready": statistics.mean(row.num_ready for row in rows),
        **({} if peak_flops is None else {"mfu": rate / peak_flops}),
    }


def memory_peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
