"""`dflash sweep`: plans the runs, checks them all, trains them on the devices given, ranks them.

Knows the order of these; everything that takes a device runs in a process of its own, but for `--confirm` at the end.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ... import UserError
from ...progress import say
from ...settings import field_value
from ...settings_text import as_toml
from ...store.files import FolderLock, make_folder, publish, storage_error
from ...store.manifest import read_manifest
from ...toml_file import toml, toml_key
from ..config import TrainConfig
from ..evaluate.config import EvaluateConfig
from ..facts import TEMPORARY_NAME, require_outside, require_own_folder
from .check import Device, config_of, find_devices, require_all, require_base, require_comparable
from .choices import Overrides, dotted, runs_of
from .config import RANDOM, SweepConfig
from .pool import run_pool
from .record import (
    CONFIG_NAME,
    LOGS_NAME,
    RUNS_NAME,
    SWEEP_NAME,
    WAITING,
    RunRecord,
    Sweep,
    merged,
    numbers_text,
    read_sweep,
)
from .report import SweepReport
from .schedule import Schedule, take_up
from .table import LiveTable

LOCK_WAIT_S = 10.0
LEAVE_S = 60.0  # for the checkpoints of all runs after Ctrl-C or SIGTERM
LEAST_STALL_S = 60.0  # the bar of an exam is heard every ten
PATHS = ("drafter.init",)
"""Fields that name a folder: absolute in what is written, so that another folder's command means the same."""
LEFT_OVERS = (".lock", CONFIG_NAME, RUNS_NAME, LOGS_NAME)  # of a start that ended before sweep.json was there

Examine = Callable[[Path, EvaluateConfig], Mapping[str, Any]]
"""The result of `dflash evaluate`, as its JSON has it, of a run and these settings."""


def sweep(config: SweepConfig, train: Mapping[str, Any], examine: Examine) -> SweepReport:
    """Trains the sweep that `config` names, a new one or the rest of one that was stopped, and ranks its runs.

    `train` is the table [train] of the config file, what all runs share; `examine` decodes with the target, for
    `--confirm`. Raises UserError, before anything is written, for runs that cannot be trained, all at once, and for a
    folder that holds another sweep. A run that fails ends no other.
    """
    config = with_absolute_paths(config)
    wanted = planned(config, absolute(dotted(train)))
    before = as_written(wanted.folder)
    known = merged(read_known(wanted.folder, Path(config.store)), wanted)
    take_up(known)
    devices = find_devices(config.devices)
    require_all(known, known.with_state(WAITING), devices)
    make_folder_of(known.folder)
    with FolderLock(known.folder, wait_s=LOCK_WAIT_S):
        require_unchanged(known.folder, before)
        train_runs(config, known, devices)
        draw(known)
        if config.confirm:
            try:
                confirm(config, known, devices[0], examine)
            except UserError:
                say(SweepReport(known).text())  # what was trained stands, whatever the target is missing
                raise
    return SweepReport(known)


def planned(config: SweepConfig, base: dict[str, Any]) -> Sweep:
    """The sweep as its settings say, before anything of it exists."""
    require_base(base)
    runs = runs_of(config)
    is_drawn, halving = config.strategy == RANDOM, config.halving
    sweep = Sweep(
        folder=Path(config.out),
        store=str(Path(config.store).absolute()),
        manifest=read_manifest(Path(config.store)).as_json(),
        strategy=config.strategy,
        count=config.count if is_drawn else None,
        seed=config.seed if is_drawn else None,
        fields=list(dict.fromkeys(name for run in runs for name in run)),
        base=base,
        halving={"steps": list(halving.steps), "keep": halving.keep} if halving.steps else None,
        runs=[RunRecord(number=number, overrides=run) for number, run in enumerate(runs, start=1)],
    )
    require_comparable(sweep)
    return sweep


def with_absolute_paths(config: SweepConfig) -> SweepConfig:
    """The settings with the folders that runs name as absolute paths."""
    fields = {
        name: [absolute({name: value})[name] for value in values] if isinstance(values, list) else values
        for name, values in dotted(config.fields).items()
    }
    return dataclasses.replace(config, fields=fields, runs=tuple(absolute(dotted(run)) for run in config.runs))


