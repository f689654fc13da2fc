"""Numbers of segments as text for people and manifests, like 0-3,7."""

import numpy as np

ALL = "all"  # segments of a store that was complete


def as_ranges(numbers: np.ndarray) -> str:
    """Sorted whole numbers as text, like 0-3,7."""
    groups = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1) if len(numbers) else []
    return ",".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else f"{g[0]}" for g in groups)


def parse_ranges(text: str) -> list[int]:
    """The numbers that `as_ranges` wrote."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
