"""Which samples share a row, and where a row's anchors lie.

Pure functions of their arguments and of (seed, epoch) or (seed, epoch, row): the same for any
number of ranks and after any resume. Numpy only.
"""

import numpy as np

from .. import UserError
from .slot import TILE

OPEN_ROWS = 64  # rows that wait for more samples at a time
UNITS_PER_SAMPLE = 4  # whole tiles a sample must get on average before anchors are dealt in tiles
ROWS_STREAM, ANCHORS_STREAM = 1, 2


def generator(*key: int) -> np.random.Generator:
    """A random stream of its own for each key; negative numbers are keys too."""
    return np.random.default_rng([part % 2**64 for part in key])


def pack_rows(
    lengths: np.ndarray, segments: np.ndarray, row_tokens: int, *, seed: int, epoch: int, shuffle_segments: int
) -> list[np.ndarray]:
    """The rows of one epoch: each an array of sample numbers, in the order they lie in the row.

    `lengths` [N] (tokens) and `segments` [N] describe the samples by number. Segments are shuffled,
    then the samples of each `shuffle_segments` of them; samples go first-fit into at most 64 open
    rows. Every sample is in exactly one row. Raises UserError for a sample longer than a row.
    """
    check_lengths(lengths, row_tokens)
    rng = generator(seed, epoch, ROWS_STREAM)
    packer = FirstFit(row_tokens)
    rows: list[np.ndarray] = []
    for window in shuffle_windows(segments, shuffle_segments, rng):
        order = rng.permutation(window)
        packer.add(order, lengths[order])
        rows += shuffled(packer.take_closed(), rng)
    return rows + shuffled(packer.close_all(), rng)


def check_lengths(lengths: np.ndarray, row_tokens: int) -> None:
    if len(lengths) == 0:
        return
    longest = int(np.argmax(lengths))
    tokens = int(lengths[longest])
    if tokens > row_tokens:
        raise UserError(
            f"sample {longest} has {tokens} tokens",
            f"at most row_tokens = {row_tokens}",
            f"set row_tokens = {-(-tokens // TILE) * TILE}, the smallest row that holds every sample",
        )
    if int(lengths.min()) < 1:
        raise ValueError(f"sample {int(np.argmin(lengths))} has no tokens")


def shuffle_windows(segments: np.ndarray, shuffle_segments: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Sample numbers of each window of `shuffle_segments` segments, the segments in random order."""
    if len(segments) == 0:
        return []
    ids, place = np.unique(segments, return_inverse=True)
    window = rng.permutation(len(ids))[place] // shuffle_segments  # [N]
    order = np.argsort(window, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(window[order])) + 1)


def shuffled(rows: list[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    return [rows[i] for i in rng.permutation(len(rows))]


class FirstFit:
    """At most `OPEN_ROWS` open rows; a sample goes into the oldest that holds it.

    A row closes when no sample could still fit, or when it is the fullest and room for a new
    one is needed. Rows stay open from one `add` to the next.
    """

    def __init__(self, row_tokens: int) -> None:
        self.row_tokens = row_tokens
        self.space: list[int] = []
        self.members: list[list[int]] = []
        self.closed: list[np.ndarray] = []

    def add(self, samples: np.ndarray, lengths: np.ndarray) -> None:
        """Places the samples in the given order."""
        shortest = int(lengths.min())
        for sample, tokens in zip(samples.tolist(), lengths.tolist()):
            place = next((i for i, space in enumerate(self.space) if space >= tokens), None)
            i = self.open_row() if place is None else place
            self.members[i].append(sample)
            self.space[i] -= tokens
            if self.space[i] < shortest:
                self.close(i)

    def open_row(self) -> int:
        """Index of a new, empty row."""
        if len(self.space) == OPEN_ROWS:
            self.close(self.space.index(min(self.space)))
        self.space.append(self.row_tokens)
        self.members.append([])
        return len(self.space) - 1

    def close(self, i: int) -> None:
        self.closed.append(np.array(self.members.pop(i), np.int64))
        self.space.pop(i)

    def take_closed(self) -> list[np.ndarray]:
        """Rows closed since the last call."""
        rows, self.closed = self.closed, []
        return rows

    def close_all(self) -> list[np.ndarray]:
        """Closes and returns what is left."""
        while self.space:
            self.close(0)
        return self.take_closed()


def choose_anchors(
    eligible: np.ndarray, sample_ids: np.ndarray, anchors: int, *, unit: int, seed: int, epoch: int, row: int
) -> tuple[np.ndarray, np.ndarray]:
    """A sorted anchors of a row and which of them count: i32[A], bool[A].

    `eligible` bool[T], `sample_ids` i32[T] (-1 = padding). Slots are dealt to samples in proportion
    to their eligible tokens, in whole tiles of `unit` slots where each sample gets several;
    inside a sample uniformly without replacement. Spare slots repeat the anchor before them.
    """
    rng = generator(seed, epoch, row, ANCHORS_STREAM)
    spots = np.flatnonzero(eligible)  # [E]
    chosen = np.zeros(anchors, np.int32)
    keep = np.zeros(anchors, np.bool_)
    if len(spots) == 0:
        return chosen, keep
    starts = np.flatnonzero(np.diff(sample_ids[spots], prepend=sample_ids[spots[0]] - 1))
    counts = np.diff(starts, append=len(spots))  # eligible tokens of each sample
    slots = deal(counts, anchors, unit, rng)
    picked = pick(counts, np.minimum(slots, counts), rng)  # [E] bool
    place = 0
    for start, count, share in zip(starts, counts, slots):
        own = spots[start : start + count][picked[start : start + count]]
        if share:
            chosen[place : place + share] = own[-1]
            chosen[place : place + len(own)] = own
            keep[place : place + len(own)] = True
            place += share
    chosen[place:] = chosen[place - 1]
    return chosen, keep


def deal(counts: np.ndarray, anchors: int, unit: int, rng: np.random.Generator) -> np.ndarray:
    """Slots of each sample; at most `anchors` in all, on average in proportion to `counts`."""
    if counts.sum() <= anchors:
        return counts
    num_units = anchors // unit
    if num_units < UNITS_PER_SAMPLE * len(counts):
        return whole_shares(counts, anchors, rng)
    return whole_shares(counts, num_units, rng) * unit


def whole_shares(counts: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Whole shares of `total`, each its proportional one rounded up or down, with that one as its mean.

    Systematic sampling: the shares stand end to end and one random offset cuts them all. Rounding each to the nearest
    would never give a slot to a short answer beside long ones.
    """
    ends = np.cumsum(counts) * (total / counts.sum())
    ends[-1] = total
    return np.diff(np.floor(ends + rng.random()).astype(np.int64), prepend=0)


def pick(counts: np.ndarray, wanted: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """bool[E]: `wanted[i]` of the `counts[i]` spots of sample i, uniformly without replacement."""
    owner = np.repeat(np.arange(len(counts)), counts)  # [E]
    order = np.lexsort((rng.random(len(owner)), owner))  # samples stay in place, spots inside are shuffled
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    picked = np.zeros(len(owner), np.bool_)
    picked[order] = rank < wanted[owner]
    return picked
