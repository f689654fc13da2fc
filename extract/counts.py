"""What `prepare` counted, and how it tells it."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from ..store.samples import eligible_anchors

SHOWN_REASONS = 12


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
    samples_without_anchor: int = 0
    """Dropped samples of lines that gave others."""
    answers_cut: int = 0
    """Answers of the target that met the limit before an eos."""
    answers_replaced: int = 0
    """Given answers that the target's own replaced."""
    replaced_surrogates: int = 0
    """Lone surrogates that became U+FFFD."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Lines left out, by reason."""
    turns_left_out: Counter[str] = field(default_factory=Counter)
    """Assistant turns of used lines that are not trained on, by reason."""
    first_left_out: str = ""

    def add_sample(self, ids: np.ndarray, mask: np.ndarray, split: str) -> None:
        """ids [S], mask [S] bool."""
        self.samples += 1
        self.heldout += split == "heldout"
        self.tokens += len(ids)
        self.trained_tokens += int(mask.sum())
        self.anchors += int(eligible_anchors(mask).sum())
        self.longest = max(self.longest, len(ids))

    def add_left_out(self, entry: dict[str, Any]) -> None:
        self.left_out[entry["reason"]] += 1
        if not self.first_left_out:
            detail = f" ({entry['detail']})" if entry["detail"] else ""
            self.first_left_out = f"line {entry['line']} of {entry['source']}, {entry['reason']}{detail}"

    def as_plain(self) -> dict[str, Any]:
        """The report of data.json."""
        assert self.lines_in == self.lines_used + sum(self.left_out.values()), "an input line was not counted"
        plain = asdict(self)
        del plain["first_left_out"]
        return plain | {"left_out": dict(self.left_out), "turns_left_out": dict(self.turns_left_out)}


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What lies in the folder; `is_new` is False when an earlier run had made it."""

    folder: Path
    facts: dict[str, Any]
    counts: dict[str, Any]
    is_new: bool

    def text(self) -> str:
        c = self.counts
        lines = [
            f"{self.folder}: {c['samples']:,} samples ({c['heldout']:,} held out) for target {self.facts['target']}"
            + ("" if self.is_new else "; complete already, nothing changed"),
            f"{c['tokens']:,} tokens, {c['trained_tokens']:,} trained on, {c['anchors']:,} anchors; "
            f"longest sample {c['longest']:,} tokens",
            f"{c['lines_in']:,} input lines = {c['lines_used']:,} used + {c['lines_in'] - c['lines_used']:,} left out",
        ]
        lines += [f"  left out: {count:,} {reason}" for reason, count in ordered(c["left_out"])]
        lines += [f"  turns not trained on: {count:,} {reason}" for reason, count in ordered(c["turns_left_out"])]
        if self.facts["longest"] < self.facts["max_length"]:
            lines.append(f"longest sample allowed: {self.facts['longest']:,} tokens, the target's positions")
        for name, text in (
            ("cut", "samples cut at the longest length"),
            ("samples_without_anchor", "samples of used lines dropped, no anchor"),
            ("answers_cut", "answers cut at the limit of new tokens"),
            ("answers_replaced", "given answers replaced by the target's own"),
            ("replaced_surrogates", "lone surrogates replaced by U+FFFD"),
        ):
            if c[name]:
                lines.append(f"  {c[name]:,} {text}")
        folder = quote(str(self.folder))
        lines.append(f"next: dflash plan --data {folder}, then dflash extract --data {folder}")
        return "\n".join(lines)


def ordered(reasons: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(reasons.items(), key=lambda item: -item[1])[:SHOWN_REASONS]
