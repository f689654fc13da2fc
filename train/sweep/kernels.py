"""Compiled kernels that a new run of a sweep takes over from another one, so that not every run compiles its own.

Torch's compiler finds in its cache what was compiled from the same graph, and compiles the rest. A run gets a copy
before its first start and keeps it as its own: a restart runs the very same kernels, whatever became of the other run.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ...store.files import make_folder, temporary_path
from ..facts import KERNELS_NAME
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
    nearest = min(there, key=lambda one: num_differences(sweep.fields, run, one), default=None)
    return None if nearest is None else sweep.folder / nearest.folder / KERNELS_NAME


def num_differences(fields: Sequence[str], one: RunRecord, other: RunRecord) -> int:
    return sum(one.overrides.get(name) != other.overrides.get(name) for name in fields)


def take_over(kernels: Path, run_dir: Path) -> None:
    """Copies them into a new run, whole or not at all. Raises OSError."""
    make_folder(run_dir)
    own = run_dir / KERNELS_NAME
    temporary = temporary_path(own)
    shutil.copytree(kernels, temporary)
    os.rename(temporary, own)
