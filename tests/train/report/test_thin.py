"""Long curves made short: nothing high or low is lost, and a mean is a mean."""

import random

import pytest
from dflash_offline.train.report.thin import MOST_MEANS, SMOOTHED_SHARE, smoothed, thinned


def noise(count):
    rng = random.Random(count)
    return [(step, rng.random()) for step in range(1, count + 1)]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100, 9_999])
@pytest.mark.parametrize("most", [4, 8, 300])
def test_a_thinned_curve_is_short_in_order_and_keeps_its_ends(count, most):
    points = noise(count)
    found = thinned(points, most)
    assert len(found) <= max(most, 0)
    assert set(found) <= set(points)
    assert found == sorted(found)
    assert found == points or (found[0], found[-1]) == (points[0], points[-1])


@pytest.mark.parametrize("place", [1, 500, 4_321, 9_998])
@pytest.mark.parametrize("height", [50.0, -50.0])
def test_a_single_spike_stays(place, height):
    points = noise(10_000)
    points[place] = (points[place][0], height)
    assert points[place] in thinned(points, 100)


def test_each_bucket_keeps_its_lowest_and_highest():
    points = noise(1_002)
    found = thinned(points, 22)
    for bucket in range(10):
        own = points[1 + 100 * bucket : 101 + 100 * bucket]
        assert min(own, key=lambda point: point[1]) in found
        assert max(own, key=lambda point: point[1]) in found


def test_a_mean_is_that_of_its_window():
    assert smoothed([(step, 2.0 * step) for step in range(1, 11)]) == (1, [(s, 2.0 * s) for s in range(1, 11)])
    points = noise(200)
    width, means = smoothed(points)
    assert width == round(SMOOTHED_SHARE * 200)
    assert means == [
        (points[i][0], pytest.approx(sum(y for _, y in points[i - width + 1 : i + 1]) / width))
        for i in range(width - 1, 200)
    ]


def test_long_curves_have_few_means_the_last_among_them_and_a_spike_spoils_none_behind_it():
    points = noise(20_000)
    points[50] = (51, 1e300)
    width, means = smoothed(points)
    assert MOST_MEANS / 2 <= len(means) <= 2 * MOST_MEANS
    assert means[-1] == (20_000, pytest.approx(sum(y for _, y in points[-width:]) / width))
    assert smoothed([]) == (1, [])
