"""A sweep as the place of a run: whether a run belongs to one, and the command that goes on with it. No torch."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ... import UserError
from ...settings import resolve
from ..sweep.config import SweepConfig
from ..sweep.halving import too_late
from ..sweep.record import CONFIG_NAME, FINISHED, OUT, RUNS_NAME, RunRecord, Sweep, read_sweep
from .held import is_held


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlace:
    """Where a run stands in its sweep. Only the sweep's command may go on with it: it knows the rungs.

    `is_left` says whether that command would, `is_going` whether it does right now.
    """

    folder: Path
    is_out: bool
    is_left: bool
    is_going: bool

    def why_unfinished(self) -> str:
        """Why a run that no process trains is not at its end."""
        if self.is_out:
            return "its sweep stopped it at a rung, where others were better"
        if self.is_going:
            return "its sweep is still going"
        if self.is_left:
            return "its sweep was stopped, or the run failed; the sweep's command goes on with it"
        return "it failed, and its sweep decided the rung without it"

    def again(self) -> list[str]:
        """The command that goes on with the run; none where nothing would."""
        return [again_command(self.folder)] if self.is_left and not self.is_going else []


def place_in_sweep(run_dir: Path) -> SweepPlace | None:
    """The place of a run in the sweep whose folder it lies in; None for a run that is in none.

    Where sweep.json cannot be read, the sweep's command is what says why.
    """
    given = run_dir if run_dir.parent.name == RUNS_NAME else run_dir.resolve()
    folder = given.parent.parent
    if given.parent.name != RUNS_NAME:
        return None
    try:
        sweep = read_sweep(folder)
    except UserError:
        return SweepPlace(folder=folder, is_out=False, is_left=True, is_going=is_held(folder))
    named = [run for run in sweep.runs if run.folder == f"{RUNS_NAME}/{given.name}"] if sweep is not None else []
    return place_of(sweep, named[0], unfinished(sweep), is_held(folder)) if sweep is not None and named else None


def place_of(sweep: Sweep, run: RunRecord, left: Sequence[RunRecord], is_going: bool) -> SweepPlace:
    """The place of a run that sweep.json names; `left` are the unfinished ones."""
    return SweepPlace(folder=sweep.folder, is_out=run.state == OUT, is_left=run in left, is_going=is_going)


def unfinished(sweep: Sweep) -> list[RunRecord]:
    """The runs that the sweep's own command goes on with."""
    late = too_late(sweep)
    return [run for run in sweep.runs if run.state not in (FINISHED, OUT) and run not in late]


def again_command(folder: Path) -> str:
    """The command that goes on with the sweep in this folder, also where its config is of another place."""
    file = folder / CONFIG_NAME
    try:
        here = out_option(resolve(SweepConfig, name="sweep", file=file).out, folder)
    except UserError:
        here = ""  # the command will say what is wrong with the file
    return f"dflash sweep --config {shlex.quote(str(file))}{here}"


def out_option(out: str, folder: Path) -> str:
    """The --out that a command with this config needs to work on the folder, as on one that was copied or moved."""
    return "" if os.path.realpath(out) == os.path.realpath(folder) else f" --out {shlex.quote(str(folder))}"
