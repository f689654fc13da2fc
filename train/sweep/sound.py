"""Whether a record of sweep.json holds what its readers take; a file that another hand changed is told by name.

Knows the record's words; no file.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .record import RunRecord, Sweep

OF_RESULTS = ("acceptance_length", "acceptance_length_cycles")
OF_EFFECT = {"field", "share", "values", "step"}


def require_sound(sweep: "Sweep") -> None:
    """Raises ValueError, naming the key, where the record is not as one is written."""
    numbers = [run.number for run in sweep.runs]
    has_ranking = isinstance(sweep.ranking, list) and all(number in numbers for number in sweep.ranking)
    has_effects = isinstance(sweep.effects, list) and all(map(is_effect, sweep.effects))
    halving = sweep.halving
    rules = {
        "runs": bool(numbers) and numbers == list(range(1, len(numbers) + 1)),
        "ranking": has_ranking,
        "effects": has_effects,
        "base": isinstance(sweep.base, dict),
        "devices": isinstance(sweep.devices, list) and all(isinstance(name, str) for name in sweep.devices),
        "fields": isinstance(sweep.fields, list) and all(isinstance(name, str) for name in sweep.fields),
        "halving": halving is None or (isinstance(halving, dict) and {"steps", "keep"} <= set(halving)),
    }
    wrong = [name for name, is_sound in rules.items() if not is_sound]
    wrong += [f"run {run.number}" for run in sweep.runs if not is_run(run)]
    if wrong:
        raise ValueError(f"see {wrong[0]}")


def is_run(run: "RunRecord") -> bool:
    found = [run.results or {}, *(run.rungs if isinstance(run.rungs, list) else [None])]
    return isinstance(run.overrides, dict) and all(map(is_result, found))


def is_result(found: Any) -> bool:
    """An object whose acceptance lengths are finite or null."""
    return isinstance(found, Mapping) and all(is_finite_or_none(found.get(name)) for name in OF_RESULTS)


def is_effect(effect: Any) -> bool:
    return isinstance(effect, Mapping) and set(effect) >= OF_EFFECT and isinstance(effect["values"], list)


def is_finite_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and math.isfinite(value))
