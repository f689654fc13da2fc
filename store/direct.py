"""Writes past the page cache: whole blocks out of one aligned buffer per thread, the odd rest at the end.

A store is larger than memory and written once: the page cache would copy every byte once more and throw out what
others had in it. Where a file system refuses O_DIRECT the same bytes go through the page cache, and one line says so.
"""

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from .. import errno_name
from ..progress import say
from .checksum import crc32c
from .files import NewFile

BLOCK_BYTES = 4096  # memory, offset and length of a direct write are multiples of it
HUGE_PAGE_BYTES = 2 << 20
# On huge pages and in the L3 cache: 0.007 CPU-s/GB of writing against 0.005 with 8 MiB, 0.013 with 2 MiB, 0.033 on
# ordinary pages (2 cores Zen 4, ext4 on a virtual disk, Linux 6.18; H=5120, 5 taps, lognormal lengths).
BUFFER_BYTES = 4 << 20
# numpy's own loop instead of memcpy: where source and target lie differently in their pages, memcpy took twice the time
# (glibc 2.36 on Zen 4: 0.109 against 0.051 CPU-s/GB). np.copyto again where a measurement says so.
copy = np.positive
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)  # of a file system without O_DIRECT, at opening or at the first write


class Bounce(threading.local):
    """The aligned buffer of a thread; nothing stays in it between two samples, so every open file can use it."""

    def __init__(self) -> None:
        # private: by default a forked child would write into its parent's buffer
        memory = mmap.mmap(-1, BUFFER_BYTES + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a hint, refused by kernels without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, dtype=np.uint8)
        start = -whole.ctypes.data % HUGE_PAGE_BYTES
        self.bytes = whole[start : start + BUFFER_BYTES]
        self.is_taken = False


BOUNCE = Bounce()


class Refusal:
    """Says once in a process that direct writing was refused."""

    was_said = False

    @classmethod
    def say(cls, path: Path, error: OSError) -> None:
        if not cls.was_said:
            cls.was_said = True
            name = errno_name(error)
            say(f"{str(path.parent)!r} refuses direct writes (O_DIRECT, {name}): slower, through the page cache")


class DirectFile(NewFile):
    """A NewFile of large appends; between two of them it holds less than a block in memory."""

    offset = 0  # bytes on the disk, a multiple of the block
    rest = b""

    def open_temporary(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            return os.open(self.temporary, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            Refusal.say(self.path, error)
            return os.open(self.temporary, flags, 0o666)

    def write_buffers(self, buffers: Sequence[memoryview]) -> int:
        with self.filling() as filling:
            for data in buffers:
                filling.append(np.frombuffer(data, dtype=np.uint8))
        return sum(map(len, buffers))

    @contextmanager
    def filling(self) -> Iterator["Filling"]:
        """For appends that belong together: other files of the thread cannot be written inside the block."""
        if self.closed:
            raise ValueError(f"{str(self.path)!r} is closed")
        assert not BOUNCE.is_taken, "two files of a thread are written at once"
        BOUNCE.is_taken = True
        try:
            filling = Filling(self)
            yield filling
            filling.end()
        finally:
            BOUNCE.is_taken = False

    def put(self, count: int) -> None:
        """Writes the first `count` bytes of the buffer, a multiple of the block."""
        view, done = BOUNCE.bytes.data, 0
        with self.explained():
            while done < count:
                written = self.put_some(view[done:count])
                done += written
                self.offset += written

    def put_some(self, view: memoryview) -> int:
        """Writes a part of the buffer at the end of the file: whole blocks, at least one."""
        try:
            written = os.pwrite(self.fd, view, self.offset)
        except OSError as error:
            flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
            if error.errno not in REFUSALS or not flags & os.O_DIRECT:
                raise
            Refusal.say(self.path, error)
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            written = os.pwrite(self.fd, view, self.offset)
        if written < BLOCK_BYTES:  # a disk, or a limit, that is full inside a block: what comes next says which
            flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            while written < BLOCK_BYTES:
                written += os.pwrite(self.fd, view[written:BLOCK_BYTES], self.offset + written)
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
        return written // BLOCK_BYTES * BLOCK_BYTES  # what was cut inside a block is written again

    def complete(self) -> None:
        """Writes the rest as a block filled up with zeros and cuts the file to its length."""
        if self.rest:
            BOUNCE.bytes[:BLOCK_BYTES] = np.frombuffer(self.rest.ljust(BLOCK_BYTES, b"\0"), dtype=np.uint8)
            self.put(BLOCK_BYTES)
            self.rest = b""
        os.ftruncate(self.fd, self.size_bytes)

    def patch(self, offset: int, data: bytes) -> None:
        raise ValueError(f"{str(self.path)!r} is written in blocks; nothing in it can be changed")


class Filling:
    """Copies into the buffer, and from there to the disk whenever it is full."""

    def __init__(self, file: DirectFile) -> None:
        self.file = file
        self.bytes = BOUNCE.bytes
        self.filled = len(file.rest)
        self.bytes[: self.filled] = np.frombuffer(file.rest, dtype=np.uint8)

    def append(self, source: np.ndarray, crc: int = 0) -> int:
        """Takes flat bytes u8 and returns `crc` extended over them (crc32c), from the copy still in the cache."""
        start, size = 0, len(source)
        while start < size:
            filled = self.filled
            end = min(filled + size - start, BUFFER_BYTES)
            copy(source[start : start + end - filled], out=self.bytes[filled:end])
            crc = crc32c(self.bytes[filled:end], crc)
            start += end - filled
            self.advance(end)
        self.file.size_bytes += size
        return crc

    def seal(self, checksum: bytes) -> None:
        """Takes the few bytes of a checksum."""
        end = self.filled + len(checksum)
        if end > BUFFER_BYTES:
            self.append(np.frombuffer(checksum, dtype=np.uint8))
            return
        self.bytes.data[self.filled : end] = checksum
        self.file.size_bytes += len(checksum)
        self.advance(end)

    def advance(self, end: int) -> None:
        self.filled = end
        if end == BUFFER_BYTES:
            self.file.put(end)
            self.filled = 0

    def end(self) -> None:
        """Writes the whole blocks and leaves the rest with the file."""
        whole = self.filled // BLOCK_BYTES * BLOCK_BYTES
        self.file.put(whole)
        self.file.rest = self.bytes[whole : self.filled].tobytes()
