"""Axes: round ticks, and numbers as a person reads them. Pure arithmetic."""

import math
from collections.abc import Sequence

LOG_STEPS = ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5, 7), tuple(i / 2 for i in range(2, 20)))
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
Range = tuple[float, float]


def linear_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers from `low` to `high`, `most` or a few less; the step is 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def integer_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """The same, of whole numbers alone."""
    ticks = [tick for tick in linear_ticks(low, high, most) if abs(tick - round(tick)) < 1e-9]
    return [float(round(tick)) for tick in ticks] or [float(math.ceil(low))]


def log_ticks(low: float, high: float, fewest: int = 4, most: int = 8) -> list[float]:
    """Round numbers for a logarithmic axis; where the range is short, those of a linear one."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in LOG_STEPS:
        ticks = [t for p in powers for s in steps if low <= (t := s * 10.0**p) <= high * (1 + 1e-9)]
        if len(ticks) >= fewest:
            return ticks[:: -(-len(ticks) // most)]
    return linear_ticks(low, high)


def padded(values: Sequence[float], is_log: bool = False, floor: float | None = None) -> Range:
    """The range of an axis that holds the values, with a little air; from `floor` on where one is given."""
    low, high = min(values), max(values)
    if is_log:
        return (low / 1.1, high * 1.1)
    if floor is not None:
        low = min(low, floor)
    if low == high:
        return (low - 0.5, high + 0.5) if floor is None or low < floor else (low, low + 1.0)
    air = 0.06 * (high - low)
    return (low if floor is not None and low >= floor else low - air, high + air)


def short(value: float) -> str:
    """Four digits at most, thousands as a letter: 0.02, 1.234, 12.3k, 3.1e-05."""
    size = abs(value)
    for factor, letter in PREFIXES:
        if size >= factor * 0.99995:
            return f"{trimmed(value / factor)}{letter}"
    if 0 < size < 1e-3:
        return f"{value:.2e}"
    return trimmed(value)


def trimmed(value: float) -> str:
    """Four significant digits without zeros at the end."""
    text = f"{value:.4g}"
    return f"{float(text):.0f}" if "e" in text else text


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Ticks in one unit: whole numbers below 10,000 as they are, else all of them short."""
    if all(tick == int(tick) and abs(tick) < 1e4 for tick in ticks):
        return [str(int(tick)) for tick in ticks]
    return [short(tick) for tick in ticks]
