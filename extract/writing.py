"""The writer beside each worker: a process of its own that puts recorded states on the disk.

Checksums, writes and syncs take longer than a fast GPU's forward: on an H200 (2026-11-30, torch
2.11, 18 layers of H = 4096, 41 kB a position; docs/benchmarks/extract_speed.json) a worker that
wrote by itself recorded 11.0k positions/s, with its writer 22.4k, with nothing written 27.5k. There
the worker waited for each copy; since it does not, nothing was measured. A thread would slow the
worker's launches (design, section 6). Batches are written in the order they come, so the bytes are
those of a worker that writes itself.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from .. import __version__
from ..store.index import STATUS_FAILED
from ..store.manifest import Manifest, read_manifest
from ..store.ring import Ring, RingHandle
from ..store.state_error import StateErrors, as_metadata
from ..store.writer import SegmentSink, StoreWriter
from ..watch import Channel, Child, Job, Stalled

if TYPE_CHECKING:
    import torch

NUM_SLOTS = 4  # one is written, one waits, one was filled and is judged, one is filled
BEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One sample of a batch: its row in the plan, its place in the batch, its status, what was measured of it."""

    row: int
    place: int
    status: int
    errors: np.ndarray | None = None
    """Relative errors [M] of some of its states in a codec that loses something."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory on the host for encoded rows [Lt (+1), N, S, row_bytes] u8, and how long it was waited for."""

    rows: "torch.Tensor"
    slot: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Told to the writer: slot `slot` holds encoded rows `shape` [Lt (+1), N, S, row_bytes] u8 of these samples."""

    slot: int
    shape: tuple[int, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """Told by the writer: the slot is free again."""

    slot: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Told when a segment is durable."""

    segment: int


class SegmentFiller:
    """Puts samples into the files of their segments and commits each segment that is complete.

    Holds no states; a segment is open from its first sample to its last.
    """

    def __init__(self, store_dir: Path, manifest: Manifest, on_commit: Callable[[Committed], None]) -> None:
        self.num_taps = len(manifest.tap_layers)
        self.has_last = manifest.has_last
        self.on_commit = on_commit
        self.writer = StoreWriter(store_dir, manifest)
        self.sinks: dict[int, SegmentSink] = {}
        self.errors: dict[int, StateErrors] = {}

    def write(self, rows: np.ndarray, entries: tuple[Entry, ...]) -> None:
        """Appends samples from encoded rows [Lt (+1), N, S, row_bytes] u8; a failed one gives no states."""
        plan = self.writer.plan
        for entry in entries:
            segment, n = int(plan["segment"][entry.row]), int(plan["n"][entry.row])
            own = rows[:, entry.place, :n]  # [Lt (+1), n, row_bytes]
            is_kept = entry.status != STATUS_FAILED
            if segment not in self.sinks:
                self.sinks[segment] = self.writer.open(segment)
                self.errors[segment] = StateErrors()
            if entry.errors is not None:
                self.errors[segment].count(entry.errors)
            sink = self.sinks[segment]
            sink.append(
                int(plan["sample_id"][entry.row]),
                int(plan["position"][entry.row]),
                own[: self.num_taps] if is_kept else None,
                own[self.num_taps] if is_kept and self.has_last else None,
                status=entry.status,
                encoded=True,
            )
            if sink.is_written.all():
                measured = as_metadata(self.errors.pop(segment))
                sink.commit({"written_by": f"dflash-offline {__version__}", **measured})
                del self.sinks[segment]
                self.on_commit(Committed(segment))

    def close(self) -> None:
        """Drops what is not complete; committed segments stay."""
        for sink in self.sinks.values():
            sink.abort()
        self.sinks.clear()
        self.errors.clear()


def write_batches(channel: Channel, store_dir: str, ring_handle: RingHandle, limit_s: float) -> None:
    """The process: writes batch after batch until it is told None."""
    filler = SegmentFiller(Path(store_dir), read_manifest(Path(store_dir)), channel.tell)
    ring = Ring.open(ring_handle)
    try:
        while (batch := channel.receive(limit_s)) is not None:
            assert isinstance(batch, Batch)
            filler.write(view(ring, batch.slot, batch.shape), batch.entries)
            channel.tell(Written(batch.slot))
        assert not filler.sinks, f"segments {sorted(filler.sinks)} are not complete"
    finally:
        filler.close()


def view(ring: Ring, slot: int, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of that shape at the start of a slot, u8."""
    return ring.slot(slot)[: int(np.prod(shape))].reshape(shape)


class WriterProcess:
    """A worker's end: hands batches over, passes commits on, ends the process with the block.

    Raises in `put` and `finish` what the process raised, ChildDied when it died, and Stalled when
    a slot or its end did not come within `stall_s` seconds.
    """

    def __init__(self, channel: Channel, store_dir: Path, *, slot_bytes: int, device: str, stall_s: float) -> None:
        self.channel = channel
        self.device = device
        self.stall_s = stall_s
        self.ring = Ring.create(slot_bytes, NUM_SLOTS)
        self.free = list(range(NUM_SLOTS))
        self.lock = ExitStack()
        # The worker's own silence is the launcher's to see; the writer must not tire of it before that.
        job = Job(f"writer of {channel.name}", write_batches, (str(store_dir), self.ring.handle(), 2 * stall_s))
        self.child = Child(job)

    def room(self, shape: tuple[int, ...]) -> Room:
        """A free slot for encoded rows [Lt (+1), N, S, row_bytes]; waits for one while the ring is full."""
        import torch

        self.child.listen(self.note, 0.0)
        started = time.monotonic()
        self.wait_for(lambda: bool(self.free), "a free slot")
        slot, waited_s = self.free.pop(), time.monotonic() - started
        return Room(torch.from_numpy(view(self.ring, slot, shape)), slot, waited_s)

    def put(self, room: Room, entries: tuple[Entry, ...]) -> None:
        """Hands over a slot that was filled."""
        self.child.tell(Batch(room.slot, tuple(room.rows.shape), entries))
        self.child.listen(self.note, 0.0)

    def finish(self) -> None:
        """Waits until everything handed over is committed and the process has ended."""
        self.child.tell(None)
        self.wait_for(lambda: self.child.has_ended, "its end")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + self.stall_s
        while not condition():
            if time.monotonic() > limit:
                self.child.dump_stacks()
                raise Stalled(self.channel.name, f"{what} from its writer", self.stall_s)
            self.child.listen(self.note, BEAT_S)
            self.channel.beat()

    def note(self, _name: str, message: object) -> None:
        if isinstance(message, Written):
            self.free.append(message.slot)
        else:
            self.channel.tell(message)

    def __enter__(self) -> "WriterProcess":
        """Locks the ring into place where a device copies to it beside its forwards."""
        import torch

        from ..pinned_memory import pinned

        assert self.ring.bytes is not None
        self.lock.enter_context(pinned(self.ring.bytes, torch.device(self.device)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.child.has_ended:
            self.child.end()
        try:
            self.lock.close()
        except Exception:  # a device that failed fails at this too, and what happened first is the news
            if error is None:
                raise
        finally:
            self.ring.close()
