"""Which target is meant: fingerprints say so, and its path where two of them lie here.

Folders are moved, and another node has them under another mount point. Where all fingerprints agree and the old path
and the new one are not two places of this machine, it is the same target: DATA and store keep the name that they were
made with, and a line says so. Knows facts and manifests; reads no target.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import UserError
from ..progress import say
from ..store.manifest import MANIFEST_NAME, Manifest, read_manifest
from .targets.base import TargetFacts

PLACE = ("name", "revision")
"""Facts of a target that say where it was found."""
SAME = ("weights", "config", "tokenizer", "chat template")
FINGERPRINTS = ("weights_sha256", "config_sha256", "tokenizer_sha256", "template_sha256")


def has_moved(old: str, new: str) -> bool:
    """Whether two different names may mean one target: at most one of them lies here, or both are one folder."""
    if old == new:
        return False
    return not (os.path.exists(old) and os.path.exists(new)) or os.path.samefile(old, new)


def named_target(data_dir: str, prepared: Mapping[str, Any], given: str | None) -> str:
    """The target to extract with: the given one, else DATA's. Raises UserError for a folder that is not there now."""
    name = str(given or prepared["target"])
    if given is None and os.path.isabs(name) and not os.path.exists(name):
        raise UserError(
            f"{data_dir!r} was prepared for target {name!r}, which is not there",
            "the target's folder",
            "give --target with the place where it lies now",
        )
    return name


def require_prepared_for(data_dir: str, prepared: Mapping[str, Any], facts: TargetFacts) -> None:
    """DATA holds ids of one tokenizer and template; another target would record nonsense.

    Raises UserError with what differs and both values; of a target that moved the path alone may.
    """
    pairs = {
        "tokenizer": (prepared["tokenizer_sha256"], facts.tokenizer_sha256),
        "chat template": (prepared["template_sha256"], facts.template_sha256),
    }
    if prepared["responses"]["origin"] == "target":
        pairs["weights"] = (prepared["responses"]["weights_sha256"], facts.weights_sha256)
    same, was_named = list(pairs), prepared["target"]
    if not has_moved(was_named, facts.name):
        pairs = {"target": (was_named, facts.name)} | pairs
    for name, (was, now) in pairs.items():
        if was != now:
            raise UserError(
                f"{data_dir!r} was prepared for {name} {was}, but the {name} now is {now}",
                "the target, tokenizer and template the samples were made with",
                f"drop --target, or run `dflash prepare` again with --target {facts.name}",
            )
    if was_named != facts.name:
        told = f"{facts.name} has the same {' and '.join(same)}: it goes on"
        say(f"{data_dir} was prepared for target {was_named}; {told}")


def as_named_before(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of DATA that a run makes, with the target's path as `old` tells it where it moved since."""
    return {**new, "target": old["target"]} if has_moved(str(old.get("target")), str(new["target"])) else dict(new)


def as_stored(store_dir: Path, manifest: Manifest) -> Manifest:
    """The manifest with the target's place as a store there tells it, where that target moved since; else as it is."""
    if not (store_dir / MANIFEST_NAME).exists():
        return manifest
    stored = read_manifest(store_dir)
    if any(differs(name, stored.target, manifest.target) for name in FINGERPRINTS):
        return manifest
    target, data = manifest.target, manifest.data
    was, now = str(stored.target.get("name")), str(target.get("name"))
    if has_moved(was, now):
        say(f"the store was made with target {was}; {now} has the same {' and '.join(SAME)}: it goes on")
        target = target | {name: stored.target[name] for name in PLACE if name in stored.target}
    if isinstance(stored.data.get("facts"), dict):
        data = data | {"facts": as_named_before(stored.data["facts"], data["facts"])}
    return replace(manifest, target=target, data=data)


def require_same_target(manifest: Manifest, facts: Mapping[str, Any]) -> None:
    """The launcher read these facts a moment ago; weights or config.json may be replaced under a running command.

    A fact that an older store does not have is not compared, nor is where the target lies.
    """
    changed = [name for name, value in manifest.target.items() if name not in PLACE and facts.get(name) != value]
    if changed:
        name = changed[0]
        raise UserError(
            f"the target changed while it was loaded: {name} = {facts.get(name)!r}",
            f"{manifest.target[name]!r}, as the store says",
            "leave the target's folder alone while extract runs, then give the same command again",
        )


def differs(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether both have the fact, and not the same: stores written before have no `config_sha256`."""
    return name in old and name in new and old[name] != new[name]
