"""A watched child's side: what it says to its parent, and its whole life from the bootstrap to its last word.

A leaf, like `watch`, which is the parent's side and what everybody imports. Heartbeats come from the working code
itself, never from a thread beside it, so that a hang is heard as silence. Linux only (prctl).
"""

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # linux/prctl.h
BEAT_S = 1.0  # beats closer together than this are not sent


class Stalled(Exception):
    """Nothing came for too long: who waited, for what, how long (exit code 3)."""

    def __init__(self, who: str, what: str, waited_s: float) -> None:
        super().__init__(who, what, waited_s)

    def __str__(self) -> str:
        who, what, waited_s = self.args
        return f"{who} waited for {what} for {waited_s:.1f} s"


class PeerLost(Exception):
    """Another process that this one works with is gone; whoever watches both hears the reason from the other."""


class Channel:
    """A child's end: messages to the parent; every one of them is also a heartbeat."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.name = name
        self._connection = connection
        self._last_s = -BEAT_S

    def tell(self, message: object) -> None:
        self._send("tell", message)

    def beat(self) -> None:
        """Says that work goes on; cheap enough for every batch (sent once a second at most)."""
        if time.monotonic() - self._last_s >= BEAT_S:
            self._send("beat", None)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Says that this child waits for its siblings: while one of them is at work, its silence is theirs."""
        self._send("waits", what)
        yield
        self._send("beat", None)

    def ask(self, message: object, limit_s: float) -> object:
        """The parent's reply; raises Stalled when none came within `limit_s` seconds."""
        self._send("ask", message)
        if not self._connection.poll(limit_s):
            raise Stalled(self.name, f"a reply of its parent to {message!r}", limit_s)
        return self._connection.recv()

    def receive(self, limit_s: float) -> object:
        """What the parent tells; raises Stalled when nothing came within `limit_s` seconds."""
        if not self._connection.poll(limit_s):
            raise Stalled(self.name, "a message of its parent", limit_s)
        return self._connection.recv()

    def _send(self, kind: str, message: object) -> None:
        self._connection.send((kind, message))
        self._last_s = time.monotonic()


def die_with_parent(parent: int) -> None:
    """This process is killed when its parent `parent` dies, or at once if that has happened."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def live(connection: Connection, parent: int, name: str) -> None:
    """A child's whole life, from the bootstrap command to its last word."""
    die_with_parent(parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and stops us
    os.set_inheritable(connection.fileno(), False)
    try:
        function, args = pickle.loads(connection.recv_bytes())
        function(Channel(connection, name), *args)
    except Exception as error:
        _end_here(connection, ("error", (_portable(error), traceback.format_exc())), 1)
    _end_here(connection, ("done", None), 0)


def _end_here(connection: Connection, last_word: object, code: int) -> NoReturn:
    """Says it and ends without the libraries' teardown, in which threads of torch.distributed can abort.

    A parent that is gone hears nothing: it was killed, and so are we in a moment.
    """
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.send(last_word)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # one that takes nothing changes no exit code
            stream.flush()
    os._exit(code)


def _portable(error: Exception) -> bytes:
    """The exception pickled; one that cannot travel becomes a RuntimeError with its text."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data
