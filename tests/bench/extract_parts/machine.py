"""What the machine gives by itself: the disk's write rate, and when the device had nothing to do."""

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

BLOCK_BYTES = 8 << 20
TO_AND_FROM_HOST = ("Memcpy HtoD", "Memcpy DtoH")  # as the profiler names them


def write_rate(folder: Path, num_bytes: int) -> float:
    """Bytes a second of plain writing, past the page cache where the file system can, synced at the end."""
    path, block = folder / "bare-write", mmap.mmap(-1, BLOCK_BYTES)
    block.write(os.urandom(BLOCK_BYTES))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError:  # a RAM disk has no other way than the page cache
        fd = os.open(path, flags, 0o666)
    try:
        started, done = time.perf_counter(), 0
        while done < num_bytes:
            done += os.write(fd, block)
        os.fdatasync(fd)
        return done / (time.perf_counter() - started)
    finally:
        os.close(fd)
        path.unlink()


def idle_share(run: Callable[[], None]) -> tuple[float, float]:
    """The share of a run in which the device computed nothing, from its first kernel to its last; the longest gap, ms.

    Kernels, fills and copies inside the device count as computing, copies from and to the host do not.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in seen.events() or ()
        if str(event.device_type).endswith("CUDA") and not event.name.startswith(TO_AND_FROM_HOST)
    ]
    if not kernels:
        raise RuntimeError("the profiler saw no kernel")
    return gaps(kernels)


def gaps(kernels: list[tuple[float, float]]) -> tuple[float, float]:
    """Of intervals in microseconds, which may overlap: the share between the first and the last that none covers, and
    the longest such gap in milliseconds."""
    ordered = sorted(kernels)
    idle, longest, covered = 0.0, 0.0, ordered[0][1]
    for start, end in ordered[1:]:
        gap = max(0.0, start - covered)
        idle, longest, covered = idle + gap, max(longest, gap), max(covered, end)
    whole = covered - ordered[0][0]
    return (idle / whole if whole else 0.0), longest / 1e3
