"""Outcomes on their way from one process to another: the ids and masks of all samples as two arrays.

Objects of their own for every line and sample would cost the one process that takes them more than all it does with
them. Knows the fields of an Outcome, nothing of what they mean.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..store.samples import MadeSample
from ..store.tokens_file import SampleRun
from .counts import Counted
from .cutting import CutSample
from .work import Outcome

DIGEST_BYTES = 32
RARE = ("fault", "samples_left_out", "turns_left_out", "unread_options", "noted")
"""Fields that are empty in most outcomes."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """The outcomes of a chunk, with L lines, N samples and T tokens."""

    lines: list[tuple[Any, ...]]
    """Of each line number, name, num_replaced, the number of its samples, split, task, origin [L]."""
    rare: dict[int, dict[str, Any]]
    """By the place of a line the fields that are not empty."""
    ids: np.ndarray
    """[T] u32"""
    mask: np.ndarray
    """[T] u8"""
    numbers: np.ndarray
    """Of each sample its tokens, num_anchors, num_recorded, crc32c, num_given, num_trained [N, 6] i64."""
    digests: bytes
    """The sha256 of each sample [N * 32]."""


def packed(outcomes: list[Outcome]) -> Parcel:
    """One parcel of the outcomes of a chunk."""
    samples = [sample for found in outcomes for sample in found.samples]
    numbers = [
        (len(s.made.ids), s.made.num_anchors, s.made.num_recorded, s.made.crc32c, s.num_given, s.num_trained)
        for s in samples
    ]
    rare = {
        place: fields
        for place, found in enumerate(outcomes)
        if (fields := {name: value for name in RARE if (value := getattr(found, name))})
    }
    return Parcel(
        lines=[(f.number, f.name, f.num_replaced, len(f.samples), f.split, f.task, f.origin) for f in outcomes],
        rare=rare,
        ids=np.concatenate([np.empty(0, np.uint32), *(sample.made.ids for sample in samples)]),
        mask=np.concatenate([np.empty(0, np.uint8), *(sample.made.mask for sample in samples)]),
        numbers=np.array(numbers, dtype=np.int64).reshape(-1, 6),
        digests=b"".join(sample.made.sha256 for sample in samples),
    )


class Arrived:
    """A parcel at its goal: the outcomes of its lines one by one, and runs of plain ones at once.

    A line is plain where it gave one sample, whole, and there is nothing else to tell of it.
    """

    def __init__(self, parcel: Parcel) -> None:
        self.parcel = parcel
        self.first_samples = np.cumsum([0, *(line[3] for line in parcel.lines)]).tolist()  # [L + 1]
        self.starts = np.cumsum(np.concatenate([[0], parcel.numbers[:, 0]])).tolist()  # [N + 1] tokens before each
        is_whole = (parcel.numbers[:, 0] == parcel.numbers[:, 4]).tolist()  # [N]
        self.is_plain = [
            line[2] == 0 and line[3] == 1 and is_whole[first] and place not in parcel.rare
            for place, (line, first) in enumerate(zip(parcel.lines, self.first_samples))
        ]

    def __len__(self) -> int:
        return len(self.parcel.lines)

    def outcome(self, place: int) -> Outcome:
        """That of one line; its ids and masks are parts of the parcel's arrays."""
        number, name, num_replaced, count, split, task, origin = self.parcel.lines[place]
        first = self.first_samples[place]
        samples = [self.sample(i) for i in range(first, first + count)]
        rare = self.parcel.rare.get(place, {})
        return Outcome(number, name, num_replaced, samples=samples, split=split, task=task, origin=origin, **rare)

    def sample(self, i: int) -> CutSample:
        parcel, own = self.parcel, slice(self.starts[i], self.starts[i + 1])
        _, anchors, recorded, crc, num_given, num_trained = parcel.numbers[i].tolist()
        digest = parcel.digests[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)]
        made = MadeSample(parcel.ids[own], parcel.mask[own], anchors, recorded, digest, crc)
        return CutSample(made, num_given, num_trained)

    def digest(self, place: int) -> bytes:
        """The sha256 of a plain line's sample."""
        begin = DIGEST_BYTES * self.first_samples[place]
        return self.parcel.digests[begin : begin + DIGEST_BYTES]

    def run(self, first: int, last: int, source: str) -> tuple[SampleRun, Counted]:
        """The samples of the plain lines first to last, and what is counted of them."""
        parcel, begin, end = self.parcel, self.first_samples[first], self.first_samples[last]
        tokens, numbers = slice(self.starts[begin], self.starts[end]), parcel.numbers[begin:end]
        lines = parcel.lines[first:last]
        digests = np.frombuffer(parcel.digests, dtype="<u8").reshape(-1, DIGEST_BYTES // 8)
        run = SampleRun(
            ids=parcel.ids[tokens],
            mask=parcel.mask[tokens],
            lengths=numbers[:, 0],
            num_recorded=numbers[:, 2],
            contents=digests[begin:end, 0],
            crc32c=numbers[:, 3],
            texts=[(split, task, source, origin) for _, _, _, _, split, task, origin in lines],
            source_lines=[line[0] for line in lines],
        )
        return run, Counted(int(numbers[:, 5].sum()), int(numbers[:, 1].sum()))
