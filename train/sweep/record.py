"""`sweep.json`: what a sweep is and where each of its runs stands; replaced whole after every change.

Knows names, numbers and one file; docs/sweeps.md describes it. It does not know how a run is trained.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import UserError
from ...store.files import publish, storage_error
from ...store.manifest import collect
from ..facts import HARMLESS, SHOWN_DIFFERENCES, StorePart
from ..value_rules import require_unicode
from .choices import Overrides
from .sound import require_sound

FORMAT = 2
SWEEP_NAME, CONFIG_NAME, EFFECTS_NAME = "sweep.json", "sweep.toml", "effects.png"
RUNS_NAME, LOGS_NAME = "runs", "logs"
WAITING, RUNNING, PAUSED, OUT = "waiting", "running", "paused", "out"
FINISHED, FAILED, INTERRUPTED = "finished", "failed", "interrupted"
STATES = (RUNNING, WAITING, PAUSED, FINISHED, OUT, INTERRUPTED, FAILED)  # in the order in which they are listed

DEFINITIONS = {
    "acceptance_length": "tokens produced by one cycle, bonus token included, mean over held-out answers of each "
    "answer's mean over its cycles; in `results` of the last checkpoint on all held-out answers (`dflash evaluate "
    "--offline`), in `rungs` of the exam at that step (the first `eval_samples` held-out samples)",
    "acceptance_length_cycles": "the same, mean over all cycles of all held-out answers",
    "intervals": "of each mean by its name: 95 %, bootstrap over prompts, as `dflash evaluate` has them",
    "ranking": "runs that ended before runs that the rule stopped, those of a later rung before those of an earlier "
    "one; then by acceptance_length, the larger first; then by num_parameters, the fewer first; then by number",
    "num_parameters": "trained numbers of the drafter: its speed for the ranking, the same on every device",
    "draft_s": "time of one draft, a block behind 512 tokens of context, on the run's device, median of 20, seconds; "
    "not ranked: it differs from time to time",
    "train_s": "sum of step_s over the run's updates, seconds",
    "share": "of the variance of acceptance_length over the runs, the part between the values of a field: sum over its "
    "values of runs times squared distance of their mean from the mean of all, over the sum of squared distances of "
    "all runs. Each field alone: fields that were varied together share what they explain, so that in an unbalanced "
    "sweep the shares can add up to more than 1. Null where it would mean nothing: all runs are equal, or most of them "
    "are alone with their value",
}


@dataclass(kw_only=True, slots=True)
class RunRecord:
    """One run: what it sets, and where it stands."""

    number: int
    overrides: Overrides
    state: str = WAITING
    device: str | None = None
    step: int = 0
    steps: int | None = None
    rungs: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    results: dict[str, Any] | None = None
    decoded: dict[str, Any] | None = None

    @property
    def folder(self) -> str:
        """Below the sweep's folder."""
        return f"{RUNS_NAME}/{self.number:04d}"

    @property
    def log(self) -> str:
        """Where its processes write to, below the sweep's folder."""
        return f"{LOGS_NAME}/{self.number:04d}.txt"

    @property
    def acceptance(self) -> float | None:
        """The newest acceptance length: of the end, else of the last rung."""
        last = self.results or (self.rungs[-1] if self.rungs else {})
        return last.get("acceptance_length")


@dataclass(kw_only=True, slots=True)
class Sweep:
    """The content of sweep.json."""

    folder: Path
    store: str
    manifest: dict[str, Any]  # of the store, as run.json has it
    strategy: str
    count: int | None
    seed: int | None
    fields: list[str]
    base: Overrides
    halving: dict[str, Any] | None
    segments: str | None = None  # what all runs read of the store; both None until it was first opened
    snapshot: str | None = None
    devices: list[str] = field(default_factory=list)
    runs: list[RunRecord] = field(default_factory=list)
    ranking: list[int] = field(default_factory=list)
    effects: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rungs(self) -> list[int]:
        """The steps at which runs are compared."""
        return [] if self.halving is None else self.halving["steps"]

    @property
    def part(self) -> StorePart | None:
        """What all runs read of the store; None until it was first opened."""
        return None if self.segments is None or self.snapshot is None else StorePart(self.segments, self.snapshot)

    def with_state(self, *states: str) -> list[RunRecord]:
        return [run for run in self.runs if run.state in states]

    def run(self, number: int) -> RunRecord:
        return next(run for run in self.runs if run.number == number)

    def write(self) -> None:
        """Replaces sweep.json."""
        values = {name: getattr(self, name) for name in SAVED} | {
            "runs": [dataclasses.asdict(run) | {"folder": run.folder} for run in self.runs]
        }
        head = {"format": FORMAT, "name": self.folder.absolute().name}
        text = json.dumps(head | values | {"definitions": DEFINITIONS}, indent=1, allow_nan=False)
        publish(self.folder / SWEEP_NAME, (text + "\n").encode())


