"""95 % confidence intervals of what was measured on prompts, by the bootstrap.

Every number of an exam is a sum over conversations divided by another such sum, so one function serves all. Pure
numbers; knows no exam.
"""

from collections.abc import Callable
from math import sqrt
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
RESAMPLES = 5_000
SEED = 0
DRAWN_AT_ONCE = 2**22  # conversations; bounds the memory of one draw

METHOD = (
    f"{100 * LEVEL:.0f} % confidence interval [low, high] by the bootstrap: {RESAMPLES:,} draws of as many "
    f"conversations, with replacement, seed {SEED}; a prompt that was asked alone is a conversation, the turns of one "
    "are drawn together; its ends are the expanded percentiles (Hesterberg 2015, The American Statistician 69:371), "
    "which allow for few prompts; null for fewer than 2"
)
Interval = tuple[float, float]


def ratio_interval(numerators: np.ndarray, denominators: np.ndarray) -> Interval | None:
    """Of sum(numerators) / sum(denominators), one of each for a conversation [n]; denominators are above 0."""
    numerators, denominators = np.asarray(numerators, float), np.asarray(denominators, float)
    return bootstrap(lambda drawn: numerators[drawn].sum(1) / denominators[drawn].sum(1), len(numerators))


def bootstrap(statistic: Callable[[np.ndarray], np.ndarray], num_units: int) -> Interval | None:
    """Of a statistic of `num_units` units: it is given draws int [k, num_units] and gives their values [k].

    The same numbers give the same interval. None for fewer than 2 units, where nothing can be told.
    """
    if num_units < 2:
        return None
    rng = np.random.default_rng(SEED)
    at_once = max(1, DRAWN_AT_ONCE // num_units)
    sizes = [min(at_once, RESAMPLES - begin) for begin in range(0, RESAMPLES, at_once)]
    values = np.concatenate([statistic(rng.integers(0, num_units, (size, num_units))) for size in sizes])
    tail = expanded_tail(num_units)
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def expanded_tail(num_units: int) -> float:
    """The share of draws below the interval: Phi(-sqrt(n / (n - 1)) * t), t Student's quantile at n - 1.

    Plain percentiles are too narrow for few units: a draw varies by sqrt((n - 1) / n) less than the sample itself,
    and its tails are those of a normal variable.
    """
    return NormalDist().cdf(-sqrt(num_units / (num_units - 1)) * student_quantile(num_units - 1))


def student_quantile(degrees: int) -> float:
    """Student's t that LEVEL lies within (Abramowitz and Stegun 26.7.5); off by 1 % at 2 degrees, 11 % at 1."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def interval_text(interval: Interval | None, digits: int = 3) -> str:
    """The interval in brackets, or that there is none."""
    return "[no interval]" if interval is None else f"[{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"
