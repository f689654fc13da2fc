"""Long curves made short: thinned without losing a spike, and smoothed. Pure arithmetic."""

from collections.abc import Sequence
from math import fsum

Points = Sequence[tuple[float, float]]

SMOOTHED_SHARE = 0.02  # of the points, the width of the running mean
MOST_MEANS = 600  # of a long curve; more would not be told apart


def thinned(points: Points, most: int) -> list[tuple[float, float]]:
    """At most `most` (4 or more) of the points, in order: of each bucket its lowest and its highest.

    The first and the last stay, so that a curve begins and ends where it did. Buckets hold equally many points.
    """
    if len(points) <= most:
        return list(points)
    num_buckets, inner = (most - 2) // 2, len(points) - 2
    kept = [0]
    for bucket in range(num_buckets):
        places = range(1 + bucket * inner // num_buckets, 1 + (bucket + 1) * inner // num_buckets)
        lowest, highest = (end(places, key=lambda i: points[i][1]) for end in (min, max))
        kept += sorted({lowest, highest})
    return [points[i] for i in (*kept, len(points) - 1)]


def smoothed(points: Points) -> tuple[int, list[tuple[float, float]]]:
    """The width of the running mean for so many points, and the mean at the last point of each window.

    Of long curves some `MOST_MEANS` windows, evenly apart, the last one among them; each is summed exactly.
    """
    width, every = max(1, round(SMOOTHED_SHARE * len(points))), max(1, len(points) // MOST_MEANS)
    ends = range(len(points), width - 1, -every)[::-1]
    return width, [(points[end - 1][0], fsum(y for _, y in points[end - width : end]) / width) for end in ends]
