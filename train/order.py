"""Which rows a run trains on, in which order, and how one row is filled from the store.

Pure functions of the store, the seed, the epoch and the row; numpy only, no process, no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from ..store.ranges import ALL, parse_ranges
from ..store.reader import Request, StoreReader
from ..store.samples import eligible_anchors
from .packing import choose_anchors, pack_rows
from .slot import RowArrays, RowShape

TRAIN_SPLIT, HELD_OUT_SPLIT = "train", "heldout"


class Place(NamedTuple):
    """A row of the run: number `row` of pass `epoch`, both from 0."""

    epoch: int
    row: int


class StepRow(NamedTuple):
    """A row of a step: where it stands in the run, its samples, and the first row of the step after it."""

    place: Place
    samples: np.ndarray  # reader numbers
    after: Place


class RowCounts(NamedTuple):
    """What a row holds: whole samples, their tokens, and anchors that count."""

    num_samples: int
    num_tokens: int
    num_anchors: int


@dataclass(frozen=True, slots=True)
class RowOrder:
    """All rows of a run: those of pass 0, then those of pass 1, and so on without end."""

    samples: np.ndarray  # [N] i64, reader numbers
    lengths: np.ndarray  # [N] i64, tokens in a row: recorded positions + 1
    segments: np.ndarray  # [N]
    shape: RowShape
    seed: int
    shuffle_segments: int

    @staticmethod
    def of(
        reader: StoreReader, samples: np.ndarray, shape: RowShape, *, seed: int, shuffle_segments: int
    ) -> "RowOrder":
        """The order of these reader numbers."""
        lengths = reader.samples.n[samples].astype(np.int64) + 1
        return RowOrder(samples, lengths, reader.samples.segment[samples], shape, seed, shuffle_segments)

    def rows(self, epoch: int) -> list[np.ndarray]:
        """The rows of one pass, each as reader numbers in the order they lie in it."""
        rows = pack_rows(
            self.lengths,
            self.segments,
            self.shape.row_tokens,
            seed=self.seed,
            epoch=epoch,
            shuffle_segments=self.shuffle_segments,
        )
        return [self.samples[row] for row in rows]

    def since(self, start: Place) -> Iterator[tuple[Place, np.ndarray]]:
        """Every row from `start` on, without end: its place and its reader numbers."""
        epoch, first = start
        while True:
            rows = self.rows(epoch)
            for row in range(first, len(rows)):
                yield Place(epoch, row), rows[row]
            epoch, first = epoch + 1, first - min(first, len(rows))


def share_of_rank(order: RowOrder, start: Place, rows_per_step: int, rank: int, num_ranks: int) -> Iterator[StepRow]:
    """Every `num_ranks`-th row of each step, from row `rank` of it on; `start` is the first row of a step.

    Together the ranks have each row once, so a run does not depend on how many there are.
    """
    rows = order.since(start)
    while True:
        step = list(islice(rows, rows_per_step))
        last = step[-1][0]
        after = Place(last.epoch, last.row + 1)
        for place, samples in step[rank::num_ranks]:
            yield StepRow(place, samples, after)


def num_rows_of_rank(rows_per_step: int, rank: int, num_ranks: int) -> int:
    """Rows of a step that fall to a rank; they differ by one where the ranks do not divide a step."""
    return len(range(rank, rows_per_step, num_ranks))


def fill_row(
    reader: StoreReader, samples: np.ndarray, taps: Sequence[int], place: Place, order: RowOrder, out: RowArrays
) -> RowCounts:
    """Writes one row whole: the samples one after another, padding behind them, then the anchors.

    `taps` are indices into the store's tap list; states stay as the store encodes them. A sample of n
    recorded positions takes n + 1 tokens, from the first recorded one on; its positions count from its own start.
    The states of the last token and of all padding are zeros. Last states are read only where `out` has room for them.
    """
    shape = order.shape
    eligible = np.zeros(shape.row_tokens, np.bool_)  # [T]
    requests: list[Request] = []
    last_requests: list[Request] = []
    end = 0
    for number, sample in enumerate(samples):
        first, n = int(reader.samples.first[sample]), int(reader.samples.n[sample])
        begin, end = end, end + n + 1
        own = slice(first, first + n + 1)
        ids, loss_mask = reader.tokens(int(sample))
        requests.append(Request(int(sample), out.taps[:, begin : end - 1], taps))
        out.taps[:, end - 1] = 0
        if out.last is not None:
            last_requests.append(Request(int(sample), out.last[None, begin : end - 1]))
            out.last[end - 1] = 0
        out.ids[begin:end] = ids[own]
        out.loss_mask[begin:end] = loss_mask[own]
        out.sample_ids[begin:end] = number
        out.positions[begin:end] = np.arange(first, first + n + 1)
        eligible[begin:end] = eligible_anchors(loss_mask)[own]
    reader.read_many(requests, encoded=True)
    out.taps[:, end:] = 0
    if out.last is not None:
        reader.read_many(last_requests, encoded=True, array="last")
        out.last[end:] = 0
    out.ids[end:] = 0
    out.loss_mask[end:] = False
    out.sample_ids[end:] = -1
    out.positions[end:] = 0
    out.anchors[:], out.keep[:] = choose_anchors(
        eligible,
        out.sample_ids,
        shape.anchors,
        unit=shape.unit,
        seed=order.seed,
        epoch=place.epoch,
        row=place.row,
    )
    return RowCounts(len(samples), end, int(out.keep.sum()))


def samples_of(reader: StoreReader, split: str, segments: str) -> np.ndarray:
    """Reader numbers of the split's samples, of all committed segments or of a snapshot."""
    numbers = reader.rows(split)
    if segments == ALL:
        return numbers
    return numbers[np.isin(reader.samples.segment[numbers], parse_ranges(segments))]