SAVED = [f.name for f in dataclasses.fields(Sweep) if f.name not in ("folder", "runs")]


def read_sweep(folder: Path) -> Sweep | None:
    """The sweep of a folder, None where there is none. Raises UserError for a broken file, or another format."""
    path = folder / SWEEP_NAME
    try:
        if not path.is_file():
            return None
        values = json.loads(path.read_text(encoding="utf-8"))
        require_unicode(values)
        found = values["format"]
        if found == FORMAT:
            names = [f.name for f in dataclasses.fields(RunRecord)]
            runs = [RunRecord(**{name: run[name] for name in names}) for run in values["runs"]]
            sweep = Sweep(folder=folder, runs=runs, **{name: values[name] for name in SAVED if name != "runs"})
            require_sound(sweep, STATES)
            return sweep
    except OSError as error:
        raise storage_error(error, path) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{str(path)!r} is broken: {type(error).__name__}: {error}".replace("\n", " "),
            "the record of a sweep, as it was written",
            "copy it again, or take another --out",
        ) from error
    raise UserError(
        f"{str(path)!r} has format {found!r}", f"format {FORMAT}", "use the version of this package that wrote it"
    )


def merged(old: Sweep | None, new: Sweep) -> Sweep:
    """The sweep to go on with: the old one, and runs that the new settings add to it.

    Old runs keep their numbers. Raises UserError where anything else differs, and where runs would come too late to a
    rung that is decided.
    """
    if old is None:
        return new
    found = differences(old, new)
    known = [run.overrides for run in old.runs]
    gone = [run for run in old.runs if run.overrides not in [other.overrides for other in new.runs]]
    found += [f"run {run.number} ({shown(run.overrides)}) is no longer among them" for run in gone]
    added = [run for run in new.runs if run.overrides not in known]
    is_decided = any(rung["is_kept"] is not None for run in old.runs for rung in run.rungs)
    if added and is_decided and not found:
        found = [f"{len(added)} runs were added, and the rung at step {old.rungs[0]} is decided"]
    if found:
        more = f"; and {len(found) - SHOWN_DIFFERENCES} more" if len(found) > SHOWN_DIFFERENCES else ""
        raise UserError(
            f"{str(new.folder)!r} holds a sweep of other settings: {'; '.join(found[:SHOWN_DIFFERENCES])}{more}",
            "the settings that it was started with, or more runs beside them",
            "go back to them, or take another --out",
        )
    numbered = [dataclasses.replace(run, number=len(old.runs) + i) for i, run in enumerate(added, start=1)]
    old.strategy, old.count, old.seed, old.fields, old.base = new.strategy, new.count, new.seed, new.fields, new.base
    old.devices, old.store = new.devices, new.store
    old.runs += numbered
    return old


def differences(old: Sweep, new: Sweep) -> list[str]:
    """What besides its runs differs; the folder of the store may."""
    of_store: list[tuple[str, Any, Any]] = []
    collect(old.manifest, new.manifest, "", of_store)
    pairs = [(f"store.{name}", before, now) for name, before, now in of_store]
    pairs.append(("halving", old.halving, new.halving))
    for name in dict.fromkeys([*old.base, *new.base]):
        if name not in HARMLESS:
            pairs.append((f"train.{name}", old.base.get(name), new.base.get(name)))
    return [f"{name} was {before!r} and is now {now!r}" for name, before, now in pairs if before != now]


def shown(overrides: Mapping[str, Any]) -> str:
    """Overrides on one line, as short as they are clear."""
    return ", ".join(f"{name}={value_text(value)}" for name, value in overrides.items())


def value_text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(value_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def numbers_text(runs: Iterable[RunRecord] | Sequence[int]) -> str:
    """Numbers of runs, or numbers, as a list in words."""
    return ", ".join(str(run.number if isinstance(run, RunRecord) else run) for run in runs)
