"""What `dflash sweep` says at its end: the ranking, what mattered, what failed. Pure text of a record."""

import shlex
from dataclasses import dataclass
from typing import Any

from .effects import ALONE, share_text
from .halving import too_late
from .record import EFFECTS_NAME, FAILED, FINISHED, INTERRUPTED, OUT, PAUSED, RunRecord, Sweep, numbers_text, shown

SHOWN_RUNS, SHOWN_VALUES = 20, 6
HEAD = (
    f"{'rank':>4} {'run':>5}  {'acceptance length':<22} {'all cycles':>10} {'parameters':>12} {'draft ms':>9}  settings"
)
NOTE = "acceptance: walk over held-out answers, bonus token included, mean over answers; in brackets 95 %"


@dataclass(frozen=True, slots=True)
class SweepReport:
    """The end of a sweep; `is_sound` says whether every run ended, or was stopped by the rule."""

    sweep: Sweep

    @property
    def is_sound(self) -> bool:
        return not self.sweep.with_state(FAILED, INTERRUPTED, PAUSED)

    def text(self) -> str:
        """The report, ending with the next commands."""
        sweep = self.sweep
        counts = {state: len(sweep.with_state(state)) for state in (FINISHED, OUT, PAUSED, INTERRUPTED, FAILED)}
        head = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        lines = [f"sweep of {len(sweep.runs)} runs: {head}; {sweep.folder}", *self.ranking(), *self.effects()]
        return "\n".join([*lines, *self.faults(), *self.decoded(), *self.next_commands()])

    def ranking(self) -> list[str]:
        """The best runs, a line each."""
        lines = ["", HEAD] if self.sweep.ranking else []
        for place, number in enumerate(self.sweep.ranking[:SHOWN_RUNS], start=1):
            lines.append(f"{place:>4} {number:>5}  {self.line(self.sweep.run(number))}")
        if len(self.sweep.ranking) > SHOWN_RUNS:
            lines.append(f"     and {len(self.sweep.ranking) - SHOWN_RUNS} more, in sweep.json")
        return [*lines, NOTE] if lines else []

    def line(self, run: RunRecord) -> str:
        found, rung = run.results, run.rungs[-1] if run.rungs else {}
        if found is None:
            length = f"{rung['acceptance_length']:.3f} at step {rung['step']}"
            return f"{length:<22} {rung['acceptance_length_cycles']:>10.3f} {'-':>12} {'-':>9}  {shown(run.overrides)}"
        length = f"{found['acceptance_length']:.3f} {interval(found)}"
        own = f"{found['acceptance_length_cycles']:>10.3f} {found['num_parameters']:>12,}"
        return f"{length:<22} {own} {1000 * found['draft_s']:>9.2f}  {shown(run.overrides)}"

    def effects(self) -> list[str]:
        """Which setting mattered."""
        if not self.sweep.effects:
            return []
        step = self.sweep.effects[0]["step"]
        at = "at the end" if step is None else f"at step {step}"
        lines = ["", f"effects on the acceptance length {at}: mean (lowest to highest, runs)"]
        for effect in self.sweep.effects:
            lines.append(f"  {effect['field']}: {share_text(effect)}")
            for value in effect["values"][:SHOWN_VALUES]:
                span = f"{value['low']:.3f} to {value['high']:.3f}, {value['num_runs']}"
                lines.append(f"    {value['label']:<20} {value['mean']:.3f} ({span})")
            more = len(effect["values"]) - SHOWN_VALUES
            lines += [f"    and {more} values more"] if more > 0 else []
        return [*lines, f"shares are of {ALONE}"]

    def faults(self) -> list[str]:
        """Runs that did not come to their end, by name."""
        wrong = self.sweep.with_state(FAILED, INTERRUPTED)
        lines = [f"run {run.number} {run.state} at step {run.step}: {run.error} (see {run.log})" for run in wrong]
        waiting = self.sweep.with_state(PAUSED)
        if waiting:
            lines.append(f"runs {numbers_text(waiting)} wait at a rung for the interrupted ones")
        if late := too_late(self.sweep):
            lines.append(f"runs {numbers_text(late)} failed, and their rung was decided without them")
        if waiting or len(late) < len(wrong):
            lines.append(f"the same command takes {'the others' if late else 'them'} up again")
        return ["", *lines] if lines else []

    def decoded(self) -> list[str]:
        """What the target said of the best."""
        runs = [run for number in self.sweep.ranking if (run := self.sweep.run(number)).decoded is not None]
        lines = [f"run {run.number} decoded with the target: {decoded_text(run.decoded or {})}" for run in runs]
        return ["", *lines] if lines else []

    def next_commands(self) -> list[str]:
        lines = [f"plot       {self.sweep.folder / EFFECTS_NAME}"] if self.sweep.effects else []
        commands = commands_of_best(self.sweep)
        return [*lines, *(f"{'      ' if i else 'next: '}{command}" for i, command in enumerate(commands))]


def commands_of_best(sweep: Sweep) -> list[str]:
    """What is typed next with the best run; none where no run is finished."""
    finished = [number for number in sweep.ranking if sweep.run(number).state == FINISHED]
    if not finished:
        return []
    best = shlex.quote(str(sweep.folder / sweep.run(finished[0]).folder))
    return [f"dflash evaluate {best}", f"dflash export {best} --checkpoint latest"]


def interval(found: dict[str, Any]) -> str:
    """Like [1.234, 1.456]; nothing where it is not known."""
    bounds = found["intervals"].get("acceptance_length")
    return f"[{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else ""


def decoded_text(found: dict[str, Any]) -> str:
    if found["acceptance_length"] is None:
        return "nothing to measure"
    equal = f"{found['num_equal']}/{found['num_prompts']} answers equal the target's own"
    return (
        f"{found['acceptance_length']:.3f} tokens a forward, {equal}, {found['speed_up'] or 0:.2f} times plain decoding"
    )
