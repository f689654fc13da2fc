"""What the children of test_pool.py run; a module of its own, because children import it."""

import os
import signal
import time
from pathlib import Path

from dflash_offline import UserError
from dflash_offline.train.sweep.pool import run_pool
from dflash_offline.watch import Channel, Job


def work(channel: Channel, place: str) -> None:
    """Notes when it begins and ends."""
    channel.tell(("begins", place))
    time.sleep(0.05)
    channel.tell(("ends", place))


def refuse(channel: Channel) -> None:
    raise UserError("the disk is full", "1 GB", "free some")


def die(channel: Channel) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(channel: Channel) -> None:
    channel.tell("hangs")
    signal.pause()


def leave(channel: Channel, path: str) -> None:
    """Beats until SIGTERM, then ends by itself and says so in a file."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: signals.append(number))
    Path(path).with_suffix(".pid").write_text(str(os.getpid()))
    while not signals:
        channel.beat()
        time.sleep(0.01)
    Path(path).write_text("left")


class Jobs:
    """Work that hands out jobs in order and writes down what it hears."""

    def __init__(self, *jobs: Job) -> None:
        self.waiting = list(jobs)
        self.heard: list[tuple[str, object]] = []
        self.ends: dict[str, Exception | None] = {}
        self.devices: dict[str, str] = {}

    def next_job(self, device: str) -> Job | None:
        if not self.waiting:
            return None
        job = self.waiting.pop(0)
        self.devices[job.name] = device
        return job

    def hear(self, name: str, message: object) -> None:
        self.heard.append((name, message))

    def ended(self, name: str, error: Exception | None) -> None:
        self.ends[name] = error

    def tick(self) -> None:
        pass


def launch(folder: str) -> None:
    """Two children that end at SIGTERM, for a test that ends this process."""
    jobs = [Job(name, leave, (f"{folder}/{name}",)) for name in ("one", "two")]
    run_pool(Jobs(*jobs), ["a", "b"], stall_s=300.0, leave_s=200.0)
