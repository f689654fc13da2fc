"""Watched child processes: started together, listened to, stopped together.

A leaf: it knows processes, pipes and silence, and nothing of this project. Each child is a
fresh interpreter (never a fork), in a process group of its own, and dies with its parent by
`PR_SET_PDEATHSIG`, so a killed parent leaves nothing behind. A child speaks through its
`Channel` (its side is `channel`). Linux only (pidfd, prctl).
"""

import contextlib
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe, wait
from typing import Any

from .channel import BEAT_S, Channel, PeerLost, Stalled, live
from .signals import HEARD, signals_raise, unbroken

__all__ = [
    "BEAT_S",
    "Channel",
    "Child",
    "ChildDied",
    "Job",
    "PeerLost",
    "Stalled",
    "run_all",
    "signals_raise",
    "stop_all",
]

GRACE_S = 5.0  # between SIGTERM and SIGKILL
KILL_S = 30.0  # for the system to end a process after SIGKILL
STACKS_S = 0.5  # a child's time to write its stacks
LOST_S = 5.0  # after a child lost another one: time to hear from that one, or from the system, what happened
BOOTSTRAP = (
    "import sys; from multiprocessing.connection import Connection; c = Connection(int(sys.argv[1])); "
    f"sys.path[:] = c.recv(); from {live.__module__} import live; live(c, int(sys.argv[2]), sys.argv[3])"
)

OnMessage = Callable[[str, object], object]


class ChildDied(Exception):
    """A child ended without saying why: its name and exit code, negative for a signal."""

    def __init__(self, name: str, exit_code: int) -> None:
        super().__init__(name, exit_code)
        self.name = name
        self.exit_code = exit_code

    def __str__(self) -> str:
        if self.exit_code >= 0:
            return f"{self.name} ended with exit code {self.exit_code} before its work was done"
        cause = " (out of memory, or killed by hand)" if self.exit_code == -signal.SIGKILL else ""
        return f"{self.name} was killed by {signal.Signals(-self.exit_code).name}{cause}"


@dataclass(frozen=True, slots=True)
class Job:
    """What one child runs: `function(channel, *args)`, all of it picklable, by its import path."""

    name: str
    function: Callable[..., None]
    args: tuple[Any, ...] = field(default=())


def run_all(jobs: Iterable[Job], *, stall_s: float, on_message: OnMessage, leave_s: float = 0.0) -> None:
    """Runs every job in a process of its own and comes back when all of them ended well.

    `on_message(name, message)` is called here for whatever a child tells or asks; what it
    gives back answers an `ask`. An exception in a child is raised here with the child's name
    in a note; a death without one raises ChildDied; silence of one child for more than
    `stall_s` seconds dumps the stacks of all to stderr and raises Stalled; a child that waits for
    others counts only where none of them is at work. However this ends
    (Ctrl-C, SIGTERM and SIGHUP too), no child lives on; after one of these three children that
    handle SIGTERM have `leave_s` seconds to end by themselves. Call it from the main thread: the
    children die with the thread that started them.
    """
    children: list[Child] = []
    with signals_raise():
        try:
            for job in jobs:
                children.append(Child(job))
            _listen(children, stall_s, on_message)
        except (KeyboardInterrupt, SystemExit):
            if leave_s:
                _let_leave([child for child in children if not child.has_ended], leave_s, on_message)
            raise
        finally:
            stop_all([child for child in children if not child.has_ended])


