"""From outcomes to written samples: every line is used, or left out by name and counted.

Takes the outcomes of all lines in the order of the input, whoever made them; drops what was there before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from .. import UserError
from ..store.samples import SampleWriter
from .config import PrepareConfig
from .counts import NOTES, Counts
from .cutting import CutSample
from .lines.inputs import LeftOut, short_names
from .parcel import Arrived, Parcel
from .rejected import LINE, NOTE, SAMPLE, TURN, RejectedWriter
from .work import NOT_SAMPLED, Outcome

DUPLICATE = "duplicate"
KEY_BYTES = 16  # of a sample's sha256, which tell it from others
CUT = "cut at the longest length"
UNREAD = "template options that the template does not read"
REPLACED = "lone surrogates replaced by U+FFFD"
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
    places: dict[bytes, int] = field(default_factory=dict)
    """By the first 128 bits of a sample's sha256: the line that gave it first, as source number * 2^40 + line."""

    def name_sources(self, sources: Sequence[Path]) -> None:
        self.names = dict(zip(sources, short_names(sources)))
        self.numbers = {path: number for number, path in enumerate(sources)}

    def take(self, source: Path, outcomes: list[Outcome]) -> None:
        """Writes and counts what became of some lines of a source."""
        self.counts.lines_in += len(outcomes)
        self.counts.sources[self.names[source]] += len(outcomes)
        for found in outcomes:
            self.counts.replaced_surrogates += found.num_replaced
            try:
                if found.fault is not None:
                    raise found.fault
                self.keep(source, found)
            except LeftOut as fault:
                self.leave_out(source, found, fault)
            if found.num_replaced:
                self.reject(source, found, NOTE, LeftOut(REPLACED, f"{found.num_replaced} in the line"))
        self.bar.update(len(outcomes))

    def take_parcel(self, source: Path, parcel: Parcel) -> None:
        """As `take`, of what another process made: plain lines in a row, new ones, are written at once."""
        arrived, begin = Arrived(parcel), 0
        keeps_all, first_place = self.config.duplicates != "drop", self.place(source, 0)
        for i, (is_plain, line) in enumerate(zip(arrived.is_plain, parcel.lines)):
            own = first_place + line[0]
            if is_plain and (keeps_all or self.places.setdefault(arrived.digest(i)[:KEY_BYTES], own) == own):
                continue
            self.keep_run(source, arrived, begin, i)
            self.take(source, [arrived.outcome(i)])
            begin = i + 1
        self.keep_run(source, arrived, begin, len(arrived))

    def keep_run(self, source: Path, arrived: Arrived, first: int, last: int) -> None:
        """Writes and counts the plain lines first to last of a parcel."""
        num_lines = last - first
        if not num_lines:
            return
        run, counted = arrived.run(first, last, self.names[source])
        self.writer.add_run(run)
        self.counts.add_run(run, counted)
        self.counts.lines_in += num_lines
        self.counts.lines_used += num_lines
        self.counts.sources[self.names[source]] += num_lines
        self.bar.update(num_lines)

    def keep(self, source: Path, found: Outcome) -> None:
        """Writes the samples of a line. Raises LeftOut when all of them were there before."""
        own = self.place(source, found.number)
        first: int | None = None
        kept: set[bytes] = set()
        notes: list[LeftOut] = []
        for number, sample in numbered_samples(found):
            if self.config.duplicates == "drop":
                digest = sample.made.sha256[:KEY_BYTES]
                before = self.places.setdefault(digest, own)
                if before != own or digest in kept:
                    first = before if first is None else first
                    found.samples_left_out.append((number, self.duplicate_of(before)))
                    continue
                kept.add(digest)
            if sample.is_cut:
                detail = f"sample {number}: {len(sample.made.ids)} of {sample.num_given} tokens are kept"
                notes.append(LeftOut(CUT, detail))
            self.write(source, found, sample)
        if first is not None and not kept:
            raise self.duplicate_of(first)
        self.counts.lines_used += 1
        self.name_parts(source, found)
        for note in notes:
            self.reject(source, found, NOTE, note)
        if found.unread_options:
            self.counts.options_unread += 1
            self.reject(source, found, NOTE, LeftOut(UNREAD, ", ".join(found.unread_options)))
        for name, number in found.noted.items():
            self.counts.add_note(name, number)
            self.reject(source, found, NOTE, LeftOut(NOTES[name], f"{number} in the line"))

    def name_parts(self, source: Path, found: Outcome) -> None:
        """Counts and names the answers and samples of a used line that were left out."""
        for number, fault in found.turns_left_out:
            self.counts.turns_left_out[fault.reason] += 1
            self.reject(source, found, TURN, LeftOut(fault.reason, f"answer {number}: {fault.detail}"))
        for number, fault in sorted(found.samples_left_out, key=lambda left_out: left_out[0]):
            self.counts.samples_left_out[fault.reason] += 1
            self.reject(source, found, SAMPLE, LeftOut(fault.reason, f"sample {number}: {fault.detail}"))

    def write(self, source: Path, found: Outcome, sample: CutSample) -> None:
        self.writer.add_made(sample.made, (found.split, found.task, self.names[source], found.origin), found.number)
        self.counts.add_sample(sample, found.split, found.origin)

    def place(self, source: Path, line: int) -> int:
        return (self.numbers[source] << 40) + line

    def duplicate_of(self, place: int) -> LeftOut:
        source = list(self.names.values())[place >> 40]
        return LeftOut(DUPLICATE, f"the same ids and mask as line {place % 2**40} of {source}")

    def reject(self, source: Path, found: Outcome, what: str, fault: LeftOut) -> None:
        self.rejected.add(self.names[source], found.number, found.name, what, fault)

    def leave_out(self, source: Path, found: Outcome, fault: LeftOut) -> None:
        name = self.names[source]
        self.reject(source, found, LINE, fault)
        self.counts.add_left_out(name, found.number, fault)
        if self.config.strict and fault.reason not in WANTED:
            raise cannot_be_used(name, found.number, fault.reason, fault.detail)


def numbered_samples(found: Outcome) -> list[tuple[int, CutSample]]:
    """The samples that were kept so far, with their numbers among all of the line."""
    left_out = {number for number, _ in found.samples_left_out}
    return list(zip((number for number in count(1) if number not in left_out), found.samples))


def cannot_be_used(source: str, line: int, reason: str, detail: str) -> UserError:
    """What --strict says of a line that was left out."""
    return UserError(
        f"line {line} of {source} cannot be used: {reason} ({detail[:200]})",
        "every input line to give a sample, as --strict asks",
        "mend the line, or run without --strict, which leaves it out and counts it",
    )
