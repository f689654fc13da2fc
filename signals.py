"""Signals that end a process in order: heard between two pieces of work, as exceptions. A leaf, like `watch`."""

import contextlib
import signal
from collections.abc import Iterator

HEARD = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class _Held:
    """A signal that came while a message was handled; it is heard behind the message."""

    is_handling = False
    number: int | None = None


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """Inside, no signal cuts the work in half: what handles a message would be left half changed.

    An error of the body is raised as it is; a signal that came meanwhile asks for no more than it does.
    """
    _Held.is_handling = True
    try:
        yield
    finally:
        _Held.is_handling = False
        number, _Held.number = _Held.number, None
    if number is not None:
        _leave(number, None)


def _leave(number: int, _frame: object) -> None:
    if _Held.is_handling:
        _Held.number = number
    elif number == signal.SIGINT:
        raise KeyboardInterrupt
    else:
        raise SystemExit(128 + number)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP become SystemExit here, SIGINT KeyboardInterrupt, so that `finally` runs.

    A SIGHUP that is ignored stays ignored: that is how `nohup` lets a command outlive its terminal.
    """
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    heard = [number for number in HEARD if number != signal.SIGHUP or not is_nohup]
    before = {number: signal.signal(number, _leave) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
