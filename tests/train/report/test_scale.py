"""Round ticks inside their range, and numbers as a person reads them."""

from itertools import pairwise

import pytest
from dflash_offline.train.report.scale import integer_ticks, linear_ticks, log_ticks, padded, short, tick_texts


@pytest.mark.parametrize("low, high", [(0, 1), (0.3, 0.31), (-5, 5), (0, 123_456), (1e-9, 3e-9), (99.5, 100.5)])
def test_linear_ticks_are_round_even_and_inside(low, high):
    ticks = linear_ticks(low, high)
    assert 2 <= len(ticks) <= 8
    assert low - 1e-12 <= ticks[0]
    assert ticks[-1] <= high + 1e-9 * abs(high)
    steps = [b - a for a, b in pairwise(ticks)]
    assert steps == pytest.approx([steps[0]] * len(steps))


def test_integer_ticks_are_whole():
    assert integer_ticks(1, 3) == [1, 2, 3]
    assert integer_ticks(0.5, 1.5) == [1]
    assert all(tick == int(tick) for tick in integer_ticks(1, 200_000))


@pytest.mark.parametrize("low, high", [(0.1, 40), (1.1, 1.3), (2.0, 5.0), (1e-6, 1e6)])
def test_log_ticks_are_several_and_inside(low, high):
    ticks = log_ticks(low, high)
    assert 3 <= len(ticks) <= 9
    assert ticks == sorted(ticks)
    assert low <= ticks[0]
    assert ticks[-1] <= high * (1 + 1e-9)


def test_a_range_holds_its_values_and_begins_at_its_floor():
    assert padded([2, 4], floor=0.0)[0] == 0.0
    assert padded([-1, 4], floor=0.0)[0] < -1
    low, high = padded([3.0])
    assert low < 3 < high
    low, high = padded([0.0], floor=0.0)
    assert (low, high) == (0.0, 1.0)
    low, high = padded([1.0, 10.0], is_log=True)
    assert 0 < low < 1
    assert high > 10


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (0.02, "0.02"),
        (1.23456, "1.235"),
        (12_345, "12.35k"),
        (999.96, "1k"),
        (3.1e-05, "3.10e-05"),
        (2e9, "2G"),
    ],
)
def test_numbers_are_short(value, text):
    assert short(value) == text


def test_the_ticks_of_an_axis_have_one_unit():
    assert tick_texts([0, 2000, 8000]) == ["0", "2000", "8000"]
    assert tick_texts([0, 5000, 10_000]) == ["0", "5k", "10k"]
