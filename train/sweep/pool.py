"""Child processes on devices, one on each at a time: started, listened to, ended; one that fails ends no other.

Knows processes and devices, not what they do; `Work` says what comes next and hears how it ended.
"""

import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any, Protocol

from ...watch import Child, Job, Stalled, signals_raise, stop_all

TICK_S = 0.5  # between two looks at what nobody announces: silence, the clock of a table


class Work(Protocol):
    """What is done on the devices."""

    def next_job(self, device: str) -> Job | None:
        """What runs there next; None where nothing can, for now."""
        ...

    def hear(self, name: str, message: Any) -> None:
        """A message of the job of that name."""
        ...

    def ended(self, name: str, error: Exception | None) -> None:
        """The job has ended: well, or with what it raised; ChildDied and Stalled say that it did not end by itself."""
        ...

    def tick(self) -> None:
        """Called a few times a second."""
        ...


def run_pool(work: Work, devices: Sequence[str], *, stall_s: float, leave_s: float) -> None:
    """Runs jobs until none is left and none can come.

    A child that is silent for `stall_s` seconds is ended, after its stacks were written. Ctrl-C, SIGTERM and SIGHUP
    end all of them, children that handle SIGTERM within `leave_s` by themselves, and are raised as in `run_all`;
    SIGKILL takes the children along. Call it from the main thread.
    """
    children: list[Child | None] = [None] * len(devices)
    with signals_raise():
        try:
            while start_all(children, devices, work):
                listen(children, work, stall_s)
                work.tick()
        except (KeyboardInterrupt, SystemExit):
            let_leave(children, work, leave_s)
            raise
        finally:
            stop_all(living(children))


def living(children: Sequence[Child | None]) -> list[Child]:
    return [child for child in children if child is not None and not child.has_ended]


def start_all(children: list[Child | None], devices: Sequence[str], work: Work) -> bool:
    """Starts what can be started on free devices; whether anything runs."""
    for slot, device in enumerate(devices):
        if children[slot] is None and (job := work.next_job(device)) is not None:
            children[slot] = Child(job)
    return bool(living(children))


def listen(children: list[Child | None], work: Work, stall_s: float) -> None:
    """Waits a moment for any child, passes on what was said, and clears the places of those that have ended."""
    alive = living(children)
    wait([handle for c in alive for handle in ([c.pidfd, c.connection] if c.is_open else [c.pidfd])], TICK_S)
    for slot, child in enumerate(children):
        if child is None:
            continue
        is_over, error = heard(child, work, stall_s)
        if is_over:
            children[slot] = None
            work.ended(child.name, error)


def heard(child: Child, work: Work, stall_s: float) -> tuple[bool, Exception | None]:
    """Takes what a child has to say: whether it is over, and with what error."""
    said: list[Any] = []
    error: Exception | None = None
    try:
        child.listen(lambda _name, message: said.append(message), 0.0)
    except Exception as raised:  # whatever a child raises is this child's end alone
        error = raised
    for message in said:
        work.hear(child.name, message)
    if error is None and not child.has_ended and child.is_silent(stall_s):
        child.dump_stacks()
        error = Stalled("the sweep", f"a sign of life from {child.described()}", stall_s)
    if error is not None and not child.has_ended:
        child.end()
    return child.has_ended, error


def let_leave(children: list[Child | None], work: Work, leave_s: float) -> None:
    """Asks every child to end by itself, and hears how it does."""
    for child in living(children):
        child.process.send_signal(signal.SIGTERM)
    end = time.monotonic() + leave_s
    while living(children) and time.monotonic() < end:
        listen(children, work, leave_s)
        work.tick()
