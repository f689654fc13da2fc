"""How one chunk of states becomes bytes. Each codec states its size, its error and its Zarr name.

Only `raw` exists so far. A codec is a field of the manifest, so that a store written by a newer
version with a codec unknown here is refused and never misread.
"""

from dataclasses import dataclass
from typing import Any

from .. import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """One way to store a chunk `[positions, 1, H]` of bfloat16 values."""

    name: str
    bytes_per_value: float
    error_bound: float  # largest relative error of a value; 0 means lossless
    zarr_dtype: str
    fill_value: Any  # what a generic Zarr reader sees where nothing was written
    inner: tuple[dict[str, Any], ...]  # Zarr v3 codecs of one chunk


RAW = Codec(
    name="raw",
    bytes_per_value=2.0,
    error_bound=0.0,
    zarr_dtype="bfloat16",
    fill_value="NaN",
    inner=({"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}),
)

CODECS = {RAW.name: RAW}


def get_codec(name: str) -> Codec:
    """The codec of that name; UserError where this version knows none."""
    if name not in CODECS:
        known = ", ".join(sorted(CODECS))
        raise UserError(
            f"codec {name!r} is unknown to this version", f"one of: {known}", "choose one of them, or update"
        )
    return CODECS[name]
