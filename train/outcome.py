"""How a run ended: `report.json`, and the text that `dflash train` prints.

Reads what the run wrote; knows no torch, so that the launcher stays small.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import UserError
from .facts import RunFacts
from .metrics import EXAM, METRICS_NAME, TRAIN, read_metrics
from .value_rules import is_count, is_finite, is_object, is_text, or_none, wrong_key

REPORT_NAME = "report.json"
NOTHING = "nothing to measure: the store holds no held-out answer with a cycle"
GREEDY = "target greedy"  # the origin of answers on which the walk equals decoding
ALWAYS = {
    **{"steps": is_count, "epochs": is_finite, "num_prompts": is_count},
    **{name: or_none(is_finite) for name in ("loss", "acceptance_length")},
    **{"best_step": or_none(is_count), "origin": or_none(is_text)},
}
MEASURED = {name: is_finite for name in ("acceptance_length_untrained", "best_acceptance_length", "best_step")}
"""What report.json holds; the second where there was something to measure."""
NOT_EXACT = "           not all of them are greedy answers of this target: agreement with text, not decoding"


def outcome_of(
    run_dir: Path, facts: RunFacts, *, best_step: int | None, best_acceptance_length: float | None
) -> dict[str, Any]:
    """The content of report.json: acceptance lengths are None where there was nothing to measure.

    Raises UserError where metrics.jsonl has lost lines: those of the first exam or of the last.
    """
    metrics = read_metrics(run_dir / METRICS_NAME)
    exams = [line for line in metrics if line["kind"] == EXAM]
    require_exams([line["step"] for line in exams], facts.steps, run_dir / METRICS_NAME)
    losses = [line["loss"] for line in metrics if line["kind"] == TRAIN]
    return {
        "steps": facts.steps,
        "epochs": facts.steps * facts.rows_per_step / facts.rows_per_epoch,
        "loss": losses[-1] if losses else None,
        "num_prompts": exams[-1]["num_prompts"],
        "origin": exams[-1].get("origin"),
        "acceptance_length_untrained": exams[0]["acceptance_length"],
        "acceptance_length": exams[-1]["acceptance_length"],
        "best_acceptance_length": best_acceptance_length,
        "best_step": best_step,
    }


def require_exams(found: Sequence[int], last: int, path: Path) -> None:
    """Raises UserError unless exams start at step 0 and end with the last step, as every run holds them."""
    if not found or found[0] != 0 or found[-1] != last:
        raise UserError(
            f"{str(path)!r} holds {exams_text(found)}: its lines were removed while the run trained",
            f"the exams of steps 0 to {last}; the checkpoints are not touched by it",
            "bring the file back and give the same command again, or train into another --out",
        )


def require_exams_before(run_dir: Path, step: int, exam_step: int | None) -> None:
    """Raises UserError, before a run goes on from `step`, where the lines of its exams up to there were removed.

    `exam_step` is that of the newest exam; None before there was one.
    """
    path = run_dir / METRICS_NAME
    found = [line["step"] for line in read_metrics(path, EXAM) if line["step"] <= step]
    if exam_step is None or (found and found[0] == 0 and exam_step in found):
        return
    export = f"dflash export {shlex.quote(str(run_dir))} --checkpoint {step}"
    raise UserError(
        f"{str(path)!r} holds {exams_text(found)}: its lines were removed since the checkpoint of step {step}",
        f"the exams of steps 0 to {exam_step}, with which the run ends its report; the checkpoints are whole",
        f"bring the file back and give the same command again; without it `{export}` keeps what was trained, and "
        "another --out trains anew (with --warm-start from that folder)",
    )


def exams_text(steps: Sequence[int]) -> str:
    return f"exams of steps {steps[0]} to {steps[-1]}" if steps else "no exam"


def export_command(run_dir: Path, has_best: bool) -> str:
    """The command that exports the run; without a best checkpoint it must name another."""
    return f"dflash export {shlex.quote(str(run_dir))}{'' if has_best else ' --checkpoint latest'}"


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What `dflash train` says at its end. `start` is 'new', 'resumed' or 'finished' (nothing was done)."""

    run_dir: Path
    start: str
    start_step: int
    outcome: Mapping[str, Any]

    def text(self) -> str:
        """The report, ending with the next commands."""
        outcome, run = self.outcome, shlex.quote(str(self.run_dir))
        lines = [self.headline()]
        if outcome["acceptance_length"] is None:
            lines.append(f"held-out exam: {NOTHING}")
        else:
            lines.append(
                f"acceptance length {outcome['acceptance_length']:.3f} at the end, "
                f"{outcome['acceptance_length_untrained']:.3f} before training, "
                f"best {outcome['best_acceptance_length']:.3f} at step {outcome['best_step']} "
                f"(walk over held-out answers, bonus token included, mean over {outcome['num_prompts']} answers; "
                f"origin: {outcome.get('origin')})"
            )
            if outcome.get("origin") != GREEDY:
                lines.append(NOT_EXACT)
        lines += [f"plot       {path}" for path in sorted(self.run_dir.glob("*.png"))]
        lines += [
            f"next: dflash evaluate {run} --offline",
            f"      dflash evaluate {run}",
            f"      {export_command(self.run_dir, outcome['best_step'] is not None)}",
        ]
        return "\n".join(lines)

    def headline(self) -> str:
        """What was done, in one line."""
        outcome = self.outcome
        if self.start == "finished":
            return f"{self.run_dir} is finished ({outcome['steps']} steps); nothing was changed"
        loss = "" if outcome["loss"] is None else f", loss {outcome['loss']:.4f} at the last step"
        since = f", resumed at step {self.start_step}" if self.start == "resumed" else ""
        return f"trained {outcome['steps']} steps ({outcome['epochs']:.2f} epochs){since}{loss}: {self.run_dir}"


def read_report(run_dir: Path, start: str, start_step: int) -> TrainReport:
    """The report of a finished run. Raises UserError where its file is broken."""
    path = run_dir / REPORT_NAME
    try:
        outcome = json.loads(path.read_text(encoding="utf-8"))
        require_outcome(outcome)
    except (ValueError, RecursionError, OSError) as error:
        advice = "remove it, and give the same command again: it writes the report anew"
        raise UserError(f"{str(path)!r} is broken: {error}", "the report of a finished run", advice) from error
    return TrainReport(run_dir, start, start_step, outcome)


def require_outcome(outcome: Any) -> None:
    """Raises ValueError unless a report can be told from it."""
    if not is_object(outcome):
        raise ValueError(f"it holds {str(outcome)[:80]!r}, no object")
    rules = ALWAYS if outcome.get("acceptance_length") is None else ALWAYS | MEASURED
    if name := wrong_key(outcome, rules):
        raise ValueError(f"its {name} is {outcome[name]!r}" if name in outcome else f"it has no {name}")
