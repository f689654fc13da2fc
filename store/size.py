"""Bytes: what a store will take, how a user types a size, how we print one. Pure arithmetic."""

import re

import numpy as np

from .. import UserError
from .codecs import get_codec

CHUNK_POSITIONS = 64
INDEX_ENTRY_BYTES = 16
CHECKSUM_BYTES = 4

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
BINARY_UNITS = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40, "PI": 2**50}


def bytes_per_position(num_taps: int, hidden_size: int, *, has_last: bool = False, codec: str = "raw") -> float:
    """Bytes one recorded position takes, its share of the chunk checksums included."""
    planes = num_taps + int(has_last)
    return planes * (get_codec(codec).bytes_per_value * hidden_size + CHECKSUM_BYTES / CHUNK_POSITIONS)


def store_bytes(
    num_recorded: np.ndarray,
    *,
    num_segments: int,
    segment_positions: int,
    num_taps: int,
    hidden_size: int,
    has_last: bool = False,
    codec: str = "raw",
) -> int:
    """Bytes of all segment files of a plan: padded chunks, their checksums, and one index a file.

    `num_recorded` [samples] holds the recorded positions of each sample. Exact for the raw codec.
    """
    num_chunks = int((-(-np.asarray(num_recorded, dtype=np.int64) // CHUNK_POSITIONS)).sum())
    chunk_bytes = int(CHUNK_POSITIONS * hidden_size * get_codec(codec).bytes_per_value) + CHECKSUM_BYTES
    planes = num_taps + int(has_last)
    index_bytes = segment_positions // CHUNK_POSITIONS * planes * INDEX_ENTRY_BYTES
    num_files = num_segments * (1 + int(has_last))
    return num_chunks * planes * chunk_bytes + num_segments * index_bytes + num_files * CHECKSUM_BYTES


def parse_size(text: str) -> int:
    """Bytes of a size like '20TB', '1.5 GiB' or '4096'; raises UserError for anything else."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGTP]?I?)B?\s*", text.upper())
    factor = (UNITS | BINARY_UNITS).get(match[2]) if match else None
    if match is None or factor is None:
        raise UserError(f"{text!r} is not a size", "a number with a unit, like 20TB, 1.5GiB or 800MB", "correct it")
    return round(float(match[1]) * factor)


def human_bytes(size_bytes: float) -> str:
    """A size for people, in decimal units: 1,680,000,000 reads '1.68 GB'."""
    value, unit = float(size_bytes), "B"
    for name in ("kB", "MB", "GB", "TB", "PB"):
        if abs(value) < 1000:
            break
        value, unit = value / 1000, name
    return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
