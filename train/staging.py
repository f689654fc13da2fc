"""Rows on their way from the loader to the device: the next one is copied while the present one computes.

One set of staging memory on the device, one copy a row on a stream of its own; on a CPU the same path without
streams. Knows the loader's slots and a RowBatch; nothing of the step between two rows.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batch import RowBatch, RowTensors
from .clock import StepClock
from .flops import row_flops
from .loader import LoadedRow, Loader
from .noise import TapNoise
from .order import Place, RowCounts
from .replay import WARM_UP_ROWS, Pool, Replay
from .slot import RowSlot


@dataclass(frozen=True, slots=True)
class StagedRow:
    """What is known on the host of a row that was loaded; its slot in the ring may hold another one already."""

    place: Place
    counts: RowCounts
    after: Place  # the first row of the next step
    sample_ids: np.ndarray  # of the store, in the row's order
    flops: float  # of its forward, loss and backward
    num_ready: int  # rows that lay ready in the ring when it was asked for


class Staged:
    """The rows of a loader, in order, one of them ahead on the device.

    `load` fills a batch with the next row; `stage`, called once its computation was sent to the device, starts the copy
    of the one after. A slot goes back to the loader when its copy is done, which is looked up whenever a row is taken;
    the host waits for a copy only where every slot of the ring is still out. With a `graph_pool` (CUDA alone) the
    third batch and every later one is filled by one CUDA graph: all must be the same batch. `clock` is told of each
    wait for a row.
    """

    def __init__(
        self,
        loader: Loader,
        device: torch.device,
        clock: StepClock,
        *,
        noise: TapNoise | None = None,
        graph_pool: Pool | None = None,
    ) -> None:
        slot = loader.plan.slot
        self.loader, self.clock, self.noise = loader, clock, noise
        self.graph_pool, self.num_filled = graph_pool, 0
        self.replay: Replay | None = None
        self.num_left = loader.plan.num_own_rows  # to take
        self.memory = torch.zeros(slot.size_bytes, dtype=torch.uint8, device=device)
        self.tensors = tensors_in(slot, self.memory)
        self.lanes = Lanes(device)
        self.out: deque[tuple[LoadedRow, Mark]] = deque()  # slots whose copies may still run, oldest first
        self.ahead: StagedRow | None = None

    def load(self, batch: RowBatch) -> StagedRow:
        """Fills the batch with the next row, on the stream that computes."""
        if self.ahead is None:
            self.take(batch)
        row, self.ahead = self.ahead, None
        assert row is not None
        with self.clock.waiting():
            self.lanes.wait_for_copy()
        self.fill(batch)
        self.lanes.mark_read()
        if self.noise is not None:
            self.noise.add(batch.taps, row.place)
        return row

    def fill(self, batch: RowBatch) -> None:
        """The row in the staging memory into the batch: many small launches, or one graph of them."""
        self.num_filled += 1
        if self.graph_pool is None or self.num_filled <= WARM_UP_ROWS:
            batch.load(self.tensors)
            return
        buffers = (self.memory, *batch.buffers())
        if self.replay is None:
            self.replay = Replay(lambda: batch.load(self.tensors), buffers, self.graph_pool)
        self.replay(buffers)

    def stage(self, batch: RowBatch) -> None:
        """Takes the next row, if there is one, and starts its copy; waits for the loader, not for the device."""
        if self.ahead is None and self.num_left:
            self.take(batch)

    def take(self, batch: RowBatch) -> None:
        self.give_back()
        with self.clock.waiting():
            row = self.loader.take()
        self.num_left -= 1
        self.out.append((row, self.lanes.copy(torch.from_numpy(row.memory), self.memory)))
        flops = row_flops(batch.spec, row.arrays, batch.shape, has_teacher=batch.last is not None)
        self.ahead = StagedRow(row.place, row.counts, row.after, row.sample_ids, flops, self.loader.num_ready)

    def give_back(self) -> None:
        """Gives back every slot whose copy is done, and the oldest in any case where all are out."""
        while self.out and (self.out[0][1].is_done() or len(self.out) == self.loader.num_slots):
            row, copied = self.out.popleft()
            copied.wait()
            self.loader.give_back(row)


class Mark:
    """A moment in a stream: a CUDA event, or nothing on a CPU, where everything is done at once."""

    def __init__(self, event: Any = None) -> None:
        self.event = event

    def is_done(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """The host waits."""
        if self.event is not None:
            self.event.synchronize()


class Lanes:
    """The stream that copies beside the one that computes; both orders are kept by events.

    No copy starts before the row in the staging memory was read, and none is read before its copy is done.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copied: Any = None  # the event behind the newest copy
        self.read: Any = None  # the event behind the newest read of the staging memory
        self.mark_read()  # the staging memory was zeroed on the computing stream

    def copy(self, host: Tensor, staging: Tensor) -> Mark:
        """Copies pinned host memory [n] u8; the mark says when it may be written again."""
        if self.side is None:
            staging.copy_(host)
            return Mark()
        with torch.cuda.stream(self.side):
            self.side.wait_event(self.read)
            staging.copy_(host, non_blocking=True)
            self.copied = self.side.record_event()
        return Mark(self.copied)

    def wait_for_copy(self) -> None:
        """The computing stream waits."""
        if self.side is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)

    def mark_read(self) -> None:
        """Everything sent to the computing stream so far may read the staging memory; nothing later does."""
        if self.side is not None:
            self.read = torch.cuda.current_stream(self.device).record_event()


def tensors_in(slot: RowSlot, memory: Tensor) -> RowTensors:
    """The arrays of a row as views into `memory` [size_bytes] u8, laid out as in the loader's slot."""
    tensors = {
        name: memory[place].view(getattr(torch, dtype.name)).view(shape) for name, place, shape, dtype in slot.places()
    }
    return RowTensors(codec=slot.codec, **tensors)