def absolute(values: Overrides) -> Overrides:
    """Fields to values, with those that name a folder as absolute paths."""
    meant = {name: field_value(TrainConfig, name, values[name]) for name in PATHS if name in values}
    return values | {name: str(Path(path).absolute()) for name, path in meant.items() if isinstance(path, str)}


def read_known(folder: Path, store: Path) -> Sweep | None:
    """The sweep that the folder holds. Raises UserError where it holds something else, or lies inside of the store."""
    found = read_sweep(folder)
    if found is None:
        require_own_folder(folder, "sweep", SWEEP_NAME, LEFT_OVERS)
        require_outside(folder, store)
    return found


def as_written(folder: Path) -> bytes:
    """The bytes of sweep.json; none where there is none."""
    path = folder / SWEEP_NAME
    return path.read_bytes() if path.is_file() else b""


def require_unchanged(folder: Path, before: bytes) -> None:
    """Under the lock of the folder: another command may have gone on there since we looked."""
    if as_written(folder) != before:
        raise UserError(
            f"another command went on with {str(folder)!r} while this one began",
            "one command at a time in this folder",
            "give the command again: it takes up what is left",
        )


def make_folder_of(folder: Path) -> None:
    try:
        for made in (folder, folder / RUNS_NAME, folder / LOGS_NAME):
            make_folder(made)
    except OSError as error:
        raise storage_error(error, folder) from error


def train_runs(config: SweepConfig, known: Sweep, devices: list[Device]) -> None:
    """Trains what is left to train; under the lock of the folder."""
    for path in known.folder.iterdir():
        if TEMPORARY_NAME.fullmatch(path.name):
            path.unlink()
    names = [device.name for device in devices]
    known.devices = names
    publish(known.folder / CONFIG_NAME, config_text(config, known).encode())
    schedule = Schedule(known, devices, LiveTable(known))
    schedule.settle()
    try:
        run_pool(schedule, names, stall_s=longest_silence(known, names[0]), leave_s=LEAVE_S)
    finally:
        schedule.close()


def draw(known: Sweep) -> None:
    from .plots import plot_effects  # matplotlib takes a second to import

    plot_effects(known)


def longest_silence(known: Sweep, device: str) -> float:
    """Seconds: the longest `stall_s` of the runs, and no less than the bar of an exam is silent for."""
    return max([LEAST_STALL_S, *(config_of(known, run, device).stall_s for run in known.runs)])


def config_text(config: SweepConfig, known: Sweep) -> str:
    """sweep.toml: what `dflash sweep --config` repeats from any folder."""
    own = dataclasses.replace(config, store=known.store, out=str(known.folder.absolute()))
    base = [f"{toml_key(name)} = {toml(value)}" for name, value in known.base.items()]
    return as_toml(own, "sweep") + "\n".join(["", "[train]", *base, ""])


def confirm(config: SweepConfig, known: Sweep, device: Device, examine: Examine) -> None:
    """Decodes the best K finished runs with the target, one after another; what is known of these prompts stays."""
    others = [run for run in known.runs if run.decoded is not None and run.decoded["limit"] != config.confirm_limit]
    if others:
        say(f"runs {numbers_text(others)} decoded other prompts, under another confirm_limit: that is dropped")
        for run in others:
            run.decoded = None
        known.write()
    finished = [run for number in known.ranking if (run := known.run(number)).results is not None]
    for run in finished[: config.confirm]:
        if run.decoded is not None:
            continue
        say(f"run {run.number} decodes with the target")
        own = EvaluateConfig(target=config.target, limit=config.confirm_limit, device=device.name)
        found = examine(known.folder / run.folder, own)
        names = ("acceptance_length", "acceptance_length_cycles", "intervals", "num_prompts", "num_equal", "speed_up")
        run.decoded = {"limit": config.confirm_limit, **{name: found[name] for name in names}}
        known.write()
