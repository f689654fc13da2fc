"""A sweep folder, or several runs, as entries to compare: what differs between them and how far each came.

Computes no ranking of a sweep: sweep.json has it. The effects are those of its runs, as sweep.json has them, too.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ... import UserError
from ..sweep.effects import grouped, main_effects
from ..sweep.halving import too_late
from ..sweep.record import DEFINITIONS, STATES, SWEEP_NAME, RunRecord, Sweep, numbers_text, read_sweep, shown
from ..sweep.report import commands_of_best
from ..value_rules import is_finite
from .held import is_held
from .measured_on import unlike
from .of_sweep import SweepPlace, again_command, place_of, unfinished
from .run_folder import RunFolder, read_run, settings_of
from .words import value_text

OWN_PLACE = ("out",)  # differs between any two runs and says nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One run among others. `run` is None where its folder cannot be read, and `error` says why."""

    label: str
    anchor: str
    state: str
    run: RunFolder | None
    settings: Mapping[str, str]  # of the fields that differ
    rank: int | None = None
    results: Mapping[str, Any] | None = None
    decoded: Mapping[str, Any] | None = None
    error: str | None = None

    @property
    def title(self) -> str:
        """The label, and what differs."""
        told = (f"{short_name(name)} {value}" for name, value in self.settings.items())
        return ", ".join([self.label, *told])


