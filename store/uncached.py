"""Reads that leave nothing in the page cache, for stores larger than memory: nobody reads those bytes again soon.

Linux from 6.14 on drops the pages itself (RWF_DONTCACHE); elsewhere they are given up after each read, which costs a
second system call and drops pages that others had cached, too. Which way it is is found at the first read and said.
"""

import errno
import os
from collections.abc import Sequence
from threading import Lock

from .. import errno_name
from ..progress import say
from .buffers import read_all

RWF_DONTCACHE = 0x80  # include/uapi/linux/fs.h; Python 3.11 has no name for it
REFUSALS = (errno.EOPNOTSUPP, errno.EINVAL)  # of a kernel or a file system that does not know the flag


class UncachedReads:
    """Stands in for `buffers.read_all`; one for a store, shared by its threads."""

    def __init__(self) -> None:
        self.flags = RWF_DONTCACHE
        self.lock = Lock()

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> bool:
        """Fills flat byte buffers from `offset` on; False where the file ends before they are full."""
        if self.flags:
            try:
                return read_all(fd, buffers, offset, self.flags)
            except OSError as error:
                if error.errno not in REFUSALS:
                    raise
                self.give_up(error)
        is_full = read_all(fd, buffers, offset)
        os.posix_fadvise(fd, *whole_pages(offset, sum(map(len, buffers))), os.POSIX_FADV_DONTNEED)
        return is_full

    def give_up(self, error: OSError) -> None:
        with self.lock:
            if self.flags:
                self.flags = 0
                name = errno_name(error)
                say(f"uncached reads: no RWF_DONTCACHE here ({name}); pages are dropped after each read instead")


def whole_pages(offset: int, size: int) -> tuple[int, int]:
    """Offset and length of the pages that hold these bytes: the kernel drops only whole ones."""
    page = os.sysconf("SC_PAGE_SIZE")
    first = offset // page * page
    return first, -(-(offset + size) // page) * page - first
