"""What `prepare` counted, and how it tells it."""

from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from ..store.tokens_file import SampleRun
from .cutting import CutSample
from .lines.inputs import LeftOut
from .rejected import REJECTED_NAME

SHOWN_REASONS = 12
IN_REJECTED = ("left_out", "samples_left_out", "turns_left_out", "cut", "options_unread", "replaced_surrogates")
IN_REJECTED += ("tools_unread", "thoughts_unwritten", "answers_without_end")
"""Counts of what stands in the list line by line."""
NOTES = {
    "tools_unread": "tools that the template does not read",
    "thoughts_unwritten": "thought that the template does not write",
    "answers_without_end": "answer without an end mark",
}
"""What is told of used lines, by the name of its count."""


class Counted(NamedTuple):
    """Of some samples together."""

    num_trained: int
    num_anchors: int


@dataclass(slots=True)
class Counts:
    """lines_in = lines_used + the sum of left_out, always."""

    sources: dict[str, int]
    """Input lines of each source."""
    lines_in: int = 0
    lines_used: int = 0
    """Lines that gave at least one sample."""
    samples: int = 0
    heldout: int = 0
    """Samples kept for the exam."""
    tokens: int = 0
    trained_tokens: int = 0
    anchors: int = 0
    """Eligible anchors: trained on, and the next token too."""
    longest: int = 0
    """Tokens of the longest sample."""
    cut: int = 0
    """Samples cut at the longest allowed length."""
    answers_cut: int = 0
    """Answers of the target that met the limit before an eos."""
    answers_replaced: int = 0
    """Given answers that the target's own replaced."""
    options_unread: int = 0
    """Used lines with template options of their own that the template does not read."""
    tools_unread: int = 0
    """Used lines with tools, on a template that reads none."""
    thoughts_unwritten: int = 0
    """Answers with a thought beside their content, on a template that knows no thoughts."""
    answers_without_end: int = 0
    """Answers that the template closes with no token of the target's that ends anything."""
    replaced_surrogates: int = 0
    """Lone surrogates that became U+FFFD."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Lines left out, by reason."""
    samples_left_out: Counter[str] = field(default_factory=Counter)
    """Samples of used lines that were not kept, by reason."""
    turns_left_out: Counter[str] = field(default_factory=Counter)
    """Assistant turns of used lines that are not trained on, by reason."""
    origins: Counter[str] = field(default_factory=Counter)
    """Samples by who wrote their answers."""
    files_passed_over: Counter[str] = field(default_factory=Counter)
    """Files beside the inputs' that are not read, by the end of their names."""
    first_left_out: str = ""

    def add_sample(self, sample: CutSample, split: str, origin: str) -> None:
        self.samples += 1
        self.heldout += split == "heldout"
        num_tokens = len(sample.made.ids)
        self.tokens += num_tokens
        self.trained_tokens += sample.num_trained
        self.anchors += sample.made.num_anchors
        self.longest = max(self.longest, num_tokens)
        self.cut += sample.is_cut
        self.origins[origin] += 1

    def add_run(self, run: SampleRun, counted: Counted) -> None:
        """As `add_sample` of each of some whole samples."""
        self.samples += len(run)
        self.tokens += int(run.starts[-1])
        self.trained_tokens += counted.num_trained
        self.anchors += counted.num_anchors
        self.longest = max(self.longest, int(run.lengths.max()))
        for split, _, _, origin in run.texts:
            self.heldout += split == "heldout"
            self.origins[origin] += 1

    def add_note(self, name: str, number: int) -> None:
        assert name in NOTES
        setattr(self, name, getattr(self, name) + number)

    def add_left_out(self, source: str, line: int, fault: LeftOut) -> None:
        self.left_out[fault.reason] += 1
        if not self.first_left_out:
            detail = f" ({fault.detail[:300]})" if fault.detail else ""
            self.first_left_out = f"line {line} of {source}, {fault.reason}{detail}"

    def as_plain(self) -> dict[str, Any]:
        """The report of data.json."""
        assert self.lines_in == self.lines_used + sum(self.left_out.values()), "an input line was not counted"
        plain = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "first_left_out"}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in plain.items()}


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What lies in the folder; `is_new` is False when an earlier run had made it."""

    folder: Path
    facts: dict[str, Any]
    counts: dict[str, Any]
    is_new: bool
    lengths: tuple[str, ...] = ()
    """Lines about the samples' lengths."""

    def text(self) -> str:
        c = self.counts
        has_rows = any(c.get(name) for name in IN_REJECTED)
        lines = [
            f"{self.folder}: {c['samples']:,} samples ({c['heldout']:,} held out) for target {self.facts['target']}"
            + ("" if self.is_new else "; complete already, nothing changed"),
            f"{c['tokens']:,} tokens, {c['trained_tokens']:,} trained on, {c['anchors']:,} anchors; "
            f"longest sample {c['longest']:,} tokens",
            "answers    " + ", ".join(f"{count:,} {origin}" for origin, count in ordered(c["origins"])),
            f"{c['lines_in']:,} input lines = {c['lines_used']:,} used + {c['lines_in'] - c['lines_used']:,} left out"
            + (f"; {REJECTED_NAME} names them, and what of the used ones was left out or changed" if has_rows else ""),
        ]
        lines += reasons("left out", c["left_out"])
        lines += reasons("samples of used lines left out", c["samples_left_out"])
        lines += reasons("turns not trained on", c["turns_left_out"])
        if self.facts["longest"] < self.facts["max_length"]:
            lines.append(f"longest sample allowed: {self.facts['longest']:,} tokens, the target's positions")
        for name, text in (
            ("cut", "samples cut at the longest length"),
            ("answers_cut", "answers cut at the limit of new tokens"),
            ("answers_replaced", "given answers replaced by the target's own"),
            ("options_unread", "lines with template options that the template does not read"),
            ("tools_unread", "lines with tools that the template does not read"),
            ("thoughts_unwritten", "answers whose thought the template does not write"),
            ("answers_without_end", "answers without an end mark"),
            ("replaced_surrogates", "lone surrogates replaced by U+FFFD"),
        ):
            if c.get(name):
                lines.append(f"  {c[name]:,} {text}")
        if others := c.get("files_passed_over"):
            names = ", ".join(name for name, _ in ordered(others)[:SHOWN_REASONS])
            more = ", ..." if len(others) > SHOWN_REASONS else ""
            lines.append(f"  {sum(others.values()):,} files passed over, of formats that are not read: {names}{more}")
        if held_out := [source["name"] for source in self.facts["sources"] if source.get("split") == "heldout"]:
            names, count = ", ".join(held_out[:SHOWN_REASONS]), sum(c["sources"][name] for name in held_out)
            lines.append(f"  {count:,} lines of {names} held out but where they say otherwise: a part of that name")
        folder = quote(str(self.folder))
        lines += self.lengths
        lines.append(f"next: dflash plan --data {folder}, then dflash extract --data {folder}")
        return "\n".join(lines)


def reasons(text: str, counted: dict[str, int]) -> list[str]:
    """A line for each of the most frequent reasons, and one for the rest."""
    shown = ordered(counted)
    lines = [f"  {text}: {count:,} {reason}" for reason, count in shown[:SHOWN_REASONS]]
    rest = shown[SHOWN_REASONS:]
    return lines + ([f"  {text}: {sum(count for _, count in rest):,} for {len(rest)} other reasons"] if rest else [])


def ordered(counted: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counted.items(), key=lambda item: (-item[1], item[0]))
