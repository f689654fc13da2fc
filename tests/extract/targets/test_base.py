"""Which layers are recorded by default, and which lists are refused."""

from itertools import pairwise

import pytest
from dflash_offline import UserError
from dflash_offline.extract.targets.base import check_taps, default_taps


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (36, (1, 9, 17, 25, 33)),
        (64, (1, 16, 31, 46, 61)),
        (40, (1, 10, 19, 28, 37)),
        (32, (1, 8, 15, 22, 29)),
        (48, (1, 12, 23, 34, 45)),
        (78, (1, 20, 38, 56, 75)),
        (8, (1, 2, 3, 4, 5)),
        (6, (0, 1, 2, 3, 4)),
        (4, (0, 1, 2)),
        (2, (0,)),
    ],
)
def test_default_taps(num_layers: int, expected: tuple[int, ...]) -> None:
    """The first six are the values of dflash-spec 1.3."""
    assert default_taps(num_layers) == expected


@pytest.mark.parametrize("count", [1, 2, 5, 8, 200])
def test_defaults_always_pass_the_check(count: int) -> None:
    for num_layers in range(2, 100):
        taps = default_taps(num_layers, count)
        check_taps(taps, num_layers)
        assert len(taps) == min(count, num_layers - 1), num_layers
        assert all(a < b for a, b in pairwise(taps)), num_layers


def test_one_layer_has_no_tap() -> None:
    with pytest.raises(UserError, match="1 decoder layer"):
        default_taps(1)


@pytest.mark.parametrize(
    ("taps", "says"),
    [
        ((), "empty"),
        ((1, 2, 1), "layer 1 more than once"),
        ((0, 6), "tap 6"),
        ((-1, 2), "tap -1"),
        ((5, 1), "tap 5 of 5,1 is the last layer"),
    ],
)
def test_bad_lists_are_refused(taps: tuple[int, ...], says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_taps(taps, 6)


def test_order_is_the_users() -> None:
    check_taps((4, 0, 2), 6)
