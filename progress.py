"""Progress bars on stderr. A leaf: knows tqdm and whether a person is watching."""

import sys
from collections.abc import Iterable
from typing import Any

WATCHED_S, UNWATCHED_S = 0.5, 10.0  # between two updates on a terminal, and into a file


def bar(text: str, unit: str, items: Iterable[Any] | None = None, *, total: int | None = None, **options: Any) -> Any:
    """A tqdm over `items`, or one to be updated by hand; slow where stderr is no terminal."""
    from tqdm import tqdm

    pause_s = WATCHED_S if sys.stderr.isatty() else UNWATCHED_S
    return tqdm(items, desc=text, unit=unit, total=total, file=sys.stderr, mininterval=pause_s, **options)


def say(line: str) -> None:
    """A line of progress on stderr, above whatever bar is shown."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)