class Child:
    """The parent's end of one child, for a parent that goes on working beside it.

    It lives until `end`, or until `listen` finds it dead; whoever makes one sees to that.
    """

    def __init__(self, job: Job) -> None:
        self.name = job.name
        self.is_done = False
        self.is_open = True
        self.has_ended = False
        self.waits_for: str | None = None
        self.last_heard_s = time.monotonic()
        work = pickle.dumps((job.function, job.args))
        self.connection, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-c", BOOTSTRAP, str(theirs.fileno()), str(os.getpid()), job.name]
            self.process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, process_group=0
            )
        self.pidfd = os.pidfd_open(self.process.pid)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead already: its pidfd says so
            self.connection.send(sys.path)
            self.connection.send_bytes(work)

    def tell(self, message: object) -> None:
        """Sends what the child's `Channel.receive` waits for."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: `listen` says so
            self.connection.send(message)

    def listen(self, on_message: OnMessage, limit_s: float) -> None:
        """Waits at most `limit_s` for the child to speak or die, and handles what there is.

        Collects it when it is dead. Raises what the child raised, and ChildDied where it ended before it was done.
        """
        ready = wait([self.pidfd, self.connection] if self.is_open else [self.pidfd], limit_s)
        while self.hear(on_message):
            pass
        if self.pidfd in ready:
            self.end()
            if not self.is_done or self.process.returncode != 0:
                raise ChildDied(self.name, self.process.returncode)

    def hear(self, on_message: OnMessage) -> bool:
        """Handles one waiting message, if there is one; raises what the child raised."""
        try:
            if not (self.is_open and self.connection.poll()):
                return False
            kind, message = self.connection.recv()
        except (EOFError, OSError):  # also a death in the middle of a message
            self.is_open = False
            return False
        self.last_heard_s = time.monotonic()
        self.waits_for = message if kind == "waits" else None
        if kind == "tell":
            with unbroken():
                on_message(self.name, message)
        elif kind == "ask":
            with unbroken():
                self.tell(on_message(self.name, message))
        elif kind == "error":
            pickled, text = message
            error = pickle.loads(pickled)
            error.add_note(f"raised in {self.name}:\n{text}")
            raise error
        elif kind == "done":
            self.is_done = True
        return True

    def is_silent(self, stall_s: float) -> bool:
        """Nothing was heard for longer than `stall_s`, and nothing waits to be heard."""
        return time.monotonic() - self.last_heard_s > stall_s and not (self.is_open and self.connection.poll())

    def is_stopped(self) -> bool:
        """True where a signal holds the process, as SIGSTOP does."""
        with contextlib.suppress(OSError), open(f"/proc/{self.process.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
        return False

    def described(self) -> str:
        """Its name, with what its silence may come from."""
        facts = [] if self.waits_for is None else [f"waits for the others: {self.waits_for}"]
        facts += ["stopped by a signal"] if self.is_stopped() else []
        return f"{self.name} ({', '.join(facts)})" if facts else self.name

    def dump_stacks(self) -> None:
        """The child writes the stacks of its threads to stderr."""
        with contextlib.suppress(OSError):  # a stderr that takes nothing hides no stall
            print(f"--- stacks of {self.name} (pid {self.process.pid})", file=sys.stderr, flush=True)
        self.process.send_signal(signal.SIGUSR1)
        wait([self.pidfd], STACKS_S)

    def signal_group(self, number: signal.Signals) -> None:
        """Signals the child and whatever it started; only before `end`, while its id is its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Kills the child and what it may have started, and collects it.

        One that a dead disk holds inside the system dies when that answers; it is said, and not waited for.
        """
        self.signal_group(signal.SIGKILL)
        try:
            self.process.wait(timeout=KILL_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                text = f"{self.name} (pid {self.process.pid}) was killed and has not ended after {KILL_S:g} s"
                print(f"{text}: it waits inside the system, perhaps for a disk", file=sys.stderr, flush=True)
        os.close(self.pidfd)
        self.connection.close()
        self.has_ended = True


def _listen(children: list[Child], stall_s: float, on_message: OnMessage, until_s: float = math.inf) -> None:
    """Passes messages on until every child has ended well, or until a point in time."""
    living, lost = list(children), []
    while living and time.monotonic() < until_s:
        limit = min(_silence_began(living) + stall_s, until_s)
        handles: list[Any] = [child.pidfd for child in living]
        handles += [child.connection for child in living if child.is_open]
        ready = wait(handles, max(0.0, limit - time.monotonic()))
        for child in list(living):
            try:
                if child.pidfd in ready:
                    child.listen(on_message, 0.0)
                    living.remove(child)
                elif child.connection in ready:
                    child.hear(on_message)
            except PeerLost as error:
                lost.append(error)
                living.remove(child)
                until_s = min(until_s, time.monotonic() + LOST_S)
        if not lost:
            _require_sound(living, stall_s)
    if lost:
        raise lost[0]


def _silence_began(living: list[Child]) -> float:
    """Since when nothing moves: the oldest word of those at work or, where all wait for one another, the newest."""
    at_work = [child.last_heard_s for child in living if child.waits_for is None]
    return min(at_work) if at_work else max(child.last_heard_s for child in living)


def _require_sound(living: list[Child], stall_s: float) -> None:
    """Raises Stalled, after every stack was written, naming the children whose silence it is, the oldest first.

    Where some child is stopped by a signal, it is the silence of the stopped ones alone.
    """
    at_work = [child for child in living if child.waits_for is None]
    silent = [child for child in at_work or living if child.is_silent(stall_s)]
    if not silent or (not at_work and len(silent) < len(living)):
        return
    for child in living:
        child.dump_stacks()
    culprits = [child for child in living if child.is_stopped()] or silent
    names = ", ".join(child.described() for child in sorted(culprits, key=lambda child: child.last_heard_s))
    raise Stalled("the launcher", f"a sign of life from {names}", stall_s)


def _let_leave(living: list[Child], leave_s: float, on_message: OnMessage) -> None:
    """Asks each child to end by itself and listens meanwhile; one without a handler is killed by that."""
    for child in living:
        child.process.send_signal(signal.SIGTERM)
    try:
        _listen(living, leave_s, on_message, time.monotonic() + leave_s)
    except Stalled:
        return
    except ChildDied as error:
        if error.exit_code != -signal.SIGTERM:
            raise


def stop_all(children: list[Child]) -> None:
    """Ends all of them, politely first; no signal to us is heard meanwhile, so that none is left behind."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in HEARD}
    try:
        for child in children:
            child.signal_group(signal.SIGTERM)
        limit = time.monotonic() + GRACE_S
        for child in children:
            wait([child.pidfd], max(0.0, limit - time.monotonic()))
            child.end()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
