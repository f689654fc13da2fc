"""Progress bars on stderr. A leaf: knows tqdm and whether a person is watching."""

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

WATCHED_S, UNWATCHED_S = 0.5, 10.0  # between two updates on a terminal, and into a file


class Stderr:
    """stderr, whose errors end no work and hide no other error: a log on the disk that is full, a reader that left."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


STDERR = Stderr()  # one for all: tqdm.write looks for the bars on the same file


def bar(text: str, unit: str, items: Iterable[Any] | None = None, *, total: int | None = None, **options: Any) -> Any:
    """A tqdm over `items`, or one to be updated by hand; slow where stderr is no terminal."""
    from tqdm import tqdm

    pause_s = WATCHED_S if sys.stderr.isatty() else UNWATCHED_S
    return tqdm(items, desc=text, unit=unit, total=total, file=STDERR, mininterval=pause_s, **options)


def say(line: str) -> None:
    """A line of progress on stderr, above whatever bar is shown."""
    from tqdm import tqdm

    tqdm.write(line, file=STDERR)
