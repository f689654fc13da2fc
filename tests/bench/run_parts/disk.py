"""What the disk gives by itself: bare reads past the page cache."""

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE_BYTES = 8 << 20
MOST_BYTES = 8 << 30
THREADS = (1, 4)


def drop_from_cache(files: Sequence[Path]) -> None:
    """Writes them out and takes them from the page cache."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_rate(files: Sequence[Path]) -> float:
    """Bytes a second of reading whole files past the page cache, with as many threads as read fastest."""
    best = 0.0
    for threads in THREADS:
        started = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            done = sum(pool.map(read_whole, within(files)))
        best = max(best, done / (time.perf_counter() - started))
    return best


def within(files: Sequence[Path]) -> list[Path]:
    """The first files, up to MOST_BYTES, one at the least."""
    chosen, total = [], 0
    for path in files:
        chosen.append(path)
        total += path.stat().st_size
        if total >= MOST_BYTES:
            break
    return chosen


def read_whole(path: Path) -> int:
    """Reads a file in pieces and gives its bytes. A file system without direct reads has no bare rate: OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        done, count = 0, PIECE_BYTES
        with mmap.mmap(-1, PIECE_BYTES) as piece:
            while count == PIECE_BYTES:  # less only at the end, which no direct read may begin behind
                count = os.preadv(fd, [piece], done)
                done += count
        return done
    finally:
        os.close(fd)
