"""What no target puts out: states that are non-finite, zero or constant, and rows that no encoder writes.

Every value is looked at. Two maxima tell bfloat16 bits apart, one over them as signed and one as unsigned
integers: 0.09 CPU-seconds a GB, where testing the exponent bits takes 0.22 (Zen 4, numpy 2.4, 2026-11-30).
"""

import numpy as np

from .codecs import Codec
from .int8 import NAN_BITS

MINUS_ZERO, INFINITY, MINUS_INFINITY = 0x8000, 0x7F80, 0xFF80  # bits of bfloat16
MAGNITUDE = np.uint16(0x7FFF)

Looks = dict[str, np.ndarray]  # what a state looks like -> [Lt, n] bool


def odd_rows(rows: np.ndarray, codec: Codec, hidden: int) -> Looks:
    """Which encoded rows u8 [Lt, n, row_bytes] are odd, and how: only what occurs is in the answer."""
    if codec.outliers is None:
        looks = odd_states(rows.view(np.uint16))
    else:
        looks = odd_packed_rows(rows, codec, hidden)
    return {look: found for look, found in looks.items() if found.any()}


def odd_states(bits: np.ndarray) -> Looks:
    """Non-finite, zero and constant states among bits [..., H] u16 of bfloat16; each answer [...] bool."""
    signed, unsigned = bits.view(np.int16).max(axis=-1), bits.max(axis=-1)
    is_zero = (signed <= 0) & (unsigned <= MINUS_ZERO)
    is_constant = (bits[..., 0] == unsigned) & (bits[..., -1] == unsigned) & ~is_zero & (bits.shape[-1] > 1)
    if is_constant.any():
        is_constant[is_constant] = bits[is_constant].min(axis=-1) == unsigned[is_constant]
    return {
        "non-finite": (signed >= INFINITY) | (unsigned >= MINUS_INFINITY),
        "zero": is_zero,
        "constant": is_constant,
    }


def odd_packed_rows(rows: np.ndarray, codec: Codec, hidden: int) -> Looks:
    """The same of int8 rows, and `malformed` ones: a scale that is none, channels out of order, a code of -128.

    The exact values are a row's largest, so a row is decoded only where all of those are alike.
    """
    outliers = codec.outliers or 0
    tail = np.ascontiguousarray(rows[..., hidden:]).view("<u2")  # [Lt, n, 1 + 2k]
    scale, channels, exact = tail[..., 0], tail[..., 1 : 1 + outliers], tail[..., 1 + outliers :]
    magnitude = exact & MAGNITUDE
    is_scale = (scale > 0) & (scale < INFINITY)
    is_scale |= (scale == NAN_BITS) & (magnitude >= INFINITY).all(axis=-1)  # more non-finite values than are kept
    is_malformed = ~is_scale | (channels[..., -1] >= hidden)
    is_malformed |= (channels[..., 1:] <= channels[..., :-1]).any(axis=-1)
    is_malformed |= rows[..., :hidden].view(np.int8).min(axis=-1) == -128
    is_suspect = (magnitude.max(axis=-1) == magnitude.min(axis=-1)) & ~is_malformed
    looks = {
        "malformed": is_malformed,
        "non-finite": (magnitude >= INFINITY).any(axis=-1) & ~is_malformed,
        "zero": np.zeros(scale.shape, dtype=bool),
        "constant": np.zeros(scale.shape, dtype=bool),
    }
    if is_suspect.any():
        bits = np.empty((int(is_suspect.sum()), hidden), dtype=np.uint16)
        codec.decode(rows[is_suspect], bits)
        for look, found in odd_states(bits).items():
            looks[look][is_suspect] |= found
    return looks
