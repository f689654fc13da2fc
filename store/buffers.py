"""Flat buffers of bytes: views of arrays, and reads and writes of many at once that the system cuts as it likes."""

import os
from collections.abc import Sequence

import numpy as np

MAX_BUFFERS = 1000  # buffers of one readv or writev call; Linux takes 1024 (IOV_MAX)


def flat_bytes(array: np.ndarray) -> np.ndarray:
    """A read-only flat byte view: google_crc32c takes it without a copy."""
    view = array.view(np.uint8).reshape(-1)
    view.flags.writeable = False
    return view


def write_all(fd: int, buffers: Sequence[memoryview]) -> None:
    """Writes flat byte buffers one after another; writev may write less than asked, so it loops."""
    for first in range(0, len(buffers), MAX_BUFFERS):
        left = [buffer for buffer in buffers[first : first + MAX_BUFFERS] if len(buffer)]
        while left:
            left = drop(left, os.writev(fd, left))


def read_all(fd: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> bool:
    """Fills flat byte buffers from `offset` on; False where the file ends before they are full.

    `flags` are those of preadv2.
    """
    for first in range(0, len(buffers), MAX_BUFFERS):
        left = list(buffers[first : first + MAX_BUFFERS])
        missing = sum(map(len, left))
        while missing:
            count = os.preadv(fd, left, offset, flags)
            if count == 0:
                return False
            offset, missing = offset + count, missing - count
            left = drop(left, count) if missing else []
    return True


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
