"""The codecs: their sizes, their errors against the bound they state, and the int8 row written out by loops."""

import math
import struct

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.store import int8
from dflash_offline.store.codecs import get_codec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

NAN, INFINITY, MINUS_ZERO, LARGEST = 0x7FC0, 0x7F80, 0x8000, 0x7F7F


def bits_of(*values: float) -> np.ndarray:
    """Values as bits of bfloat16, [len] u16."""
    return int8.as_bfloat16(np.array(values, np.float32))


def floats(bits: np.ndarray) -> np.ndarray:
    return int8.as_float(bits).astype(np.float64)


def decoded(rows: np.ndarray, hidden: int, name: str) -> np.ndarray:
    out = np.full((*rows.shape[:-1], hidden), 0xABCD, np.uint16)
    get_codec(name).decode(rows, out)
    return out


def bound(row: np.ndarray, outliers: int) -> float:
    """What the text of the codec says, from the largest magnitude that is not kept."""
    largest_other = np.sort(np.abs(floats(row)))[-outliers - 1]
    return max(largest_other * int8.ERROR_SHARE, int8.ERROR_FLOOR)


def to_bfloat16(value: float) -> float:
    return float(floats(bits_of(value))[0])


def row_by_loops(row: np.ndarray, outliers: int) -> bytes:
    """A packed row by its definition, one value at a time, with Python's own rounding to even."""
    order = sorted(range(len(row)), key=lambda c: (-(int(row[c]) & 0x7FFF), c))
    kept = sorted(order[:outliers])
    largest = np.float32(abs(floats(row)[order[outliers]]))
    limited = min(max(float(largest * np.float32(1 / 127)), 2.0**-120), 2.0**121)
    scale = np.float32(to_bfloat16(limited))
    codes = [0 if c in kept else round(float(np.float32(floats(row)[c]) / scale)) for c in range(len(row))]
    head = struct.pack(f"<{len(row)}b", *(max(-127, min(127, code)) for code in codes))
    exact = [int(row[c]) for c in kept]
    return head + struct.pack(f"<{1 + 2 * outliers}H", int(bits_of(float(scale))[0]), *kept, *exact)


finite_bits = st.integers(0, LARGEST) | st.integers(0x8000, 0x8000 | LARGEST)
shapes = st.tuples(st.integers(1, 3), st.integers(2, 40))


