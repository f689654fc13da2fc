"""Bytes: what a store will take, how a user types a size, how we print one. Pure arithmetic."""

import re

import numpy as np

from .. import UserError
from .blosc_frame import HEADER
from .codecs import get_codec

CHUNK_POSITIONS = 64
INDEX_ENTRY_BYTES = 16
CHECKSUM_BYTES = 4
COMMIT_BYTES = 8192  # a commit of some hundred samples, in whole blocks of the disk
PLAN_ROW_BYTES = 128  # plan row, its commit row and its row in the consolidated index
MAX_SEGMENT_POSITIONS = 2**30  # a place inside a segment, and the end of what lies there, are int32
MAX_SIZE_PB = 9000  # below 2^63 bytes
SHOWN_CHARACTERS = 40  # of what a user typed

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
BINARY_UNITS = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40, "PI": 2**50}


def bytes_per_position(num_taps: int, hidden_size: int, *, has_last: bool = False, codec: str = "raw") -> float:
    """Bytes one recorded position takes, its share of its chunks' heads and checksums included; at most, with zstd."""
    return (num_taps + int(has_last)) * chunk_bytes(hidden_size, codec) / CHUNK_POSITIONS


def chunk_bytes(hidden_size: int, codec: str) -> int:
    """Bytes of one stored chunk and its checksum; at most, with zstd, which puts a head before what does not pack."""
    own = get_codec(codec)
    return CHUNK_POSITIONS * own.row_bytes(hidden_size) + CHECKSUM_BYTES + (HEADER.size if own.is_compressed else 0)


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

    `num_recorded` [samples] holds the recorded positions of each sample. Exact for raw and int8; zstd never takes more.
    """
    num_chunks = int((-(-np.asarray(num_recorded, dtype=np.int64) // CHUNK_POSITIONS)).sum())
    planes = num_taps + int(has_last)
    index_bytes = segment_positions // CHUNK_POSITIONS * planes * INDEX_ENTRY_BYTES
    num_files = num_segments * (1 + int(has_last))
    states_bytes = num_chunks * planes * chunk_bytes(hidden_size, codec)
    return states_bytes + num_segments * index_bytes + num_files * CHECKSUM_BYTES


def parse_size(text: str) -> int:
    """Bytes of a size like '20TB', '1.5 GiB' or '4096', at most 9000 PB; raises UserError for anything else."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGTP]?I?)B?\s*", text.upper())
    factor = (UNITS | BINARY_UNITS).get(match[2]) if match else None
    shown = repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}...")
    if match is None or factor is None:
        raise UserError(f"{shown} is not a size", "a number with a unit, like 20TB, 1.5GiB or 800MB", "correct it")
    size_bytes = float(match[1]) * factor
    if size_bytes > MAX_SIZE_PB * UNITS["P"]:
        raise UserError(f"{shown} is more than any disk holds", f"at most {MAX_SIZE_PB} PB", "give a smaller size")
    return round(size_bytes)


def human_bytes(size_bytes: float) -> str:
    """A size for people, in decimal units: 1,680,000,000 reads '1.68 GB'."""
    value, unit = float(size_bytes), "B"
    for name in ("kB", "MB", "GB", "TB", "PB"):
        if abs(value) < 1000:
            break
        value, unit = value / 1000, name
    return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
