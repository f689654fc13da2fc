"""Flat buffers of bytes: views of arrays, reads and writes of many at once that the system cuts as it likes, and what
they leave in the page cache."""

import os
from collections.abc import Sequence

import numpy as np

FETCHED_BYTES = 1 << 20  # of one call; Linux fetches no more than a disk's largest request, or its readahead
MAX_BUFFERS = 1000  # buffers of one readv or writev call; Linux takes 1024 (IOV_MAX)


def flat_bytes(array: np.ndarray) -> np.ndarray:
    """A read-only flat byte view."""
    view = array.view(np.uint8).reshape(-1)
    view.flags.writeable = False
    return view


def write_all(fd: int, buffers: Sequence[memoryview]) -> None:
    """Writes flat byte buffers one after another; writev may write less than asked, so it loops."""
    for first in range(0, len(buffers), MAX_BUFFERS):
        left = [buffer for buffer in buffers[first : first + MAX_BUFFERS] if len(buffer)]
        while left:
            left = drop(left, os.writev(fd, left))


def read_all(fd: int, buffers: Sequence[memoryview], offset: int) -> bool:
    """Fills flat byte buffers from `offset` on; False where the file ends before they are full."""
    for first in range(0, len(buffers), MAX_BUFFERS):
        left = list(buffers[first : first + MAX_BUFFERS])
        missing = sum(map(len, left))
        while missing:
            count = os.preadv(fd, left, offset)
            if count == 0:
                return False
            offset, missing = offset + count, missing - count
            left = drop(left, count) if missing else []
    return True


def stop_readahead(fd: int) -> None:
    """From now on the system reads of this file what it is asked for, and nothing behind it: with 8 MiB of readahead,
    24 samples of 8 MiB were 425 MiB from the disk, of which 220 stayed in the page cache (Linux 6.18, 2026-12-01)."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def fetch_pages(fd: int, offset: int, size: int) -> None:
    """Has the system read these bytes into the page cache; it waits only where the disk's queue is full."""
    for begin in range(offset, offset + size, FETCHED_BYTES):
        os.posix_fadvise(fd, begin, min(FETCHED_BYTES, offset + size - begin), os.POSIX_FADV_WILLNEED)


def drop_pages(fd: int, offset: int, size: int) -> None:
    """Gives up the pages of these bytes in the page cache, for everybody: nobody reads them again soon."""
    os.posix_fadvise(fd, *whole_pages(offset, size), os.POSIX_FADV_DONTNEED)


def whole_pages(offset: int, size: int) -> tuple[int, int]:
    """Offset and length of the pages that hold these bytes: the kernel drops only whole ones."""
    page = os.sysconf("SC_PAGE_SIZE")
    first = offset // page * page
    return first, -(-(offset + size) // page) * page - first


def drop(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers after their first `count` bytes."""
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    rest = buffers[done:]
    if count:
        rest[0] = rest[0][count:]
    return rest