@st.composite
def planes_and_outliers(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Rows of any finite bfloat16 values, often few different ones, and how many are kept of each."""
    shape = draw(shapes)
    planes = draw(arrays(np.uint16, shape, elements=finite_bits))
    if draw(st.booleans()):  # values of one size, and of few kinds: ties at every boundary
        planes = (planes & draw(st.sampled_from([0x8000, 0x8003, 0x80FF]))) | 0x4000
    return planes, draw(st.integers(1, shape[1] - 1))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(planes_and_outliers())
def test_any_finite_rows_keep_to_the_bound_and_to_the_definition(case: tuple[np.ndarray, int]) -> None:
    planes, outliers = case
    rows = int8.encode(planes, outliers)
    assert [row.tobytes() for row in rows] == [row_by_loops(row, outliers) for row in planes]
    back = decoded(rows, planes.shape[1], f"int8:{outliers}")
    for row, got in zip(planes, back):
        assert np.abs(floats(got) - floats(row)).max() <= bound(row, outliers)
        kept = np.argsort(-(row & 0x7FFF).astype(int), kind="stable")[:outliers]
        assert (got[kept] == row[kept]).all()


def test_the_bound_is_the_worst_of_all_mantissas() -> None:
    """Scaling by a power of two changes nothing between the ends, so one binade of largest values stands for all.

    Both ends of the range are gone through as well: there the scale is limited.
    """
    worst = 0.0
    for exponent in (127, 1, 7, 14, 253, 254):
        for mantissa in range(128):
            largest = exponent << 7 | mantissa
            first = max(0, largest - 9 * 128)  # below, values are far under one step of the scale
            row = np.arange(first, largest + 1, dtype=np.uint16)
            row = np.append(row, np.uint16(largest))  # the kept one
            back = decoded(int8.encode(row, 1), len(row), "int8:1")
            error = np.abs(floats(back) - floats(row)).max()
            assert error <= bound(row, 1), f"largest {floats(row)[-1]}"
            if exponent == 127:
                worst = max(worst, error / floats(row)[-1])
    assert worst == int8.ERROR_SHARE


def test_a_massive_channel_costs_the_others_nothing() -> None:
    """SmolLM2 has a channel of 24,704 beside a median of 7 (reference measurements)."""
    draw = np.random.default_rng(0)
    row = int8.as_bfloat16((7 * draw.normal(size=576)).astype(np.float32))
    row[[17, 301]] = bits_of(24_704.0, -1024.0)
    back = decoded(int8.encode(row, 16), 576, "int8")
    assert floats(back)[[17, 301]].tolist() == [24_704.0, -1024.0]
    others = np.delete(np.abs(floats(back) - floats(row)), [17, 301])
    assert others.max() <= 7 * 4 / 136
    plain = np.rint(floats(row) / (24_704 / 127)) * (24_704 / 127)  # without kept values: all others are lost
    assert np.abs(plain - floats(row)).max() > 100 * others.max()


@pytest.mark.parametrize(
    "row, expected",
    [
        (bits_of(*[3.140625] * 20), bits_of(*[3.140625] * 20)),
        (bits_of(*[0.0] * 20), bits_of(*[0.0] * 20)),
        (np.array([MINUS_ZERO] * 20, np.uint16), np.array([MINUS_ZERO] * 4 + [0] * 16, np.uint16)),
        (np.array([1, 2, 3, 0x8004] * 5, np.uint16), None),
        (np.array([LARGEST, 0x8000 | LARGEST] * 10, np.uint16), None),
        (bits_of(*[1.0, -1.0] * 10), bits_of(*[1.0, -1.0] * 10)),
        (bits_of(5.0, 5.0, 5.0, 5.0, 5.0), bits_of(5.0, 5.0, 5.0, 5.0, 5.0)),  # one value is not kept
    ],
    ids=["constant", "zeros", "negative zeros", "subnormal", "largest", "signs", "H just above k"],
)
def test_odd_rows(row: np.ndarray, expected: np.ndarray | None) -> None:
    rows = int8.encode(row, 4)
    assert rows.tobytes() == row_by_loops(row, 4)
    back = decoded(rows, len(row), "int8:4")
    assert np.isfinite(floats(back)).all()
    assert np.abs(floats(back) - floats(row)).max() <= bound(row, 4)
    if expected is not None:
        # a constant is 127 codes of its own 127th part, so it comes back to the last bit or to the next one
        assert np.abs(floats(back) - floats(expected)).max() <= abs(floats(row)[0]) / 256
        assert (back[:4] == expected[:4]).all()


def test_of_equal_magnitudes_the_lower_channels_are_kept() -> None:
    row = bits_of(1.0, -2.0, 2.0, 0.5, 2.0, -2.0)
    channels = int8.encode(row, 3)[6 + 2 : 6 + 2 + 6].view("<u2")
    assert channels.tolist() == [1, 2, 4]


def test_up_to_k_non_finite_values_are_kept_and_more_make_the_row_loud() -> None:
    row = bits_of(*[1.0, 2.0, 3.0, 4.0] * 3)
    row[[1, 5, 6]] = NAN, INFINITY, 0x8000 | INFINITY
    back = decoded(int8.encode(row, 3), 12, "int8:3")
    assert (back[[1, 5, 6]] == row[[1, 5, 6]]).all()
    finite = np.delete(np.arange(12), [1, 5, 6])
    assert np.abs(floats(back)[finite] - floats(row)[finite]).max() <= 4 / 136
    back = decoded(int8.encode(row, 2), 12, "int8:2")
    assert (back[[1, 5]] == row[[1, 5]]).all()
    assert np.isnan(np.delete(floats(back), [1, 5])).all()


def test_rows_of_zero_bytes_are_zeros() -> None:
    assert (decoded(np.zeros((3, 64 + 2 + 64), np.uint8), 64, "int8") == 0).all()


@pytest.mark.parametrize("name", ["raw", "zstd"])
def test_lossless_rows_are_the_bits(name: str) -> None:
    codec = get_codec(name)
    planes = np.random.default_rng(1).integers(0, 65536, (2, 3, 24)).astype(np.uint16)
    rows = codec.encode(planes)
    assert rows.shape == (2, 3, codec.row_bytes(24))
    assert np.shares_memory(rows, planes)
    assert codec.is_lossless
    assert (decoded(rows, 24, name) == planes).all()


@pytest.mark.parametrize("name, hidden, size", [("raw", 5120, 2.0), ("zstd", 5120, 2.0), ("int8", 5120, 1.012890625)])
def test_bytes_of_a_value(name: str, hidden: int, size: float) -> None:
    codec = get_codec(name)
    assert codec.bytes_per_value(hidden) == size
    planes = np.ones((1, 2, hidden), np.uint16)
    assert codec.encode(planes).nbytes == 2 * codec.row_bytes(hidden) == 2 * hidden * size


def test_the_text_of_the_bound_is_the_bound() -> None:
    assert "1/136 of the largest of these, or 2^-121" in get_codec("int8").error
    assert int8.ERROR_SHARE == 1 / 136
    assert math.log2(int8.ERROR_FLOOR) == -121
    assert get_codec("raw").error == get_codec("zstd").error == "none"


@pytest.mark.parametrize("name", ["", "Raw", "int8:", "int8:0", "int8:-1", "int8:1.5", "int8:016", "int16", "zstd:3"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"codec '{name}' is unknown"):
        get_codec(name)


def test_int8_alone_is_int8_with_16_kept_values() -> None:
    assert get_codec("int8") == get_codec("int8:16")
    assert get_codec("int8").name == "int8:16"


@pytest.mark.parametrize("hidden", [16, 3, 65_537])
def test_rows_that_cannot_be_packed_are_refused(hidden: int) -> None:
    with pytest.raises(UserError, match=f"int8:16 cannot store rows of {hidden} values"):
        get_codec("int8").require_fits(hidden)
    with pytest.raises(ValueError, match=f"16 exact values of a row of {hidden}"):
        int8.encode(np.zeros((1, hidden), np.uint16), 16)
    get_codec("zstd").require_fits(hidden)
    get_codec("int8").require_fits(17)
