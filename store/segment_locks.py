"""Segments of a store held by one of several launchers that share it.

A record lock on `.segments.lock`, a byte a segment: it ends with its process, works across the nodes of a file system
that has such locks, and says nothing to whoever only reads or writes states.
"""

import errno
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from .. import UserError
from .files import close_quietly, storage_error

LOCK_NAME = ".segments.lock"
TAKEN = (errno.EACCES, errno.EAGAIN)


class SegmentLocks:
    """Holds ranges of segments; raises UserError where another process holds one of them.

    One such lock a store and process: closing any other file of that name in the process would free it (POSIX).
    """

    def __init__(self, store_dir: Path, segments: Iterable[range]) -> None:
        self.path = store_dir / LOCK_NAME
        self.segments = list(segments)
        self.fd = -1

    def __enter__(self) -> "SegmentLocks":
        try:
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            for segments in self.segments:
                self.take(segments)
        except BaseException as error:
            self.release()
            if isinstance(error, OSError):
                raise storage_error(error, self.path) from error
            raise
        return self

    def take(self, segments: range) -> None:
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, len(segments), segments.start)
        except OSError as error:
            if error.errno not in TAKEN:
                raise
            raise UserError(
                f"segments {segments.start}-{segments.stop - 1} of {str(self.path.parent)!r} are in part held "
                "by another launcher",
                "launchers that agree on --shards and --budget, each with shards of its own in --only",
                "correct --only, or wait for the other one; a lock never outlives its process",
            ) from error

    def release(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close_quietly(fd)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
