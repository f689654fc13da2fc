"""What a run has a field set to, whoever set it: the run, the settings of all runs, or nobody."""

from functools import cache
from typing import Any

from ...settings_text import as_dict
from ..config import TrainConfig
from .choices import Overrides, dotted
from .record import RunRecord, Sweep


def value_in(sweep: Sweep, run: RunRecord, name: str) -> Any:
    """The value of a dotted field in a run; where nobody set it, the default, which may be None for `by itself`."""
    for settings in (run.overrides, sweep.base):
        if name in settings:
            return settings[name]
    return defaults().get(name)


@cache
def defaults() -> Overrides:
    """The default of every field by its dotted name."""
    return dotted(as_dict(TrainConfig(store="", out="")))
