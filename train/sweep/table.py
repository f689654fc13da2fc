"""What a sweep shows while it runs: on a terminal a table that is drawn again in place, elsewhere a line an event."""

import shutil
import sys
from collections.abc import Mapping
from typing import Any

from ..metrics import EXAM, TRAIN
from .record import FINISHED, RUNNING, STATES, RunRecord, Sweep, numbers_text, shown

COLUMNS = f"{'run':>5} {'device':<8} {'state':<11} {'step':>15} {'loss':>8} {'acceptance':>10} {'rung':>6} {'ETA':>8}"
SPARE_LINES = 3  # of the terminal, below the table
MOST_TIMES = 50  # updates whose mean says how long the rest takes


class LiveTable:
    """Rows of the runs under way and of the newest others; all of it goes to stderr."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.is_drawn = sys.stderr.isatty()
        self.num_lines = 0
        self.losses: dict[int, float] = {}
        self.acceptances: dict[int, float | None] = {}
        self.step_s: dict[int, list[float]] = {}

    def started(self, run: RunRecord) -> None:
        self.step_s[run.number] = []
        self.say(f"run {run.number} on {run.device}: {shown(run.overrides)}")

    def heard(self, run: RunRecord, kind: str, numbers: Mapping[str, Any]) -> None:
        """One message of a run's trainer."""
        if kind == TRAIN:
            self.losses[run.number] = numbers["loss"]
            self.step_s[run.number] = [*self.step_s[run.number][1 - MOST_TIMES :], numbers["step_s"]]
        elif kind == EXAM:
            self.acceptances[run.number] = numbers["acceptance_length"]
            self.say(f"run {run.number}: step {run.step} of {run.steps}, acceptance {number(self.acceptance(run))}")

    def acceptance(self, run: RunRecord) -> float | None:
        return run.acceptance if run.state == FINISHED else self.acceptances.get(run.number, run.acceptance)

    def ended(self, run: RunRecord) -> None:
        reason = f": {run.error} (see {run.log})" if run.error else ""
        self.say(f"run {run.number} {run.state} at step {run.step}, acceptance {number(self.acceptance(run))}{reason}")

    def decided(self, step: int, sweep: Sweep) -> None:
        """Says who goes on behind a rung."""
        kept = {True: [], False: []}
        for run in sweep.runs:
            for rung in run.rungs:
                if rung["step"] == step:
                    kept[rung["is_kept"]].append(run)
        out = f", {numbers_text(kept[False])} are out" if kept[False] else ""
        self.say(f"rung at step {step}: runs {numbers_text(kept[True])} go on{out}")

    def say(self, line: str) -> None:
        """A line of its own, above the table."""
        self.erase()
        print(line, file=sys.stderr, flush=True)
        self.draw()

    def redraw(self) -> None:
        self.erase()
        self.draw()

    def close(self) -> None:
        self.redraw()
        self.is_drawn = False

    def erase(self) -> None:
        if self.is_drawn and self.num_lines:
            print(f"\x1b[{self.num_lines}F\x1b[J", end="", file=sys.stderr)
        self.num_lines = 0

    def draw(self) -> None:
        if not self.is_drawn:
            return
        size = shutil.get_terminal_size()
        lines = [line[: size.columns - 1] for line in self.lines(size.lines - SPARE_LINES)]
        print("\n".join(lines), file=sys.stderr, flush=True)
        self.num_lines = len(lines)

    def lines(self, most: int) -> list[str]:
        """The table: a line of counts, and as many runs as there is room for, those under way first."""
        counts = {state: len(self.sweep.with_state(state)) for state in STATES}
        head = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        order = {state: place for place, state in enumerate(STATES)}
        best = {name: place for place, name in enumerate(self.sweep.ranking)}
        runs = sorted(self.sweep.runs, key=lambda run: (order[run.state], best.get(run.number, 1e9), run.number))
        return [
            f"{len(self.sweep.runs)} runs: {head}",
            f"{COLUMNS}  settings",
            *map(self.row, runs[: max(1, most - 2)]),
        ]

    def row(self, run: RunRecord) -> str:
        steps = f"{run.step}/{'?' if run.steps is None else run.steps}"
        loss = number(self.losses.get(run.number))
        rung = f"{len(run.rungs)}/{len(self.sweep.rungs)}" if self.sweep.rungs else "-"
        return (
            f"{run.number:>5} {run.device or '-':<8} {run.state:<11} {steps:>15} {loss:>8} "
            f"{number(self.acceptance(run)):>10} {rung:>6} {self.rest(run):>8}  {shown(run.overrides)}"
        )

    def rest(self, run: RunRecord) -> str:
        """How long the run has to its next stop, by its last updates; exams are not counted."""
        times = self.step_s.get(run.number, [])
        if run.state != RUNNING or not times or run.steps is None:
            return "-"
        stop = next(iter(self.sweep.rungs[len(run.rungs) :]), run.steps)
        return duration(max(0, stop - run.step) * sum(times) / len(times))


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def duration(seconds: float) -> str:
    """Like 1:05 or 2:01:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
