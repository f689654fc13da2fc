"""Compiled kernels that a new run of a sweep takes over from another one, so that not every run compiles its own.

Torch's compiler finds in its cache what was compiled from the same graph, and compiles the rest. A run gets a copy
before its first start and keeps it as its own: a restart runs the very same kernels, whatever became of the other run.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ... import system_reason
from ...store.files import make_folder, temporary_path
from ..facts import KERNELS_NAME
from .defaults import value_in
from .record import FINISHED, OUT, PAUSED, RunRecord, Sweep

AT_REST = (FINISHED, OUT, PAUSED)
"""States of runs whose processes ended by themselves; a killed one may have left half a file."""


def kernels_for(sweep: Sweep, run: RunRecord) -> Path | None:
    """The kernels of the run at rest that differs from this one in the fewest fields, of such runs the first.

    None where the run has its own already, or no other has any: nothing is compiled on a CPU.
    """
    if (sweep.folder / run.folder / KERNELS_NAME).exists():
        return None
    there = [one for one in sweep.with_state(*AT_REST) if (sweep.folder / one.folder / KERNELS_NAME).is_dir()]
    nearest = min(there, key=lambda one: num_differences(sweep, run, one), default=None)
    return None if nearest is None else sweep.folder / nearest.folder / KERNELS_NAME


def num_differences(sweep: Sweep, one: RunRecord, other: RunRecord) -> int:
    return sum(value_in(sweep, one, name) != value_in(sweep, other, name) for name in sweep.fields)


def take_over(kernels: Path, run_dir: Path, beat: Callable[[], None]) -> str:
    """Copies them into a new run, whole or not at all; why not, '' where they are there.

    Without them the run compiles its own, which takes longer and is no fault. `beat` is called for every file.
    """
    own = run_dir / KERNELS_NAME
    temporary = temporary_path(own)

    def copy(source: str, target: str) -> None:
        beat()
        shutil.copyfile(source, target)

    try:
        make_folder(run_dir)
        for old in run_dir.glob(f"{KERNELS_NAME}.tmp.*"):  # of copies that were killed
            shutil.rmtree(old)
        shutil.copytree(kernels, temporary, copy_function=copy)
        os.rename(temporary, own)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        return first_reason(error)
    return ""


def first_reason(error: OSError) -> str:
    """What the system says; of the many errors of a tree the first, which it has as (from, to, reason)."""
    if isinstance(error, shutil.Error) and error.args and error.args[0]:
        source, _, reason = error.args[0][0]
        return f"{str(source)!r}: {reason}"
    return f"{str(error.filename)!r}: {system_reason(error)}" if error.filename else system_reason(error)
