"""Time on the device: events on CUDA, the clock on a CPU. Medians, after a warm-up."""

import statistics
import time
from collections.abc import Callable

import torch

Mark = torch.cuda.Event | float
PEAK_SIZE = 8192
REST_S = 5.0


def mark(device: torch.device) -> Mark:
    """A moment in the device's queue."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def ms_between(begin: Mark, end: Mark) -> float:
    """Milliseconds; the device must have passed both."""
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return begin.elapsed_time(end)
    assert not isinstance(end, torch.cuda.Event)
    return (end - begin) * 1e3


def finish(device: torch.device) -> None:
    """Waits for everything in the device's queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(run: Callable[[], object], device: torch.device, *, rounds: int = 7, inner: int = 4) -> float:
    """Milliseconds of one `run`: the median of rounds of `inner` runs, after one round that is not counted."""
    marks = []
    for _ in range(rounds + 1):
        begin = mark(device)
        for _ in range(inner):
            run()
        marks.append((begin, mark(device)))
    finish(device)
    return statistics.median(ms_between(*pair) for pair in marks[1:]) / inner


def matmul_tflops(device: torch.device, size: int = PEAK_SIZE, *, rounds: int = 9) -> float:
    """TFLOP/s of a square bf16 product of random numbers: what the device reaches, not what its datasheet says.

    As many rounds as by default bring a card at its power limit down to the clock that it can keep.
    """
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    ms = median_ms(lambda: torch.mm(a, b, out=out), device, rounds=rounds, inner=10 if device.type == "cuda" else 1)
    return 2 * size**3 / ms / 1e9


def burst_tflops(device: torch.device, size: int = PEAK_SIZE) -> float:
    """The same of ten products after a rest, before a power limit takes hold: a rate that no run can keep."""
    finish(device)
    time.sleep(REST_S if device.type == "cuda" else 0.0)
    return matmul_tflops(device, size, rounds=1)
