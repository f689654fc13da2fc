"""Files that appear whole or not at all, locks that end with their process, and errors of the disk.

This file knows bytes, names and the operating system; it does not know what the bytes mean.
"""

import errno
import fcntl
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .. import UserError, system_reason
from .buffers import write_all
from .size import human_bytes

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

SEGMENT_TEMPORARY = re.compile(r"(?:c\.(\d+)\.0\.0|(\d+)\.arrow)\.tmp\.")
SEGMENT_FOLDERS = ("hidden", "last", "commits")


def temporary_path(path: Path) -> Path:
    """Where `path` is written before it is whole: `NAME.tmp.HOST.PID` beside it."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:60] or "host"
    return path.with_name(f"{path.name}.tmp.{host}.{os.getpid()}")


def is_abandoned(temporary: Path) -> bool:
    """True for the temporary of a process of this machine that lives no more."""
    name, _, pid = temporary.name.rpartition(".")
    ending = temporary_path(Path("x")).name[1:].rpartition(".")[0]  # .tmp.HOST
    return name.endswith(ending) and pid.isdecimal() and not Path(f"/proc/{pid}").exists()


def fsync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it, so that a power cut does not take it away again."""
    missing = [place for place in folder.absolute().parents if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in (folder.absolute(), *missing):  # the folder itself always: who made it may not have synced
        with suppress(PermissionError):  # a folder above that we may not read cannot be synced
            fsync_folder(made.parent)


class NewFile:
    """A file that appears whole and durable under its final name, or not at all.

    As a context manager it finishes at the end and aborts on an exception. An OSError removes
    the temporary and is raised as the UserError that `explain` makes of it. It has what Arrow
    asks of a sink: `write` and `closed`.
    """

    def __init__(self, path: Path, *, explain: Callable[[OSError, Path], UserError] | None = None) -> None:
        self.path = path
        self.temporary = temporary_path(path)
        self.explain = explain or storage_error
        self.closed = False
        self.fd = -1
        self.size_bytes = 0
        with self.explained():
            self.fd = self.open_temporary()

    def open_temporary(self) -> int:
        return os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turns an OSError of its body into a UserError, after removing the temporary."""
        try:
            yield
        except OSError as error:
            explanation = self.explain(error, self.path)
            self.abort()
            raise explanation from error

    def write(self, data: Any) -> int:
        """Appends bytes or a flat byte buffer; returns their number."""
        return self.write_buffers([memoryview(data)])

    def write_buffers(self, buffers: Sequence[memoryview]) -> int:
        """Appends flat byte buffers in one go, without joining them."""
        if self.closed:
            raise ValueError(f"{str(self.path)!r} is closed")
        count = sum(map(len, buffers))
        with self.explained():
            write_all(self.fd, buffers)
        self.size_bytes += count
        return count

    def patch(self, offset: int, data: bytes) -> None:
        """Overwrites bytes that were written before."""
        with self.explained():
            os.pwrite(self.fd, data, offset)

    def finish(self) -> int:
        """Syncs, renames to the final name, syncs the folder; returns the bytes of the file."""
        with self.explained():
            self.complete()
            os.fdatasync(self.fd)
            os.replace(self.temporary, self.path)
            fsync_folder(self.path.parent)
        self.close()
        return self.size_bytes

    def complete(self) -> None:
        """Hands the system what is not with it yet; here nothing is held back."""

    def abort(self) -> None:
        """Removes the temporary; a file published earlier under this name stays.

        Raises no OSError: whoever aborts has one already. What stays is removed by the next start.
        """
        if self.fd >= 0:
            with suppress(OSError):
                self.close()
            with suppress(OSError):
                self.temporary.unlink(missing_ok=True)
        self.closed = True

    def close(self) -> None:
        fd, self.fd, self.closed = self.fd, -1, True
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()


def publish(path: Path, data: bytes, *, explain: Callable[[OSError, Path], UserError] | None = None) -> None:
    """Writes `data` aside, syncs it, renames it to `path` and syncs the folder."""
    with NewFile(path, explain=explain) as file:
        file.write(data)


def free_bytes(folder: Path) -> int:
    """Bytes an ordinary user may still write where `folder` is or will be."""
    facts = file_system(folder)
    return facts.f_bavail * facts.f_frsize


def file_system(folder: Path) -> os.statvfs_result:
    """What the system says of the file system on which `folder` is or will be."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return os.statvfs(folder)


def lacks_inodes(folder: Path) -> bool:
    """True where bytes are free, but no file can be made: btrfs counts no inodes, XFS has none when no byte is free."""
    facts = file_system(folder)
    return facts.f_files > 0 and facts.f_favail == 0 and facts.f_bavail > 0


class StorageError(UserError):
    """A UserError about the disk: it says nothing of what was being written."""


def storage_error(
    error: OSError,
    path: Path,
    *,
    needed_bytes: int | None = None,
    is_most: bool = False,
    safe: str = "what was published before stays safe",
) -> StorageError:
    """The one message for a disk that is full, broken or read-only: path, bytes, what stays safe.

    `is_most`: the bytes needed are a bound, since the codec compresses.
    """
    most = "at most " if is_most else ""
    needed = "" if needed_bytes is None else f"; {most}{exact_bytes(needed_bytes)} are still to write"
    happened = f"writing {str(path)!r} failed: {system_reason(error)}{needed}"
    again = f"then give the same command again; {safe}"
    is_full_of_files = False
    try:
        free = f"{exact_bytes(free_bytes(path.parent))} are free at {str(path.parent)!r}"
        is_full_of_files = lacks_inodes(path.parent)
    except OSError as unknown:
        free = f"free space at {str(path.parent)!r} is unknown: {system_reason(unknown)}"
    if error.errno in NO_SPACE and is_full_of_files:
        expected = f"a free inode for each new file: none is left (see `df -i`), though {free}"
        return StorageError(happened, expected, f"remove files that you do not need, {again}")
    if error.errno in NO_SPACE:
        return StorageError(happened, f"more free space; {free}", f"free space, {again}")
    if error.errno == errno.EIO:
        expected = f"a disk that takes what is written to it; {free}"
        return StorageError(happened, expected, f"check the disk and its log, {again}")
    if error.errno == errno.EFBIG:
        expected = f"no limit to the size of a file (`ulimit -f`), on a file system that takes large ones; {free}"
        return StorageError(happened, expected, f"raise the limit, {again}")
    expected = f"a folder that exists and may be written to; {free}"
    return StorageError(happened, expected, f"check mount, rights and path, {again}")


def unreadable(error: OSError, path: Path) -> UserError:
    """What is said of a file that is there and cannot be read."""
    return UserError(
        f"reading {str(path)!r} failed: {system_reason(error)}",
        "a file that you may read, on a disk that gives it back",
        "check its rights, the mount, the disk and its log; nothing was changed",
    )


def exact_bytes(size_bytes: int) -> str:
    return f"{human_bytes(size_bytes)} ({size_bytes} bytes)"


def remove_temporaries(store_dir: Path, segments: Collection[int]) -> list[Path]:
    """Removes what killed writers of these segments left in a store; returns the removed paths.

    Whoever calls this holds the segments: temporaries of any other segment are left alone. Raises UserError for one
    that cannot be removed.
    """
    wanted = set(segments)
    removed = []
    for folder in SEGMENT_FOLDERS:
        if not (store_dir / folder).is_dir():
            continue
        with disk_errors(store_dir / folder):
            for entry in os.scandir(store_dir / folder):
                match = SEGMENT_TEMPORARY.match(entry.name)
                if match and int(match[1] or match[2]) in wanted:
                    remove(Path(entry.path))
                    removed.append(Path(entry.path))
    return removed


def close_quietly(fd: int) -> None:
    """Closes a file whose content is done with: a network disk that fails even at that hides no other error."""
    with suppress(OSError):
        os.close(fd)


def remove(path: Path) -> None:
    """Removes a file that may be gone already; UserError where it stays."""
    with disk_errors(path):
        path.unlink(missing_ok=True)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raises an OSError of its body, which writes nothing but `path` or below it, as its `storage_error`."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path) from error


class FolderLock:
    """Holds a folder for one process, through `flock` on a file in it; ends with the process.

    Those with `is_shared` hold it together, and keep out whoever wants it alone. Raises UserError, naming the holder,
    where the lock is still taken after `wait_s` seconds, and where its file cannot be written.
    """

    def __init__(self, folder: Path, *, name: str = ".lock", wait_s: float = 0.0, is_shared: bool = False) -> None:
        self.path = folder / name
        self.wait_s = wait_s
        self.kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
        self.fd: int | None = None

    def __enter__(self) -> "FolderLock":
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self.take(fd)
            except BaseException:
                close_quietly(fd)
                raise
        except OSError as error:
            raise storage_error(error, self.path) from error
        self.fd = fd
        return self

    def take(self, fd: int) -> None:
        """Waits at most `wait_s` for the lock and writes our name into the file."""
        end = time.monotonic() + self.wait_s
        while True:
            try:
                fcntl.flock(fd, self.kind | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= end:
                    raise self.taken(fd) from error
                time.sleep(min(0.1, max(0.0, end - time.monotonic())))
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def taken(self, fd: int) -> UserError:
        holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "unknown"
        return UserError(
            f"{str(self.path.parent)!r} is in use by process {holder} (waited {self.wait_s:g} s)",
            "one process at a time in this folder",
            "wait for it to end, or stop it; a lock never outlives its process",
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        fd, self.fd = self.fd, None
        if fd is not None:
            close_quietly(fd)
