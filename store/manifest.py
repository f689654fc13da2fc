"""What a store is: the facts in the attributes of its root `zarr.json`, and how two of them differ.

A store belongs to one target, one data set, one list of taps. Whoever comes back with other facts
is refused, and told which fact differs and both its values.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .. import UserError
from .files import publish, unreadable

FORMAT_VERSION = 2  # 2: commits name the store's identity, not its plan alone
MANIFEST_NAME = "zarr.json"
ATTRIBUTE = "dflash"
CHECKSUM_ATTRIBUTE = "dflash_sha256"
DESCRIPTION_ONLY = ("data.report",)  # told to the reader, no part of the identity
LATER_FACTS = ("target.config_sha256",)  # stores written before have none: compared where both sides have one
ABSENT = "(absent)"
ZARR_GROUP = (3, "group")  # zarr_format and node_type
SHOWN_DIFFERENCES = 3
SHOWN_CHARACTERS = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The identity and the sizes of a store; `target` and `data` hold plain JSON values.

    `num_positions` counts recorded positions, without padding; `segment_positions` is the length
    of one segment; `data` is the content of DATA's data.json, of which `report` is no identity. With a `window`
    tokens more than that many before a sample's first eligible anchor are not recorded.
    """

    target: dict[str, Any]
    data: dict[str, Any]
    tap_layers: tuple[int, ...]
    hidden_size: int
    has_last: bool = False
    window: int | None = None
    codec: str = "raw"
    dtype: str = "bfloat16"
    segment_positions: int
    num_segments: int
    num_samples: int
    num_positions: int
    plan_sha256: str
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        object.__setattr__(self, "tap_layers", tuple(self.tap_layers))
        for name in ("target", "data"):
            object.__setattr__(self, name, json.loads(json.dumps(getattr(self, name), allow_nan=False)))

    def as_json(self) -> dict[str, Any]:
        """The attribute's value: plain JSON types."""
        return asdict(self) | {"tap_layers": list(self.tap_layers)}

    @property
    def identity_sha256(self) -> str:
        """sha256 of the store's identity, all facts but DESCRIPTION_ONLY: every commit of the store names it."""
        value = self.as_json()
        for name in DESCRIPTION_ONLY:
            part, fact = name.split(".")
            value[part].pop(fact, None)
        return checksum(value)


def write_manifest(store_dir: Path, manifest: Manifest) -> None:
    """Writes the root `zarr.json`: from here on the folder is this store."""
    value = manifest.as_json()
    attributes = {ATTRIBUTE: value, CHECKSUM_ATTRIBUTE: checksum(value)}
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    publish(Path(store_dir) / MANIFEST_NAME, (json.dumps(group, indent=2) + "\n").encode())


def read_manifest(store_dir: Path) -> Manifest:
    """The manifest of a store; UserError where there is none, or one that this version cannot read."""
    path = Path(store_dir) / MANIFEST_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"no store at {str(store_dir)!r}", f"a folder that holds {MANIFEST_NAME}", "check --store, or run extract"
        ) from error
    except OSError as error:
        raise unreadable(error, path) from error
    except UnicodeDecodeError as error:
        raise damaged(path, str(error)) from error
    try:
        group = json.loads(text)
        attributes, kind = group["attributes"], (group["zarr_format"], group["node_type"])
        value, expected = attributes[ATTRIBUTE], attributes[CHECKSUM_ATTRIBUTE]
        version = value["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"no manifest of dflash-offline in it ({type(error).__name__}: {error})") from error
    if version != FORMAT_VERSION:
        raise UserError(
            f"{str(path)!r} has format version {version!r}",
            f"version {FORMAT_VERSION}, the one this program reads and writes",
            "use the version of dflash-offline that made the store, or make it anew",
        )
    if kind != ZARR_GROUP:
        raise damaged(path, f"zarr_format and node_type are {kind}, not {ZARR_GROUP}")
    if checksum(value) != expected:
        raise damaged(path, "its facts do not match their checksum")
    names = {field.name for field in fields(Manifest)}
    if set(value) != names:
        raise damaged(path, f"its fields differ from version {FORMAT_VERSION}: {sorted(set(value) ^ names)}")
    return Manifest(**value)


def checksum(value: dict[str, Any]) -> str:
    """sha256 of the canonical JSON: sorted keys, no blanks, ASCII only."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"{str(path)!r} is damaged: {reason}".replace("\n", " "),
        f"the manifest of a store, format version {FORMAT_VERSION}",
        "copy the file again from where the store came from",
    )


def differences(old: Manifest, new: Manifest) -> list[tuple[str, Any, Any]]:
    """Every identity fact that differs, as (dotted name, old value, new value), in manifest order.

    The hash of the plan comes last: it differs whenever anything about the samples does.
    """
    old_value, new_value = old.as_json(), new.as_json()
    found: list[tuple[str, Any, Any]] = []
    collect(old_value, new_value, "", found)
    return sorted(found, key=lambda difference: difference[0] == "plan_sha256")


def collect(old: Any, new: Any, name: str, found: list[tuple[str, Any, Any]]) -> None:
    """Walks two JSON values side by side; a dict is entered, anything else is compared whole."""
    if name in DESCRIPTION_ONLY or old == new or (name in LATER_FACTS and ABSENT in (old, new)):
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{name}.{key}" if name else key
            collect(old.get(key, ABSENT), new.get(key, ABSENT), inner, found)
    else:
        found.append((name, old, new))


def require_same(store_dir: Path, old: Manifest, new: Manifest, *, option: str = "--store") -> None:
    """Refuses, with names and both values, when a store is asked to hold something else.

    `option` is how the user named the store.
    """
    found = differences(old, new)
    if not found:
        return
    shown = [f"{name} = {show(was)} there, {show(now)} now" for name, was, now in found[:SHOWN_DIFFERENCES]]
    more = f" (and {len(found) - len(shown)} more)" if len(found) > len(shown) else ""
    raise UserError(
        f"the store {str(store_dir)!r} was made with other settings: {'; '.join(shown)}{more}",
        "the settings the store was made with; nothing in it was touched",
        f"give the old settings again, or choose another folder with {option}",
    )


def show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}... (sha256 {checksum(value)[:12]})"
