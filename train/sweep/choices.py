"""Which runs a sweep has: a pure function of its settings, so that a longer list keeps the runs of a shorter one.

Knows names of fields and values; whether a run can be trained is for `check` to say.
"""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ... import UserError
from ...settings import field_value, flatten
from ..config import TrainConfig
from ..kinds import named_layers
from ..value_rules import is_finite
from .config import GRID, LIST, SweepConfig

Overrides = dict[str, Any]
"""Dotted fields of TrainConfig to values: what one run sets."""

LISTS = ("drafter.taps",)
"""Fields of which each value is itself a list of numbers."""
OWN_FIELDS = {
    "store": "--store",
    "out": "--out",
    "devices": "--devices",
    "stop_at": "[sweep.halving]",
}
"""Fields that the sweep sets for each run, and where they are said instead."""
RANGE_KEYS = {"low", "high", "scale", "integer"}
MOST_RUNS = 100_000
DIGITS = 4  # of a drawn number
REDRAWS = 1000  # for a run that is not there yet


def dotted(table: Mapping[str, Any]) -> Overrides:
    """Nested or dotted names of a table as dotted ones. Raises UserError for a field that is written twice."""
    flat: Overrides = {}
    flatten(table, "", flat, TrainConfig)
    return flat


def runs_of(config: SweepConfig) -> list[Overrides]:
    """What each run sets, in the order of the runs. Raises UserError naming everything that is wrong with them."""
    if config.strategy == LIST:
        return require_sound([dotted(run) for run in config.runs], "runs = [] names no run", list_faults(config))
    fields = dotted(config.fields)
    faults = [fault for name, values in fields.items() for fault in field_faults(name, values, config.strategy)]
    if config.strategy == GRID and not faults and math.prod(map(len, fields.values())) > MOST_RUNS:
        faults = [f"{math.prod(map(len, fields.values())):,} combinations, and a sweep has at most {MOST_RUNS:,} runs"]
    if faults or not fields:
        return require_sound([], "fields = {} names no field of train", faults)
    return grid(fields) if config.strategy == GRID else draws(fields, config.count, config.seed)


def require_sound(runs: list[Overrides], nothing: str, faults: list[str]) -> list[Overrides]:
    if faults or not runs:
        raise UserError(
            "; ".join(faults) or nothing,
            "[sweep.fields] with a list of values for each field, or [[sweep.runs]] with strategy = 'list'",
            "correct the file of --config; docs/sweeps.md has examples",
        )
    return runs


def list_faults(config: SweepConfig) -> list[str]:
    """What is wrong with the runs of strategy list."""
    runs = [dotted(run) for run in config.runs]
    faults = [f"run {number} sets nothing" for number, run in enumerate(runs, start=1) if not run]
    meant = [{name: resolved(name, value) for name, value in run.items()} for run in runs]
    pairs = itertools.combinations(enumerate(meant, start=1), 2)
    faults += [f"runs {i} and {j} are the same" for (i, run), (j, other) in pairs if run == other]
    return faults + [fault for name in dict.fromkeys(name for run in runs for name in run) for fault in own(name)]


def own(name: str) -> list[str]:
    return [f"{name} is set for each run by the sweep: say it with {OWN_FIELDS[name]}"] if name in OWN_FIELDS else []


def field_faults(name: str, values: Any, strategy: str) -> list[str]:
    """What is wrong with the values of one field."""
    if isinstance(values, list):
        found = [] if values else [f"{name} = [] has no value"]
        found += repeats(name, values)
        single = [value for value in values if isinstance(value, int)] if name in LISTS else []
        found += [
            f"{name} has the value {value}, and each value is a list, like [[0, 2], [0, 1, 2]]" for value in single[:1]
        ]
        return own(name) + found
    if not isinstance(values, dict):
        return [*own(name), f"{name} = {values!r} is no list: a value for all runs belongs into [train]"]
    return own(name) + [f"{name}: {fault}" for fault in range_faults(values, strategy)]


def repeats(name: str, values: Sequence[Any]) -> list[str]:
    """Values of a field that are there before, perhaps written in another way."""
    first: dict[str, Any] = {}
    faults = []
    for value in values:
        meant = resolved(name, value)
        if meant in first:
            also = "" if repr(value) == repr(first[meant]) else f": {first[meant]!r} means the same"
            faults.append(f"{name} has {value!r} twice{also}")
        first.setdefault(meant, value)
    return faults


def resolved(name: str, value: Any) -> str:
    """What a value means to a run, to compare: 1 and 1.0 are one learning rate, and 1 and true no one thing."""
    meant = field_value(TrainConfig, name, value)
    if name == "drafter.layer_types" and isinstance(meant, tuple):
        with suppress(UserError):  # of a name that is none: `check` says it
            meant = named_layers(meant)
    return repr(meant)


def range_faults(given: Mapping[str, Any], strategy: str) -> list[str]:
    """What is wrong with a range of strategy random."""
    if strategy == GRID:
        return ["a range needs strategy = 'random'"]
    low, high, scale = given.get("low"), given.get("high"), given.get("scale", "linear")
    faults = [f"a range has no {key!r}" for key in sorted(set(given) - RANGE_KEYS)]
    numbers: list[Any] = [n for n in (low, high) if is_finite(n)]
    if len(numbers) < 2 or not numbers[0] < numbers[1]:
        faults.append(f"low = {low!r}, high = {high!r} are no two rising numbers")
    elif scale == "log" and numbers[0] <= 0:
        faults.append(f"low = {low!r} is no start of a logarithmic range")
    if scale not in ("linear", "log"):
        faults.append(f"scale = {scale!r} is neither 'linear' nor 'log'")
    if given.get("integer") and not all(isinstance(n, int) for n in numbers):
        faults.append(f"integer with low = {low!r}, high = {high!r}, which are not whole")
    if not isinstance(given.get("integer", False), bool):
        faults.append(f"integer = {given['integer']!r} is neither true nor false")
    return faults


def grid(fields: Mapping[str, list[Any]]) -> list[Overrides]:
    """Every combination; the last field changes fastest."""
    return [dict(zip(fields, values)) for values in itertools.product(*fields.values())]


def draws(fields: Mapping[str, Any], count: int, seed: int) -> list[Overrides]:
    """Independent draws, none twice; the first ones do not depend on `count`.

    Each field has random numbers of its own: the order of the fields does not count.
    Raises UserError where the fields have fewer combinations than that.
    """
    streams = {name: random.Random(f"{seed}/{name}") for name in fields}
    found: list[Overrides] = []
    for _ in range(count):
        for _ in range(REDRAWS):
            run = {name: draw(values, streams[name].random()) for name, values in fields.items()}
            if run not in found:
                found.append(run)
                break
        else:
            raise UserError(
                f"count = {count}, and after {len(found)} runs {REDRAWS} draws gave none that was new",
                "as many combinations of the fields as runs",
                f"set count to {len(found)}, or give the fields more values",
            )
    return found


def draw(values: Any, share: float) -> Any:
    """The value at a share, 0 to below 1, of a list or a range; numbers have 4 digits."""
    if isinstance(values, list):
        return values[int(share * len(values))]
    low, high, is_log, is_integer = values["low"], values["high"], values.get("scale") == "log", values.get("integer")
    end = high + 1 if is_integer else high  # `high` itself is among the whole numbers
    value = math.exp(math.log(low) + share * (math.log(end) - math.log(low))) if is_log else low + share * (end - low)
    return min(high, max(low, math.floor(value))) if is_integer else min(high, max(low, float(f"{value:.{DIGITS}g}")))
