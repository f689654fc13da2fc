"""From outcomes to written samples: every line is used, or left out by name and counted.

Takes the outcomes of all lines in the order of the input, whoever made them; drops what was there before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import UserError
from ..store.samples import SampleWriter
from .config import PrepareConfig
from .counts import Counts
from .cutting import CutSample
from .lines.inputs import LeftOut, short_names
from .rejected import RejectedWriter
from .work import NOT_SAMPLED, Outcome

DUPLICATE = "duplicate"
WANTED = (NOT_SAMPLED, DUPLICATE)  # lines left out because somebody asked for it: no fault of theirs


@dataclass(slots=True)
class Collector:
    """One run over the outcomes of all sources; writers and bar are the caller's."""

    config: PrepareConfig
    counts: Counts
    writer: SampleWriter
    rejected: RejectedWriter
    bar: Any
    names: dict[Path, str] = field(default_factory=dict)
    numbers: dict[Path, int] = field(default_factory=dict)
    """The place of each source among the inputs."""
    places: dict[int, int] = field(default_factory=dict)
    """By the digest of a sample: the line that gave it first, as source number * 2^40 + line."""

    def name_sources(self, sources: Sequence[Path]) -> None:
        self.names = dict(zip(sources, short_names(sources)))
        self.numbers = {path: number for number, path in enumerate(sources)}

    def take(self, source: Path, outcomes: list[Outcome]) -> None:
        """Writes and counts what became of some lines of a source."""
        for found in outcomes:
            self.counts.lines_in += 1
            self.counts.sources[self.names[source]] += 1
            self.counts.replaced_surrogates += found.num_replaced
            try:
                if found.fault is not None:
                    raise found.fault
                self.keep(source, found)
            except LeftOut as fault:
                self.leave_out(source, found, fault)
        self.bar.update(len(outcomes))

    def keep(self, source: Path, found: Outcome) -> None:
        """Writes the samples of a line. Raises LeftOut when all of them were there before."""
        own = self.place(source, found.number)
        first: int | None = None
        kept: set[int] = set()
        for sample, digest in zip(found.samples, found.digests):
            if self.config.duplicates == "drop":
                before = self.places.setdefault(digest, own)
                if before != own or digest in kept:
                    first = before if first is None else first
                    found.samples_left_out[DUPLICATE] += 1
                    continue
                kept.add(digest)
            self.write(source, found, sample)
        if first is not None and not kept:
            raise LeftOut(DUPLICATE, f"the same ids and mask as line {self.spelled(first)}")
        self.counts.lines_used += 1
        self.counts.samples_left_out += found.samples_left_out
        self.counts.turns_left_out += found.turns_left_out
        self.counts.options_unread += found.has_unread_options

    def write(self, source: Path, found: Outcome, sample: CutSample) -> None:
        self.writer.add(
            sample.ids,
            sample.mask,
            split=found.split,
            task=found.task,
            source=self.names[source],
            source_line=found.number,
            origin=found.origin,
        )
        self.counts.add_sample(sample, found.split, found.origin)

    def place(self, source: Path, line: int) -> int:
        return (self.numbers[source] << 40) + line

    def spelled(self, place: int) -> str:
        return f"{place % 2**40} of {list(self.names.values())[place >> 40]}"

    def leave_out(self, source: Path, found: Outcome, fault: LeftOut) -> None:
        name = self.names[source]
        self.rejected.add(name, found.number, found.name, fault)
        self.counts.add_left_out(name, found.number, fault)
        if self.config.strict and fault.reason not in WANTED:
            raise cannot_be_used(name, found.number, fault.reason, fault.detail)


def cannot_be_used(source: str, line: int, reason: str, detail: str) -> UserError:
    """What --strict says of a line that was left out."""
    return UserError(
        f"line {line} of {source} cannot be used: {reason} ({detail[:200]})",
        "every input line to give a sample, as --strict asks",
        "mend the line, or run without --strict, which leaves it out and counts it",
    )
