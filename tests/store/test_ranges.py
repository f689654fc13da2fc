"""Segment numbers as text and back."""

import numpy as np
import pytest
from dflash_offline.store.ranges import as_ranges, parse_ranges


@pytest.mark.parametrize(
    "numbers, text",
    [([], ""), ([4], "4"), ([0, 1, 2], "0-2"), ([0, 2, 3, 4, 9], "0,2-4,9"), ([5, 6, 8], "5-6,8")],
)
def test_ranges_of_segments_come_back(numbers: list[int], text: str) -> None:
    assert as_ranges(np.array(numbers, np.int64)) == text
    assert parse_ranges(text) == numbers
