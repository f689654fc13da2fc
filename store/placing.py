"""Where samples of given lengths go: segments of one size, none straddling. Pure arithmetic.

`extract` places what it will record, `recode` what it takes from other stores.
"""

import numpy as np

from .. import UserError
from .size import CHUNK_POSITIONS, MAX_SEGMENT_POSITIONS

MAX_SEGMENT_BYTES = 2 * 2**30
FEWEST_SEGMENTS = 64  # where the data allow it


def lay_out(
    sizes: np.ndarray, bytes_per_position: float, segment_positions: int | None = None
) -> tuple[int, np.ndarray, np.ndarray]:
    """The positions of a segment (chosen unless given), then segment [N] and first position [N] of each sample.

    `sizes` [N] are aligned. Raises UserError where a segment is too short for the longest sample, or longer than any.
    """
    if segment_positions is None:
        segment_positions = choose_segment_positions(sizes, bytes_per_position)
    if segment_positions > MAX_SEGMENT_POSITIONS:
        raise UserError(
            f"segment_positions = {segment_positions} is more than a segment can have",
            f"at most {MAX_SEGMENT_POSITIONS}",
            "lower segment_positions, or leave it out",
        )
    if len(sizes) and sizes.max() > segment_positions:
        raise UserError(
            f"segment_positions = {segment_positions} is shorter than the longest sample, {sizes.max()} positions",
            f"at least {power_of_two_from(int(sizes.max()))}",
            "raise segment_positions, or leave it out",
        )
    return segment_positions, *place(sizes, segment_positions)


def aligned(lengths: np.ndarray) -> np.ndarray:
    """Lengths rounded up to whole chunks of positions."""
    return -(-lengths // CHUNK_POSITIONS) * CHUNK_POSITIONS


def choose_segment_positions(sizes: np.ndarray, bytes_per_position: float) -> int:
    """A power of two: at most 2 GiB, small enough for 64 segments, but never below the longest sample.

    `sizes` [N] are aligned. One rule gives way to the next in that order reversed.
    """
    largest = power_of_two_to(MAX_SEGMENT_BYTES / bytes_per_position)
    enough = power_of_two_to(int(sizes.sum()) / FEWEST_SEGMENTS)
    longest = power_of_two_from(int(sizes.max(initial=CHUNK_POSITIONS)))
    return max(min(largest, enough), longest)


def power_of_two_to(limit: float) -> int:
    """The largest power of two up to `limit`, at least one chunk."""
    return max(CHUNK_POSITIONS, 1 << max(0, int(limit).bit_length() - 1))


def power_of_two_from(limit: int) -> int:
    """The smallest power of two from `limit` on."""
    return 1 << (limit - 1).bit_length()


def place(sizes: np.ndarray, segment_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Next fit: the segment [N] and the position inside it [N] of each sample, none straddling.

    A sample that does not fit what is left of a segment opens the next one.
    """
    segments = np.empty(len(sizes), dtype=np.int32)
    positions = np.empty(len(sizes), dtype=np.int32)
    segment = used = 0
    for i, size in enumerate(sizes.tolist()):
        if used + size > segment_positions:
            segment, used = segment + 1, 0
        segments[i], positions[i] = segment, used
        used += size
    return segments, positions
