"""Numbers of segments as text for people and manifests, like 0-3,7."""

import re

import numpy as np

RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
ALL = "all"  # segments of a store that was complete


def as_ranges(numbers: np.ndarray) -> str:
    """Sorted whole numbers as text, like 0-3,7."""
    groups = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1) if len(numbers) else []
    return ",".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else f"{g[0]}" for g in groups)


def parse_ranges(text: str) -> list[int]:
    """The numbers that `as_ranges` wrote. Raises ValueError for any other text."""
    return [number for first, last in spans(text) for number in range(first, last + 1)]


def spans(text: str) -> list[tuple[int, int]]:
    """The first and the last number of each range that `as_ranges` wrote, ascending. Raises ValueError as above."""
    parts = [RANGE.fullmatch(part) for part in text.split(",")] if text else []
    found = [(int(part[1]), int(part[2] or part[1])) for part in parts if part]
    edges = [edge for span in found for edge in span]
    if len(found) != len(parts) or edges != sorted(edges):
        raise ValueError(f"{text!r} are no numbers of segments like 0-3,7")
    return found
