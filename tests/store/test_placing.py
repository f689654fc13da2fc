"""Samples placed next fit, never straddling, in segments sized by rule; against a slow placement."""

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.store.placing import MAX_SEGMENT_BYTES, aligned, choose_segment_positions, lay_out, place
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = st.lists(st.integers(1, 40).map(lambda chunks: 64 * chunks), max_size=200)


@settings(deadline=None)
@given(SIZES)
def test_next_fit_against_a_slow_placement(sizes: list[int]) -> None:
    segments, positions = place(np.array(sizes, dtype=np.int64), 4096)
    filled: list[list[int]] = [[]]
    for size, segment, position in zip(sizes, segments, positions):
        if sum(filled[-1]) + size > 4096:
            filled.append([])
        assert (segment, position) == (len(filled) - 1, sum(filled[-1]))
        filled[-1].append(size)
    assert all(sum(segment) <= 4096 for segment in filled)


@settings(deadline=None)
@given(SIZES, st.integers(100, 200_000))
def test_segment_size_keeps_its_rules(sizes: list[int], bytes_per_position: int) -> None:
    total, longest = sum(sizes), max(sizes, default=0)
    size = choose_segment_positions(np.array(sizes, dtype=np.int64), bytes_per_position)
    assert size & (size - 1) == 0
    assert size >= max(64, longest)
    grew_for_one_sample = size < 2 * longest
    assert size * bytes_per_position <= MAX_SEGMENT_BYTES or grew_for_one_sample
    assert size == 64 or total / size >= 64 or grew_for_one_sample
    could_double = total / (2 * size) >= 64 and 2 * size * bytes_per_position <= MAX_SEGMENT_BYTES
    assert not could_double, "a larger segment would have kept all rules"


def test_a_segment_longer_than_any_is_refused() -> None:
    sizes = np.array([64, 128])
    assert lay_out(sizes, 100.0, 2**30)[0] == 2**30
    for segment_positions in (2**31, 2**62, 2**70):
        with pytest.raises(UserError, match=f"segment_positions = {segment_positions} is more than a segment can have"):
            lay_out(sizes, 100.0, segment_positions)


def test_two_gib_at_the_widths_of_a_large_target() -> None:
    sizes = np.full(100_000, 3072)
    assert choose_segment_positions(sizes, 51_220.0) == 32_768


def test_aligned() -> None:
    assert aligned(np.array([1, 63, 64, 65])).tolist() == [64, 64, 64, 128]
