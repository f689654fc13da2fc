"""Outcomes on their way from one process to another: the ids and masks of all samples as two arrays.

Objects of their own for every line and sample would cost the one process that takes them more than all it does with
them. Knows the fields of an Outcome, nothing of what they mean.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..store.samples import MadeSample
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


def unpacked(parcel: Parcel) -> list[Outcome]:
    """The outcomes again; their ids and masks are parts of the parcel's arrays."""
    samples, start = [], 0
    for place, (length, anchors, recorded, crc, *counted) in enumerate(parcel.numbers.tolist()):
        end = start + length
        digest = parcel.digests[DIGEST_BYTES * place : DIGEST_BYTES * (place + 1)]
        made = MadeSample(parcel.ids[start:end], parcel.mask[start:end], anchors, recorded, digest, crc)
        samples.append(CutSample(made, *counted))
        start = end
    outcomes, first = [], 0
    for place, (number, name, num_replaced, count, split, task, origin) in enumerate(parcel.lines):
        own = samples[first : first + count]
        rare = parcel.rare.get(place, {})
        outcomes.append(Outcome(number, name, num_replaced, samples=own, split=split, task=task, origin=origin, **rare))
        first += count
    return outcomes
