"""A run folder as a report needs it: also one whose run goes on, was stopped, or is broken in parts.

What cannot be read is a note, never an end. Knows the run's files; no torch, and nothing of how they are shown.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from ... import UserError
from ...settings import resolve
from ..config import TrainConfig
from ..environment import ENVIRONMENT_NAME
from ..evaluate.evaluation_file import read_evaluation
from ..facts import CHECKPOINTS_NAME, CONFIG_NAME, FACTS_NAME, RunFacts, read_facts
from ..outcome import REPORT_NAME
from ..value_rules import is_finite, is_object, is_text, list_of, object_of, or_none, require_unicode, wrong_key
from .held import is_held
from .metrics_of_run import RunMetrics, read_run_metrics
from .of_sweep import SweepPlace, place_in_sweep
from .series import EVALUATIONS

FINISHED, GOING, STOPPED = "finished", "going", "stopped"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """All that RUN says. `evaluations` are by file name, `config` is None where train.toml cannot be read.

    `sweep` is None for a run that belongs to none.
    """

    run_dir: Path
    facts: RunFacts
    package_version: str
    state: str
    metrics: RunMetrics
    evaluations: Mapping[str, Mapping[str, Any]]
    config: TrainConfig | None
    outcome: Mapping[str, Any]
    environment: Mapping[str, Any]
    checkpoints: tuple[str, ...]
    sweep: SweepPlace | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.run_dir.resolve().name or str(self.run_dir)

    def last_exam(self) -> Mapping[str, Any] | None:
        return self.metrics.exams[-1] if self.metrics.exams else None

    def best_exam(self) -> Mapping[str, Any] | None:
        """The exam of a trained drafter with the largest acceptance length, the newest of several."""
        exams = [exam for exam in self.metrics.exams if is_finite(exam.get("acceptance_length"))]
        trained = [exam for exam in exams if exam["step"] > 0 or self.facts.steps == 0]
        return max(trained, key=lambda exam: (exam["acceptance_length"], exam["step"]), default=None)


def read_run(run_dir: Path, sweep: SweepPlace | None = None) -> RunFolder:
    """Reads RUN. Raises UserError where there is no run at all, or one of another format.

    `sweep` is its place in its sweep, where that is known already.
    """
    facts, notes = read_facts(run_dir), []
    sweep = sweep or place_in_sweep(run_dir)
    metrics = read_run_metrics(run_dir)
    state, config = state_of(run_dir), read_config(run_dir, notes)
    if state != FINISHED:
        why = why_unfinished(state, config, metrics.last_step, sweep)
        notes.append(f"step {metrics.last_step:,} of {facts.steps:,}: {why}")
    notes += metrics.notes
    if not metrics.exams:
        notes.append("no exam yet: acceptance is unknown")
    elif metrics.exams[-1].get("acceptance_length") is None:
        notes.append("the exams had nothing to measure: the store holds no held-out answer with a cycle")
    return RunFolder(
        run_dir=run_dir,
        facts=facts,
        package_version=str(read_object(run_dir / FACTS_NAME, []).get("package_version", "unknown")),
        state=state,
        metrics=metrics,
        evaluations=read_evaluations(run_dir, notes),
        config=config,
        outcome=read_object(run_dir / REPORT_NAME, notes),
        environment=read_environment(run_dir, notes),
        checkpoints=checkpoint_names(run_dir),
        sweep=sweep,
        notes=tuple(notes),
    )


def state_of(run_dir: Path) -> str:
    """FINISHED with a report.json, GOING while a process holds the folder's lock, else STOPPED."""
    if (run_dir / REPORT_NAME).is_file():
        return FINISHED
    return GOING if is_held(run_dir) else STOPPED


def why_unfinished(state: str, config: TrainConfig | None, step: int, sweep: SweepPlace | None) -> str:
    """What is known of a run that has no report.json."""
    if state == GOING:
        return "the run is still going; these are its numbers so far"
    if sweep is not None:
        return sweep.why_unfinished()
    if config is not None and config.stop_at == step:
        return "the run stands where stop_at ended it"
    return "the run was stopped or failed; its command said why, and typed again goes on from the newest checkpoint"


def checkpoint_names(run_dir: Path) -> tuple[str, ...]:
    folder = run_dir / CHECKPOINTS_NAME
    names = (entry.name for entry in folder.iterdir()) if folder.is_dir() else ()
    return tuple(sorted(name for name in names if ".tmp." not in name))


def is_height(value: Any) -> bool:
    return is_finite(value) and value >= 0


CHARTED = {
    "histogram": or_none(list_of(is_height)),
    "per_position": or_none(list_of(or_none(is_height))),
    "intervals": or_none(is_object),
}
"""What a report reads of an evaluation."""


def read_evaluations(run_dir: Path, notes: list[str]) -> dict[str, Mapping[str, Any]]:
    found = {}
    for name, *_ in EVALUATIONS:
        if (run_dir / name).exists():
            try:
                evaluation = read_evaluation(run_dir / name)
            except UserError as error:
                notes.append(str(error).splitlines()[0])
                continue
            if strange := wrong_key(evaluation, CHARTED):
                notes.append(f"{name} is broken and left out: see {strange}")
            else:
                found[name] = evaluation
    return found


def read_environment(run_dir: Path, notes: list[str]) -> dict[str, Any]:
    """environment.json, without a memory plan that cannot be read."""
    found = read_object(run_dir / ENVIRONMENT_NAME, notes)
    plan = found.get("memory_plan")
    if isinstance(plan, dict) and not is_plan(plan):
        notes.append(f"{ENVIRONMENT_NAME} is broken: its memory plan is left out")
        return {**found, "memory_plan": None}
    return found


PART = object_of({"name": is_text, "grows_with": is_text, "size_bytes": is_finite})


def is_plan(plan: Mapping[str, Any]) -> bool:
    """Whether a memory plan has what a report shows of it."""
    are_sizes = all(is_finite(plan.get(name)) for name in ("peak_bytes", "card_bytes"))
    return list_of(PART)(plan.get("parts", [])) and are_sizes and "largest" in plan and plan["peak_bytes"] > 0


def read_config(run_dir: Path, notes: list[str]) -> TrainConfig | None:
    """The resolved config of the run, as train.toml has it."""
    try:
        return resolve(TrainConfig, name="train", file=run_dir / CONFIG_NAME)
    except (UserError, OSError) as error:
        notes.append(f"{CONFIG_NAME} cannot be read: {str(error).splitlines()[0]}")
        return None


def read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none, with a note where it is broken."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        require_unicode(found)
    except (ValueError, RecursionError, OSError) as error:
        found = None
        notes.append(f"{path.name} is broken: {type(error).__name__}")
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of the config by its dotted name, beside its default and what `--help` says of it.

    A default of None is filled in by the run: it follows the store, the target or the device.
    """

    name: str
    value: Any
    default: Any
    text: str

    @property
    def is_changed(self) -> bool:
        return self.default is not None and self.value != self.default


def settings_of(config: Any, default: Any = None, prefix: str = "") -> list[Setting]:
    """Every field of a config, in order, those of its sections behind it."""
    default = type(config)() if default is None else default
    own: list[Setting] = []
    sections: list[Setting] = []
    for each in fields(config):
        value, usual, name = getattr(config, each.name), getattr(default, each.name), f"{prefix}{each.name}"
        if is_dataclass(value):
            sections += settings_of(value, usual, f"{name}.")
        else:
            own.append(Setting(name, value, usual, each.metadata["text"]))
    return [*own, *sections]
