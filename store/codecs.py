"""How states become stored bytes. Each codec states its size, its error and what a Zarr reader must know.

Two steps: a *row* (one position of one tap, H bfloat16 values) is encoded to `row_bytes` bytes, and a chunk of
64 rows is perhaps compressed. Rows of `raw` and `zstd` are the bfloat16 bits themselves. A codec is a field of the
manifest, so that a store written with a codec unknown here is refused and never misread.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .. import UserError
from . import int8

VALUE_BYTES = 2  # bfloat16
BLOSC_BLOCK_BYTES = 262_144
DEFAULT_OUTLIERS = 16
NAMES = "raw, zstd, int8 (16 exact outliers a row) or int8:K"
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
CRC32C = {"name": "crc32c"}
BLOSC = {
    "name": "blosc",
    "configuration": {"cname": "zstd", "clevel": 1, "shuffle": "shuffle", "typesize": VALUE_BYTES}
    | {"blocksize": BLOSC_BLOCK_BYTES},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """One way to store rows of H bfloat16 values."""

    name: str
    """As in the manifest: raw, zstd, int8:16."""
    zarr_dtype: str
    fill_value: Any
    """What a generic Zarr reader sees where nothing was written."""
    inner: tuple[dict[str, Any], ...]
    """Zarr v3 codecs of one chunk."""
    error: str
    """The bound on the error of a value, in words; a test holds it."""
    outliers: int | None = None
    """Values of a row that int8 keeps exactly; None for the lossless codecs."""

    @property
    def is_compressed(self) -> bool:
        """True where stored chunks differ in length."""
        return any(step["name"] == "blosc" for step in self.inner)

    @property
    def is_lossless(self) -> bool:
        return self.outliers is None

    def row_bytes(self, hidden: int) -> int:
        """Bytes of an encoded row, before compression."""
        return VALUE_BYTES * hidden if self.outliers is None else int8.row_bytes(hidden, self.outliers)

    def bytes_per_value(self, hidden: int) -> float:
        """Bytes one bfloat16 value takes, before compression."""
        return self.row_bytes(hidden) / hidden

    def row_items(self, hidden: int) -> int:
        """Length of the array's last axis: values, or bytes where the array is of bytes."""
        return hidden if self.outliers is None else self.row_bytes(hidden)

    def require_fits(self, hidden: int) -> None:
        """Raises UserError where rows of that width cannot be encoded."""
        if self.outliers is not None and not int8.fits(hidden, self.outliers):
            raise UserError(
                f"codec {self.name} cannot store rows of {hidden} values",
                f"more than {self.outliers} values a row, and at most 65,536",
                "choose int8:K with a smaller K, or raw or zstd",
            )

    def encode(self, planes: np.ndarray) -> np.ndarray:
        """Rows u8 [..., row_bytes] of planes [..., H] u16 (bfloat16 bits); raw and zstd give a view."""
        return planes.view(np.uint8) if self.outliers is None else int8.encode(planes, self.outliers)

    def decode(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Fills out [..., H] u16 with the values of rows u8 [..., row_bytes]."""
        if self.outliers is None:
            out[...] = rows.view(np.uint16)
        else:
            int8.decode(rows, self.outliers, out)


RAW = Codec(name="raw", zarr_dtype="bfloat16", fill_value="NaN", inner=(LITTLE, CRC32C), error="none")
ZSTD = Codec(name="zstd", zarr_dtype="bfloat16", fill_value="NaN", inner=(LITTLE, BLOSC, CRC32C), error="none")


def int8_codec(outliers: int) -> Codec:
    """int8 with that many exact outliers a row."""
    return Codec(
        name=f"int8:{outliers}",
        zarr_dtype="uint8",
        fill_value=0,
        inner=({"name": "bytes"}, CRC32C),
        error=f"the {outliers} largest values of a row exact, the others within {int8.ERROR_TEXT}",
        outliers=outliers,
    )


@cache
def get_codec(name: str) -> Codec:
    """The codec of that name; UserError where this version knows none."""
    match = re.fullmatch(r"int8(?::([1-9][0-9]{0,3}))?", name)
    if match:
        return int8_codec(int(match[1] or DEFAULT_OUTLIERS))
    for codec in (RAW, ZSTD):
        if name == codec.name:
            return codec
    raise UserError(f"codec {name!r} is unknown to this version", NAMES, "choose one of them, or update")