def short_name(field: str) -> str:
    """The last part of a dotted name, where it says enough."""
    last = field.rpartition(".")[2]
    return field if last == "name" else last


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Entries, the best first, and what is known of all."""

    title: str
    path: str
    fields: Sequence[str]
    entries: Sequence[Entry]
    effects: Sequence[Mapping[str, Any]] = ()
    dots: Mapping[str, Sequence[tuple[int, float, str]]] = field(default_factory=dict)
    facts: Mapping[str, str]
    notes: Sequence[str] = ()
    commands: Sequence[str] = ()  # what is typed next
    definitions: Mapping[str, str]


def is_sweep(folder: Path) -> bool:
    return (folder / SWEEP_NAME).is_file()


def read_comparison(folder: Path) -> Comparison:
    """What sweep.json says, with every run folder that is there. Raises UserError where it cannot be read."""
    sweep = read_sweep(folder)
    assert sweep is not None, "asked of a folder with a sweep.json"
    is_going, left = is_held(folder), unfinished(sweep)
    entries = [sweep_entry(sweep, run, place_of(sweep, run, left, is_going)) for run in sweep.runs]
    effects = main_effects(sweep)
    told = {
        "store": sweep.store,
        "runs": strategy_text(sweep),
        "states": states_text(sweep),
        "devices": ", ".join(sweep.devices),
        "settings of all": shown(sweep.base) or "the defaults",
    }
    return Comparison(
        title=folder.absolute().name,
        path=str(folder),
        fields=sweep.fields,
        entries=sorted(entries, key=lambda entry: (entry.rank is None, entry.rank or 0)),
        effects=effects,
        dots=effect_dots(sweep, effects, entries),
        facts=told,
        notes=unfinished_notes(sweep, is_going),
        commands=[] if is_going else next_commands(sweep),
        definitions=DEFINITIONS,
    )


def states_text(sweep: Sweep) -> str:
    """How many runs are in which state, like 3 finished, 1 failed."""
    counts = Counter(run.state for run in sweep.runs)
    return ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])


def unfinished_notes(sweep: Sweep, is_going: bool) -> list[str]:
    left, late = unfinished(sweep), too_late(sweep)
    notes = [f"runs {numbers_text(late)} failed, and their rung was decided without them"] if late else []
    if left:
        why = "the sweep was stopped, or they failed; the same command goes on"
        why = "the sweep is still going" if is_going else why
        notes.append(f"{len(left)} of {len(sweep.runs)} runs are not finished; the ranking is as of now: {why}")
    return notes


def next_commands(sweep: Sweep) -> list[str]:
    """The rest of a sweep that was stopped, and what is done with the best run."""
    return [*([again_command(sweep.folder)] if unfinished(sweep) else []), *commands_of_best(sweep)]


def strategy_text(sweep: Sweep) -> str:
    """How the runs were chosen, and which of them went on."""
    text = f"{len(sweep.runs)}, chosen by {sweep.strategy}"
    if sweep.seed is not None:
        text += f", seed {sweep.seed}"
    if sweep.halving is not None:
        text += f"; halving: at steps {value_text(sweep.rungs)} the best {sweep.halving['keep']:g} of them go on"
    return text


def sweep_entry(sweep: Sweep, record: RunRecord, place: SweepPlace) -> Entry:
    run, error, run_dir = None, record.error, sweep.folder / record.folder
    try:
        run = read_run(run_dir, place) if run_dir.is_dir() else None
    except UserError as fault:
        error = error or fault.happened
    return Entry(
        label=f"run {record.number}",
        anchor=f"run-{record.number}",
        state=record.state,
        run=run,
        settings={field: value_text(record.overrides.get(field)) for field in sweep.fields},
        rank=sweep.ranking.index(record.number) + 1 if record.number in sweep.ranking else None,
        results=record.results or (record.rungs[-1] if record.rungs else None),
        decoded=record.decoded,
        error=error,
    )


def effect_dots(
    sweep: Sweep, effects: Sequence[Mapping[str, Any]], entries: Sequence[Entry]
) -> dict[str, list[tuple[int, float, str]]]:
    """For each field with an effect: (place of its value, acceptance length, name) of every run that it is about."""
    titles = {record.number: entry.title for record, entry in zip(sweep.runs, entries)}
    found = {}
    for effect in effects:
        groups = grouped(sweep, effect["field"], effect["step"])
        found[effect["field"]] = [
            (place, length, titles[run.number])
            for place, value in enumerate(effect["values"])
            for run, length in groups[value["label"]]
        ]
    return found


def read_runs(folders: Sequence[Path]) -> Comparison:
    """Several runs side by side, the best last exam first. Raises UserError as `read_run` does."""
    runs = [read_run(folder) for folder in folders]
    fields = differing(runs)
    entries = [run_entry(run, number, fields) for number, run in enumerate(runs, start=1)]
    entries.sort(key=lambda entry: -(own_length(entry) or 0.0))
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        entries = [replace(entry, label=str(entry.run.run_dir)) for entry in entries if entry.run is not None]
    ranked = [replace(e, rank=rank if own_length(e) is not None else None) for rank, e in enumerate(entries, start=1)]
    warning = unlike({entry.label: entry.run.facts for entry in entries if entry.run is not None})
    facts = {} if fields else {"settings": "equal in all runs"}
    return Comparison(
        title=f"{len(runs)} runs",
        path=", ".join(str(run.run_dir) for run in runs),
        fields=fields,
        entries=ranked,
        facts=facts,
        notes=[] if warning is None else [warning],
        definitions={},
    )


def own_length(entry: Entry) -> float | None:
    length = (entry.results or {}).get("acceptance_length")
    return length if is_finite(length) else None


def run_entry(run: RunFolder, number: int, fields: Sequence[str]) -> Entry:
    settings = {setting.name: setting for setting in settings_of(run.config)} if run.config is not None else {}
    exam = run.last_exam()
    loss = run.metrics.curves["loss"].values
    seconds = run.metrics.curves["step_s"].values
    results = dict(exam or {}) | {"loss": loss[-1] if loss else None, "train_s": sum(seconds) if seconds else None}
    return Entry(
        label=run.name,
        anchor=f"run-{number}",
        state=run.state,
        run=run,
        settings={f: value_text(settings[f].value) if f in settings else "?" for f in fields},
        results=results,
    )


def differing(runs: Sequence[RunFolder]) -> list[str]:
    """The settings that are not equal in all runs, in the order of the config; runs without one are passed over."""
    known = [{s.name: s.value for s in settings_of(run.config)} for run in runs if run.config is not None]
    if not known:
        return []
    names = [name for name in known[0] if name not in OWN_PLACE]
    return [name for name in names if any(other.get(name) != known[0][name] for other in known)]
