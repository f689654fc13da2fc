"""A ring of equal slots in memory that two processes share and that dies with them.

The memory is a memfd: it has no name in any file system, so a killed process leaves nothing.
The ring carries bytes only; who may write which slot when is agreed elsewhere.
"""

import fcntl
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import UserError, system_reason
from .size import human_bytes

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class RingHandle:
    """What another process of the same user needs to open a ring; plain values, so it pickles."""

    pid: int
    fd: int
    name: str
    slot_bytes: int
    slots: int


class Ring:
    """`slots` slots of `slot_bytes` each, every slot starting on a memory page.

    Made by `create` in one process, opened by `open` in others while the creator lives. The
    memory stays until the last process closes its ring and drops its views.
    """

    def __init__(self, fd: int, handle: RingHandle) -> None:
        self.fd = fd
        self.own = handle
        memory = mmap.mmap(fd, stride(handle.slot_bytes) * handle.slots)
        self.bytes: np.ndarray | None = np.frombuffer(memory, dtype=np.uint8)

    @classmethod
    def create(cls, slot_bytes: int, slots: int) -> "Ring":
        """A new ring, its memory reserved at once; UserError where there is not enough."""
        if slot_bytes < 1 or slots < 1:
            raise ValueError(f"{slots} slots of {slot_bytes} bytes: both must be at least 1")
        size_bytes, free = stride(slot_bytes) * slots, available_bytes()
        if size_bytes > free:  # the reservation below would not fail but call the OOM killer
            raise UserError(
                f"a ring of {slots} slots of {human_bytes(slot_bytes)} does not fit into memory",
                f"{human_bytes(size_bytes)} of available memory; there are {human_bytes(free)}",
                "use fewer loader slots or shorter rows",
            )
        name = f"dflash-ring-{secrets.token_hex(8)}"
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(fd, RingHandle(os.getpid(), fd, name, slot_bytes, slots))
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise UserError(
                    f"a ring of {slots} slots of {human_bytes(slot_bytes)} cannot be made: {system_reason(error)}",
                    f"{human_bytes(size_bytes)} of memory that this process may share; no disk is needed",
                    "use fewer or smaller slots, or raise the limits of this process (`ulimit -f`, `ulimit -v`)",
                ) from error
            raise

    @classmethod
    def open(cls, handle: RingHandle) -> "Ring":
        """The ring of another process; UserError where that process is gone or hides it."""
        path = f"/proc/{handle.pid}/fd/{handle.fd}"
        try:
            is_same = os.readlink(path) == f"/memfd:{handle.name} (deleted)"
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC) if is_same else -1
        except OSError:
            fd = -1
        if fd < 0:
            raise UserError(
                f"ring {handle.name!r} of process {handle.pid} cannot be opened",
                "a living process of the same user that made it",
                "look at the output of that process: it ended, or closed its ring",
            )
        return cls(fd, handle)

    def handle(self) -> RingHandle:
        """What another process passes to `Ring.open`."""
        return self.own

    def slot(self, number: int) -> np.ndarray:
        """Slot `number` as a writable byte view [slot_bytes] u8 of the shared memory."""
        if self.bytes is None:
            raise ValueError("the ring is closed")
        if not 0 <= number < self.own.slots:
            raise IndexError(f"slot {number} of {self.own.slots}")
        first = number * stride(self.own.slot_bytes)
        return self.bytes[first : first + self.own.slot_bytes]

    def close(self) -> None:
        """Lets go of the memory; views handed out keep it mapped until they are dropped."""
        self.bytes = None
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def available_bytes() -> int:
    """Memory a process may still take: what the kernel calls available, or less by its cgroup (v2)."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    groups = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.removeprefix("0::/") for line in groups if line.startswith("0::/")), "")
    group = Path("/sys/fs/cgroup") / own
    try:
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
    except FileNotFoundError:  # the root group, or cgroup v1: no limit to be read here
        return available
    return available if limit.strip() == "max" else min(available, int(limit) - int(used))


def stride(slot_bytes: int) -> int:
    """Bytes from one slot to the next: whole memory pages."""
    return -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
