"""How far stored states are from what was recorded: relative L2 errors of many states, counted.

A state is one position of one tap. Counts by the logarithm of the error add up over samples, segments and
processes, and give the median to 0.6 %; the largest error is kept as it is.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import UserError
from .arrow_file import read_table
from .codecs import get_codec
from .files import FolderLock, publish, remove, unreadable
from .index import COMMIT_SCHEMA, LAYOUT_LOCK, LAYOUT_WAIT_S, STATUS_OK, commit_path, committed_segments
from .int8 import as_float
from .manifest import Manifest, checksum, read_manifest

ERRORS_NAME = "state_errors.json"  # beside the manifest of a whole store whose errors were measured
ERRORS_KEY = "state_errors"  # of a commit's metadata
AS_RECORDED = "raw"  # what extract compares with: the bits that this codec would have stored
BINS_PER_DECADE = 200
SMALLEST = 1e-8  # errors up to here share bin 0
SAFE_SQUARES = (1e-20, 1e30)  # sums of squares of a state that float32 holds beside much smaller ones
NUM_BINS = 9 * BINS_PER_DECADE  # up to 10, what is above shares the last one


@dataclass(slots=True)
class StateErrors:
    """Relative L2 errors |after - before| / |before| of states."""

    bins: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BINS, dtype=np.int64))
    worst: float = 0.0

    @property
    def num_states(self) -> int:
        return int(self.bins.sum())

    @property
    def median(self) -> float:
        """The error that half of the states stay below, 0 without states."""
        if not self.num_states:
            return 0.0
        bin_ = int(np.searchsorted(np.cumsum(self.bins), (self.num_states + 1) // 2))
        return min(self.worst, SMALLEST * 10 ** ((bin_ + 0.5) / BINS_PER_DECADE)) if bin_ else 0.0

    def add(self, before: np.ndarray, after: np.ndarray) -> None:
        """Counts states [..., H] u16 (bfloat16 bits); `before` must be finite and not zero."""
        self.count(relative_errors(before.reshape(-1, before.shape[-1]), after.reshape(-1, after.shape[-1])))

    def count(self, errors: np.ndarray) -> None:
        """Counts states by their relative errors [N]."""
        self.worst = max(self.worst, float(errors.max(initial=0.0)))
        places = np.log10(np.maximum(errors, SMALLEST) / SMALLEST) * BINS_PER_DECADE
        self.bins += np.bincount(np.minimum(places.astype(np.int64), NUM_BINS - 1), minlength=NUM_BINS)

    def merge(self, other: "StateErrors") -> None:
        self.bins += other.bins
        self.worst = max(self.worst, other.worst)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; bins that counted something only."""
        used = np.flatnonzero(self.bins)
        return {"worst": self.worst, "bins": dict(zip(map(str, used.tolist()), self.bins[used].tolist()))}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "StateErrors":
        errors = StateErrors(worst=float(value["worst"]))
        for name, count in value["bins"].items():
            errors.bins[int(name)] = count
        return errors


