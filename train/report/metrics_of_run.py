"""The numbers of metrics.jsonl as curves, read in one pass: also of a run that goes on, and of a broken file.

Knows names and lines; not what is drawn of them. No torch.
"""

import json
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..metrics import EXAM, METRICS_NAME, ORIGIN, TRAIN
from ..value_rules import is_count, is_finite, is_text, require_unicode

CURVES = (
    "loss",
    "accuracy",
    "acceptance_length_teacher_forced",
    "grad_norm",
    "lr",
    "rate_tok_s",
    "rate_tflops",
    "mfu",
    "step_s",
    "wait_s",
    "reduce_s",
    "memory_peak_bytes",
    "num_tokens",
    "rows_ready",
)
RECENT = 50  # updates that the numbers of single slots are a mean over


@dataclass(slots=True)
class Curve:
    """One number over the updates: steps and values, packed."""

    steps: array = field(default_factory=lambda: array("q"))
    values: array = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def points(self) -> list[tuple[float, float]]:
        return list(zip(self.steps, self.values))


@dataclass(slots=True)
class RunMetrics:
    """What metrics.jsonl holds: curves of updates by name, the newest updates whole, and all exams."""

    curves: dict[str, Curve] = field(default_factory=lambda: {name: Curve() for name in CURVES})
    recent: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=RECENT))
    exams: list[Mapping[str, Any]] = field(default_factory=list)
    origins: list[Mapping[str, Any]] = field(default_factory=list)
    num_updates: int = 0
    last_step: int = 0
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(lines: Iterable[Mapping[str, Any]]) -> "RunMetrics":
        found = RunMetrics()
        for line in lines:
            found.add(line)
        return found

    def add(self, line: Mapping[str, Any]) -> None:
        """One line of the file."""
        kind, step = line["kind"], line["step"]
        self.last_step = max(self.last_step, step)
        if kind == TRAIN:
            self.num_updates += 1
            self.recent.append(line)
            for name, curve in self.curves.items():
                if is_finite(value := line.get(name)):
                    curve.steps.append(step)
                    curve.values.append(value)
        elif kind == EXAM:
            self.exams.append(line)
        elif kind == ORIGIN:
            self.origins.append(line)

    def exam_points(self, name: str) -> list[tuple[float, float]]:
        """(step, number) of every exam that has it."""
        return points_of(self.exams, name)

    def mean(self, name: str) -> float | None:
        """Mean of a number over all updates that have it."""
        values = self.curves[name].values
        return sum(values) / len(values) if values else None

    def rate_tok_s(self) -> float | None:
        """All tokens over the time of all updates."""
        tokens, seconds = (sum(self.curves[name].values) for name in ("num_tokens", "step_s"))
        return tokens / seconds if tokens and seconds else None

    def wait_share(self) -> float | None:
        """The share of the updates' time in which the device had no row to compute on, 0 to 1."""
        waited, seconds = (sum(self.curves[name].values) for name in ("wait_s", "step_s"))
        return waited / seconds if seconds else None

    def peak_bytes(self) -> int | None:
        """The most memory that was measured."""
        return int(max(values)) if (values := self.curves["memory_peak_bytes"].values) else None


def points_of(lines: Iterable[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """(step, number) of every line that has the number."""
    return [(line["step"], line[name]) for line in lines if is_finite(line.get(name))]


def read_run_metrics(run_dir: Path) -> RunMetrics:
    """The numbers of a run, and notes on lines that count for nothing. Empty, with a note, where there is no file."""
    path = run_dir / METRICS_NAME
    if not path.is_file():
        return RunMetrics(notes=[f"there is no {METRICS_NAME}: the run has not come to its first number"])
    notes: list[str] = []
    found = RunMetrics.of(sound_lines(path, notes))
    found.notes = notes
    return found


def sound_lines(path: Path, notes: list[str]) -> Iterator[Mapping[str, Any]]:
    """The lines that are objects with a kind and a step; what is said of the others goes to `notes`."""
    broken: list[int] = []
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith("\n"):
                notes.append(f"the last line of {METRICS_NAME} is half-written and does not count")
                break
            line = object_of(text)
            if is_count(line.get("step")) and is_text(line.get("kind")):
                yield line
            else:
                broken.append(number)
    if broken:
        notes.append(
            f"{len(broken):,} lines of {METRICS_NAME} are broken and do not count, the first is line {broken[0]:,}"
        )


def object_of(text: str) -> dict[str, Any]:
    """The JSON object of a line; empty where it is none."""
    try:
        found = json.loads(text)
        if "\\u" in text:
            require_unicode(found)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
