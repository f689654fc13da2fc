"""The loader process: reads rows from the store into a shared ring, just ahead of the trainer.

`load_rows` is the process, `Loader` the trainer's end of it. The ring is memory without a name (memfd) and
the process dies with its trainer, so a kill leaves nothing behind. Numpy only; neither end imports torch here.
"""

import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from .. import UserError
from ..store.reader import StoreReader
from ..store.ring import Ring, RingHandle
from ..watch import BEAT_S, Channel, Child, Job, Stalled
from .order import (
    ALL,
    TRAIN_SPLIT,
    Place,
    RowCounts,
    RowOrder,
    fill_row,
    num_rows_of_rank,
    samples_of,
    share_of_rank,
)
from .slot import RowArrays, RowSlot

NAME = "loader"
IDLE_LIMIT_S = 86_400.0  # how long a loader waits for a living trainer, whose own silence the launcher watches


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderPlan:
    """Everything the process needs to know; travels by pickle."""

    store_dir: Path
    segments: str  # 'all', or the run's snapshot: reader numbers differ once more segments are committed
    snapshot: str  # sha256 of what was committed in them when the run was checked
    taps: tuple[int, ...]  # indices into the store's tap list
    slot: RowSlot
    seed: int
    shuffle_segments: int
    start: Place
    num_rows: int  # of all ranks; after its share of these the process ends
    rows_per_step: int = 1
    rank: int = 0
    num_ranks: int = 1
    threads: int = 1  # that read inside the process
    uncached: bool = False  # leave nothing in the page cache

    @property
    def num_own_rows(self) -> int:
        """Rows of this rank: its share of every step."""
        own = num_rows_of_rank(self.rows_per_step, self.rank, self.num_ranks)
        return self.num_rows // self.rows_per_step * own

    @property
    def name(self) -> str:
        """How the process is called."""
        return NAME if self.num_ranks == 1 else f"{NAME} {self.rank}"


class Told(NamedTuple):
    """What the process says of a row that lies in a slot; see `LoadedRow`."""

    number: int
    place: Place
    counts: RowCounts
    after: Place
    sample_ids: np.ndarray


@dataclass(frozen=True, slots=True)
class LoadedRow:
    """A row in the ring, until it is given back: `memory` is its slot [size_bytes] u8, `arrays` are views into it."""

    number: int  # of the slot
    place: Place
    counts: RowCounts
    after: Place  # the first row of the next step
    sample_ids: np.ndarray  # of the store, in the row's order
    memory: np.ndarray
    arrays: RowArrays


def load_rows(channel: Channel, plan: LoaderPlan, handle: RingHandle) -> None:
    """The process: fills free slots in the run's order and tells the trainer of each; hears which are free again.

    Raises UserError where other states are committed than those the run was checked with.
    """
    reader = StoreReader(plan.store_dir, partial=plan.segments != ALL, threads=plan.threads, uncached=plan.uncached)
    require_snapshot(reader, plan)
    samples = samples_of(reader, TRAIN_SPLIT, plan.segments)
    order = RowOrder.of(reader, samples, plan.slot.shape, seed=plan.seed, shuffle_segments=plan.shuffle_segments)
    ring = Ring.open(handle)
    free: list[Any] = list(range(handle.slots))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a system that ends a whole job tells us, too; our trainer ends us
    share = share_of_rank(order, plan.start, plan.rows_per_step, plan.rank, plan.num_ranks)
    for place, row, after in islice(share, plan.num_own_rows):
        number = free.pop(0) if free else channel.receive(IDLE_LIMIT_S)
        assert isinstance(number, int)
        counts = fill_row(reader, row, plan.taps, place, order, plan.slot.view(ring.slot(number)))
        channel.tell(Told(number, place, counts, after, reader.samples.sample_id[row]))


def require_snapshot(reader: StoreReader, plan: LoaderPlan) -> None:
    """Between the check of the run and this moment another process may have committed other states."""
    found = reader.snapshot_in(plan.segments)
    if found != plan.snapshot:
        raise UserError(
            f"the store {str(plan.store_dir)!r} holds other states than at the start of this command: snapshot {found}",
            f"snapshot {plan.snapshot} of segments {plan.segments}",
            "end what writes into that store, bring its states back, then give the same command again",
        )


def describe(place: Place) -> str:
    return f"row {place.row} of epoch {place.epoch}"


class Loader:
    """The trainer's end: starts the process, waits for its rows, gives slots back, stops it.

    `row` raises what the process raised, ChildDied where it died, and Stalled where no row came within
    `stall_s` seconds; `beat` is called about once a second while it waits. `num_ready` counts the rows that lay ready
    when one was last asked for.
    """

    def __init__(self, plan: LoaderPlan, *, slots: int, stall_s: float, beat: Callable[[], None]) -> None:
        self.plan, self.num_slots, self.stall_s, self.beat = plan, slots, stall_s, beat
        self.ready: deque[Told] = deque()
        self.num_ready = 0
        self.next = plan.start

    def __enter__(self) -> "Loader":
        self.ring = Ring.create(self.plan.slot.size_bytes, self.num_slots)
        self.child = Child(Job(self.plan.name, load_rows, (self.plan, self.ring.handle())))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.child.has_ended:
            self.child.end()
        self.ring.close()

    @property
    def memory(self) -> np.ndarray:
        """All bytes of the ring, for a trainer that pins them."""
        assert self.ring.bytes is not None
        return self.ring.bytes

    @contextmanager
    def row(self) -> Iterator[LoadedRow]:
        """The next row of the run; its slot goes back to the loader at the end of the block."""
        row = self.take()
        yield row
        self.give_back(row)

    def take(self) -> LoadedRow:
        """The next row of the run, for whoever gives it back later; at most `num_slots` are out at a time."""
        self.look()
        self.num_ready = len(self.ready)
        told = self.wait_for_row(time.monotonic() + self.stall_s)
        self.next = Place(told.place.epoch, told.place.row + self.plan.num_ranks)
        memory = self.ring.slot(told.number)
        return LoadedRow(*told, memory, self.plan.slot.view(memory))

    def give_back(self, row: LoadedRow) -> None:
        """The loader may write the row's slot again."""
        if not self.child.has_ended:
            self.child.tell(row.number)

    def look(self) -> None:
        """Takes note of the rows that were told meanwhile, without waiting."""
        if not self.child.has_ended:
            self.child.listen(self.note, 0.0)

    def wait_for_row(self, limit: float) -> Told:
        """The oldest row that was told and not taken."""
        while not self.ready:
            assert not self.child.has_ended, f"more than the {self.plan.num_own_rows} rows of the plan are asked for"
            if time.monotonic() > limit:
                self.child.dump_stacks()
                raise Stalled("the trainer", f"{describe(self.next)} from the {self.plan.name}", self.stall_s)
            self.beat()
            self.child.listen(self.note, min(BEAT_S, max(0.0, limit - time.monotonic())))
        return self.ready.popleft()

    def note(self, _name: str, row: Any) -> None:
        self.ready.append(row)