def relative_errors(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """|after - before| / |before| [N] of states [N, H] u16; in float32 where squares stay in its range."""
    old, new = as_float(before), as_float(after)
    new -= old
    with np.errstate(all="ignore"):  # what leaves the range is done again below
        squares = np.einsum("nh,nh->n", old, old)
        errors = np.einsum("nh,nh->n", new, new) / squares
    is_extreme = ~((squares > SAFE_SQUARES[0]) & (squares < SAFE_SQUARES[1]))
    if is_extreme.any():
        old, new = (values[is_extreme].astype(np.float64) for values in (old, new))
        errors[is_extreme] = (new**2).sum(axis=1) / (old**2).sum(axis=1)
    return np.sqrt(errors).astype(np.float64)


@dataclass(kw_only=True, slots=True)
class Measurement:
    """What was measured of a store's states, and what it speaks of."""

    errors: StateErrors = field(default_factory=StateErrors)
    num_all: int = 0  # states that the measured ones stand for: those and the ones like them that were not measured
    codecs: set[str] = field(default_factory=set)  # the lossy ones whose error it is
    against: set[str] = field(default_factory=set)  # codecs of the states compared with
    is_own: bool = True  # of this store's states; else of the stores it was made from
    unmeasured: set[str] = field(default_factory=set)  # stores it was made from whose error nobody measured
    before: list[dict[str, Any]] = field(default_factory=list)  # facts of earlier losses that stay

    def facts(self) -> dict[str, Any]:
        """Plain JSON values for people and programs, without the counts."""
        return {
            "median": self.errors.median,
            "worst": self.errors.worst,
            "num_states": self.errors.num_states,
            "num_all": self.num_all,
            "codecs": sorted(self.codecs),
            "against": sorted(self.against),
            "is_own": self.is_own,
            "unmeasured": sorted(self.unmeasured),
            "before": self.before,
        }

    def as_json(self) -> dict[str, Any]:
        return self.facts() | {"errors": self.errors.as_json()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "Measurement":
        return Measurement(
            errors=StateErrors.from_json(value["errors"]),
            num_all=value["num_all"],
            codecs=set(value["codecs"]),
            against=set(value["against"]),
            is_own=value["is_own"],
            unmeasured=set(value["unmeasured"]),
            before=list(value["before"]),
        )

    def carry(self, earlier: "Measurement", *, is_whole: bool) -> None:
        """Takes over what was measured of a store whose states were copied; `is_whole` says: all of them."""
        self.errors.merge(earlier.errors)
        self.num_all += earlier.num_all
        self.codecs |= earlier.codecs
        self.against |= earlier.against
        self.is_own &= earlier.is_own and is_whole
        self.unmeasured |= earlier.unmeasured
        self.before += earlier.before


def measured_error(store_dir: Path) -> dict[str, Any] | None:
    """What the states of a store lost to codecs, where that was measured; None where nobody did.

    The values of `Measurement.facts`: median and worst of the relative L2 errors of `num_states` states, how many
    they stand for, and what they were compared with. Raises UserError where that is damaged.
    """
    found = read_errors(store_dir)
    return None if found is None else found.facts()


def error_text(error: Mapping[str, Any]) -> str:
    """What `measured_error` found, for people."""
    count, num_all = error["num_states"], error["num_all"]
    share = "" if count == num_all else f" ({count / num_all:.2%} of them)"
    whose = "" if error["is_own"] else " in the stores it was made from"
    missing = f"; not measured: {', '.join(error['unmeasured'])}" if error["unmeasured"] else ""
    return (
        f"of {', '.join(error['codecs'])} against {', '.join(error['against'])}{whose}, relative L2 of "
        f"{count:,} states{share}: median {error['median']:.3%}, worst {error['worst']:.3%}{missing}"
    )


def earlier_codecs(manifest: Manifest) -> list[str]:
    """Lossy codecs that the states went through before they were encoded as this store has them, each once.

    Where a store was made by copying the rows of another one, nothing was lost again.
    """
    found: dict[str, None] = {}

    def walk(data: Mapping[str, Any], own: str) -> None:
        for source in data.get("recoded", {}).get("sources", {}).values():
            if source["codec"] != own and not get_codec(source["codec"]).is_lossless:
                found[source["codec"]] = None
            walk(source, source["codec"])

    walk(manifest.data, manifest.codec)
    return list(found)


def read_errors(store_dir: Path) -> Measurement | None:
    """The content of `state_errors.json`, checked; without that file what the commits of an extraction say."""
    path = Path(store_dir) / ERRORS_NAME
    if not path.exists():
        return extracted_errors(store_dir)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(error, path) from error
    try:
        value = json.loads(data)
        del value["sha256"]
        if data != file_content(value):
            raise ValueError("it does not match its checksum")
        return Measurement.from_json(value)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{str(path)!r} is damaged: {error}".replace("\n", " "),
            "the measured errors as they were written",
            "delete it and give the same extract or recode again, which writes it anew",
        ) from error


def extracted_errors(store_dir: Path) -> Measurement | None:
    """What extract measured of the segments committed so far; None for a codec without loss or a recoded store."""
    manifest = read_manifest(store_dir)
    if get_codec(manifest.codec).is_lossless or "recoded" in manifest.data:
        return None
    errors, num_positions = committed_errors(store_dir)
    found = Measurement(errors=errors, codecs={manifest.codec}, against={AS_RECORDED})
    found.num_all = num_positions * (len(manifest.tap_layers) + int(manifest.has_last))
    return found if errors.num_states else None


def committed_errors(store_dir: Path) -> tuple[StateErrors, int]:
    """The sum of what all commits say was measured, and the sound positions in them."""
    errors, num_positions = StateErrors(), 0
    for segment in sorted(committed_segments(store_dir)):
        table, metadata = read_table(commit_path(store_dir, segment), COMMIT_SCHEMA)
        is_sound = table.column("status").to_numpy() == STATUS_OK
        num_positions += int(table.column("n").to_numpy()[is_sound].sum(dtype=np.int64))
        if ERRORS_KEY in metadata:
            errors.merge(StateErrors.from_json(json.loads(metadata[ERRORS_KEY])))
    return errors, num_positions


def as_metadata(errors: StateErrors) -> dict[str, str]:
    """What a commit says of the states measured in its segment; nothing where there are none."""
    return {ERRORS_KEY: json.dumps(errors.as_json())} if errors.num_states else {}


def write_errors(store_dir: Path, found: Measurement) -> None:
    """Writes `state_errors.json`; one launcher at a time, so that what a killed one left is removed."""
    with FolderLock(Path(store_dir), name=LAYOUT_LOCK, wait_s=LAYOUT_WAIT_S):
        for left_over in Path(store_dir).glob(f"{ERRORS_NAME}.tmp.*"):
            remove(left_over)
        publish(Path(store_dir) / ERRORS_NAME, file_content(found.as_json()))


def file_content(value: Mapping[str, Any]) -> bytes:
    """The one way to write these facts with their checksum: any other byte is damage."""
    return (json.dumps({**value, "sha256": checksum(dict(value))}, indent=1) + "\n").encode()
