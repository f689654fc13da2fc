"""Single values of a config.json from elsewhere: the right type, in range, said once. Knows keys; no format, no file.

A wrong one raises nothing in an engine, which drafts by it and accepts next to nothing.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ... import UserError
from ..value_rules import is_flag, is_number, is_whole

MOST_LAYERS = 10_000
OBJECTS = (
    *("dflash_config", "rope_parameters", "transformer_layer_config", "transformer_layer_config.rope_parameters"),
    *("speculators_config", "speculators_config.verifier"),
)
"""Keys, dotted, that hold an object where they are there."""


def wrong(path: Path, name: str, value: Any, expected: Any) -> UserError:
    return UserError(
        f"{str(path)!r} has {name} = {value!r}",
        f"{expected}",
        "give a folder that `dflash export`, z-lab or speculators wrote",
    )


def require_objects(path: Path, config: Mapping[str, Any]) -> None:
    """Raises UserError where something else stands in place of an object."""
    for dotted in OBJECTS:
        place: Any = config
        for name in dotted.split("."):
            place = (place or {}).get(name)
        if place is not None and not isinstance(place, dict):
            raise wrong(path, dotted, place, "an object with keys of its own")


def optional(path: Path, config: Mapping[str, Any], name: str) -> Any:
    """A key, in `dflash_config`, then at the top; None where it is in neither, or null. Both must agree."""
    places = [place[name] for place in (config.get("dflash_config") or {}, config) if place.get(name) is not None]
    if any(value != places[0] for value in places):
        raise wrong(path, name, places, "one value, in dflash_config or at the top level")
    return places[0] if places else None


def lookup(path: Path, config: Mapping[str, Any], name: str) -> Any:
    """A required key, as `optional` finds it."""
    value = optional(path, config, name)
    if value is None:
        raise wrong(path, name, None, "one value, in dflash_config or at the top level")
    return value


def whole(path: Path, config: Mapping[str, Any], name: str, least: int = 1, most: int | None = None) -> int:
    """A required key that is a whole number from `least` to `most`."""
    value = lookup(path, config, name)
    if not is_whole(value) or value < least or (most is not None and value > most):
        raise wrong(path, name, value, f"a whole number from {least} {'on' if most is None else f'to {most}'}")
    return value


def positive(path: Path, name: str, value: Any) -> float:
    """The value, a finite number above 0."""
    if not is_number(value) or not 0 < value < math.inf:
        raise wrong(path, name, value, "a finite number above 0")
    return value


def flag(path: Path, name: str, value: Any) -> bool | None:
    """The value, true, false or null: an engine takes the text "false" for true."""
    if value is not None and not is_flag(value):
        raise wrong(path, name, value, "true or false")
    return value


def layer_ids(path: Path, name: str, value: Any, first: int) -> tuple[int, ...]:
    """The value, a list of distinct layers counted from `first`."""
    is_list = isinstance(value, list) and value and all(is_whole(layer) and layer >= first for layer in value)
    if not is_list or len(set(value)) != len(value):
        raise wrong(path, name, value, f"a list of distinct whole numbers from {first} on, one for each tap")
    return tuple(value)


def require_taps_below(path: Path, taps: tuple[int, ...], num_target_layers: int) -> None:
    """Raises UserError for a tap that is no layer of the target, or its last one, which is never a tap."""
    if max(taps) >= num_target_layers - 1:
        rule = f"taps from 0 to {num_target_layers - 2}, the last layer of {num_target_layers} is never one"
        raise wrong(path, "target_layer_ids", list(taps), rule)
