"""Which format a config.json is of, and the foreign ones by name: their drafters would run here without an error.

A layout that predicts one slot further accepts next to nothing and raises nothing, in an engine as here, so whatever
is not recognised is refused (dflash-spec 1.1). Knows configs and specs; no file.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ... import UserError
from ..spec import SLOT_MEANING, DrafterSpec
from .speculators import spec_of_speculators, speculators_config
from .values import require_objects, wrong
from .zlab import ARCHITECTURE, spec_of_zlab, zlab_config

ZLAB, SPECULATORS = "zlab", "speculators"
KINDS_OF_SPECULATORS = {
    "dspark": "a DSpark drafter, which samples from the anchor: its slot k predicts a+k+1",
    "dflash2": "a DFlash 2 drafter, with convolutions and a candidate selector",
}
OTHER_ARCHITECTURES = {
    "DFlash2DraftModel": "a DFlash 2 drafter, with convolutions and a candidate selector",
    "DSpark": "a DSpark drafter, which samples from the anchor: its slot k predicts a+k+1",
    "Domino": "a Domino drafter, with a recurrent head",
    "Eagle": "an EAGLE drafter",
}
SHIFTED = ("shift_label", "sample_from_anchor", "dspark_block_size", "dspark_target_layer_ids", "markov_rank")
WRITERS: dict[str, Callable[[DrafterSpec, Mapping[str, Any], str], dict[str, Any]]]
WRITERS = {ZLAB: zlab_config, SPECULATORS: speculators_config}
READERS: dict[str, Callable[[Path, Mapping[str, Any]], DrafterSpec]]
READERS = {ZLAB: spec_of_zlab, SPECULATORS: spec_of_speculators}


def config_of(layout: str, spec: DrafterSpec, target: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The content of config.json in a format; `target` holds TargetFacts as a dict.

    Raises UserError for what the format cannot say of the drafter.
    """
    return WRITERS[layout](spec, target, dtype)


def spec_of(path: Path, config: Mapping[str, Any]) -> DrafterSpec:
    """The drafter that a config.json of either format describes. Raises UserError, naming the key, for any other."""
    return READERS[layout_of_config(path, config)](path, config)


def layout_of_config(path: Path, config: Mapping[str, Any]) -> str:
    """ZLAB or SPECULATORS. Raises UserError that names the foreign format, or what is unknown."""
    require_objects(path, config)
    kind = config.get("speculators_model_type")
    if kind is not None and kind != "dflash":
        raise foreign(
            path, "speculators_model_type", kind, KINDS_OF_SPECULATORS.get(str(kind), "another kind of drafter")
        )
    require_own_slots(path, config)
    if kind is not None:
        return SPECULATORS
    architectures = config.get("architectures")
    for name in architectures if isinstance(architectures, list) else []:
        for part, reason in OTHER_ARCHITECTURES.items():
            if part in str(name):
                raise foreign(path, "architectures", architectures, reason)
    if architectures != [ARCHITECTURE]:
        raise foreign(path, "architectures", architectures, "no format that is known here")
    return ZLAB


def require_own_slots(path: Path, config: Mapping[str, Any]) -> None:
    """Refuses the layouts of DeepSpec and DSpark, wherever their mark stands."""
    for place in (config.get("dflash_config") or {}, config):
        for name in SHIFTED:
            if place.get(name):
                raise foreign(path, name, place[name], "a drafter that samples from the anchor: slot k predicts a+k+1")


def foreign(path: Path, name: str, value: Any, reason: str) -> UserError:
    error = wrong(path, name, value, None)
    return UserError(
        f"{error.happened}: {reason}",
        f"a DFlash drafter in z-lab's format ({[ARCHITECTURE]}) or in that of speculators ('dflash'), {SLOT_MEANING}",
        "use a drafter of this kind; this package neither trains nor runs the other",
    )


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a config by dotted key; a list is one value."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found
