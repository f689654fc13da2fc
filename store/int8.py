"""The int8 row: codes, one scale and the k largest values exactly, packed into bytes; numpy, the reference.

Layout of a row of H values (store-format, section codecs):
    H codes i8, scale bfloat16, k channel numbers u16 ascending, k values bfloat16
so H + 2 + 4k bytes. A value is code * scale rounded to bfloat16, or its own bits where its channel is listed.
Residual streams carry a few huge channels; without lifting them out the others lose up to two thirds of their
size (SmolLM2, reference measurements in docs/store-format.md).

Encoding is fixed to the bit, so that torch (extract/int8_rows.py) and numpy write the same bytes:
the k largest by magnitude, of equal ones the lower channel; scale = the largest other magnitude * float32(1/127), kept
in `SCALES`, rounded to bfloat16; code = value / scale rounded half to even, all in float32.
"""

import numpy as np

CODES = 127
SCALES = (2.0**-120, 2.0**121)  # smallest: products stay clear of subnormals; largest: 127 * scale stays finite
MAGNITUDE = 0x7FFF  # all bits but the sign; bfloat16 magnitudes order like these integers, NaN above infinity
LAST_CHANNEL = 0xFFFF
NAN_BITS = 0x7FC0
ERROR_SHARE = 1 / 136
ERROR_FLOOR = 2.0**-121
ERROR_TEXT = "1/136 of the largest of these, or 2^-121 where that is more"  # worst of all mantissas; test_codecs.py


def row_bytes(hidden: int, outliers: int) -> int:
    """Bytes of a packed row."""
    return hidden + 2 + 4 * outliers


def encode(planes: np.ndarray, outliers: int) -> np.ndarray:
    """Packed rows u8 [..., H + 2 + 4k] of planes [..., H] u16 (bfloat16 bits).

    Raises ValueError unless 0 < k < H <= 65,536. Non-finite values count as the largest and are kept as they are while
    there are at most k of them; in a row with more every value that is not kept becomes NaN.
    """
    hidden = planes.shape[-1]
    if not fits(hidden, outliers):
        raise ValueError(f"{outliers} exact values of a row of {hidden}")
    bits = planes.reshape(-1, hidden)
    channels = largest_channels(bits, outliers)  # [N, k]
    exact = np.take_along_axis(bits, channels, axis=1)
    rest = as_float(bits)
    np.put_along_axis(rest, channels, np.float32(0), axis=1)
    largest = np.abs(rest).max(axis=1, keepdims=True)  # [N, 1]
    is_finite = np.isfinite(largest)
    scale = np.clip(largest * np.float32(1 / CODES), *SCALES)
    scale_bits = np.where(is_finite, as_bfloat16(scale), np.uint16(NAN_BITS))
    with np.errstate(invalid="ignore"):
        codes = np.clip(np.rint(rest / as_float(as_bfloat16(scale))), -CODES, CODES)
    codes = np.where(is_finite, codes, 0).astype(np.int8)
    parts = [codes, scale_bits, channels.astype("<u2"), exact]
    packed = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=1)
    return packed.reshape(*planes.shape[:-1], row_bytes(hidden, outliers))


def largest_channels(bits: np.ndarray, count: int) -> np.ndarray:
    """Channels [N, k], ascending, of the largest magnitudes of bits [N, H] u16; of equal ones the lower.

    All keys differ, the channel being their low half, so that a partition (7 times faster than a stable sort at
    H = 5,120; 2026-11-30, one core) leaves nothing open.
    """
    order = np.int32(LAST_CHANNEL) - np.arange(bits.shape[1], dtype=np.int32)
    keys = (bits & MAGNITUDE).astype(np.int32) << 16 | order
    kept = np.partition(keys, -count, axis=1)[:, -count:]
    return np.sort(LAST_CHANNEL - (kept & LAST_CHANNEL), axis=1)


def decode(rows: np.ndarray, outliers: int, out: np.ndarray) -> None:
    """Fills out [..., H] u16 (bfloat16 bits) with the values of packed rows u8 [..., H + 2 + 4k].

    A row of zero bytes gives zeros.
    """
    hidden = out.shape[-1]
    flat = rows.reshape(-1, row_bytes(hidden, outliers))
    tail = np.ascontiguousarray(flat[:, hidden:]).view("<u2")  # [N, 1 + 2k]
    scale = as_float(tail[:, :1])
    codes = np.ascontiguousarray(flat[:, :hidden]).view(np.int8).astype(np.float32)
    bits = as_bfloat16(codes * scale)
    channels, exact = tail[:, 1 : 1 + outliers].astype(np.int64), tail[:, 1 + outliers :]
    np.put_along_axis(bits, channels, exact, axis=1)
    out[...] = bits.reshape(out.shape)


def fits(hidden: int, outliers: int) -> bool:
    """True where rows of that width can be packed: channel numbers take 16 bits."""
    return 0 < outliers < hidden <= 65_536


def as_float(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits u16 as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 values, finite or the canonical NaN, rounded to bfloat16, half to even: bits u16."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
