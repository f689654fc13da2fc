"""What the children of test_watch.py run; a module of its own, because children import it."""

import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

from dflash_offline import UserError
from dflash_offline.watch import Channel, Job, PeerLost, Stalled, run_all


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def count(channel: Channel, number: int) -> None:
    """Tells 0..number-1, then asks for the sum."""
    for i in range(number):
        channel.tell(i)
    reply = channel.ask(("sum", number), limit_s=30.0)
    assert reply == sum(range(number)), reply


def work_for_ever(channel: Channel) -> None:
    channel.tell(os.getpid())
    while True:
        channel.beat()
        time.sleep(0.05)


def hang(channel: Channel) -> None:
    channel.tell(os.getpid())
    signal.pause()


def refuse(channel: Channel) -> None:
    raise UserError("the disk is full", "1 GB", "free some")


def fail_oddly(channel: Channel) -> None:
    raise Unpicklable(3, 4)


def kill_itself(channel: Channel) -> None:
    channel.tell("last words")
    os.kill(os.getpid(), signal.SIGKILL)


def leave_early(channel: Channel) -> None:
    sys.exit(7)


def leave_a_grandchild(channel: Channel) -> None:
    """Starts a process that would live for minutes, tells its id and ends well."""
    channel.tell(subprocess.Popen(["sleep", "300"]).pid)


def ask_in_vain(channel: Channel) -> None:
    channel.tell(os.getpid())
    channel.ask("slow", limit_s=0.2)


def double(channel: Channel) -> None:
    """Tells twice each number it receives, until None."""
    while (number := channel.receive(30.0)) is not None:
        assert isinstance(number, int)
        channel.tell(2 * number)


def receive_in_vain(channel: Channel) -> None:
    channel.receive(0.2)


def launch(pids_path: str) -> None:
    """A launcher of two children that work for ever; their ids go to a file."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it ignored
    pids: list[object] = []

    def note(_name: str, pid: object) -> None:
        pids.append(pid)
        if len(pids) == 2:
            Path(pids_path).write_text(" ".join(map(str, pids)))

    run_all([Job("one", work_for_ever), Job("two", hang)], stall_s=60.0, on_message=note)


def wait_for_others(channel: Channel) -> None:
    """Waits silently, as one that another child keeps waiting."""
    channel.tell(os.getpid())
    with channel.waiting("the sum of all"):
        time.sleep(60.0)


def be_stopped(channel: Channel) -> None:
    """Is stopped by a signal while it waits for the others."""
    with channel.waiting("the sum of all"):
        os.kill(os.getpid(), signal.SIGSTOP)


def work_then_end(channel: Channel, seconds: float) -> None:
    """Is busy, says so, and ends; its sibling then waits for nobody."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        channel.beat()
        time.sleep(0.05)
    raise UserError("worked to the end", "this", "nothing")


def stop_itself(channel: Channel) -> None:
    channel.tell(os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)


def lose(channel: Channel) -> None:
    """Has noticed that its sibling is gone."""
    raise PeerLost("lost the other one")


def die_later(channel: Channel) -> None:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def leave_when_told(channel: Channel, folder: str, name: str) -> None:
    """Ends by itself a moment after SIGTERM, and says where it was; `name` tells apart the files."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: told.append(number))
    channel.tell(name)
    while not told:
        channel.beat()
        time.sleep(0.02)
    time.sleep(0.2)
    Path(folder, name).touch()


def die_while_speaking(channel: Channel) -> None:
    """Is killed in the middle of a message, as by the system that is out of memory."""
    os.write(channel._connection.fileno(), struct.pack("!i", 1000) + b"the first bytes")
    os.kill(os.getpid(), signal.SIGKILL)


def hang_up_on_parent(channel: Channel) -> None:
    """Answers SIGTERM by the same to its parent, then ends."""

    def answer(number: int, _frame: object) -> None:
        os.kill(os.getppid(), number)
        os._exit(0)

    signal.signal(signal.SIGTERM, answer)
    channel.tell(os.getpid())
    while True:
        channel.beat()
        time.sleep(0.02)


def refuse_when_told(channel: Channel) -> None:
    """Asks until it is told yes, then fails."""
    while not channel.ask("now?", 60.0):
        time.sleep(0.02)
    refuse(channel)


def say_something(channel: Channel) -> None:
    print("said, and held back by Python until the process ends")


def hang_silently(code: str) -> None:
    """A launcher whose child hangs; ends with this code when that is noticed."""
    try:
        run_all([Job("quiet", hang)], stall_s=1.0, on_message=lambda _name, _word: None)
    except Stalled:
        os._exit(int(code))


def outlive_terminal() -> None:
    """A launcher under `nohup`, whose terminal closes while a child is at work."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def hang_up(_name: str, _word: object) -> object:
        os.kill(os.getpid(), signal.SIGHUP)
        return 0

    run_all([Job("one", count, (1,))], stall_s=60.0, on_message=hang_up)
