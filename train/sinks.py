"""Where a run's numbers go beside metrics.jsonl: TensorBoard, wandb, trackio.

metrics.jsonl stays the truth. A sink lives in the launcher, in a thread of its own behind a bounded queue: a slow or
broken one stops neither the trainers nor the run, it loses lines, which are counted. Imports no torch, and a sink's
package only once it is used.
"""

import importlib
import json
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from .. import UserError
from ..progress import say
from ..store.files import publish

SINKS_NAME, TENSORBOARD_NAME = "sinks.json", "tensorboard"
MOST_WAITING = 1000  # lines that a sink may be behind
CLOSE_S = 30.0  # for a sink to send what it still has
HURRIED_S = 5.0  # the same where the command ends by an error or a signal
PROJECT = "dflash"


class Sink(Protocol):
    """Takes numbers under names like train/loss; may raise anything, at any time."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RunName:
    """What a sink is told of the run: its folder, the step that it starts or goes on from, its resolved config."""

    run_dir: Path
    step: int
    is_resumed: bool
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name


class TensorBoard:
    """Event files in RUN/tensorboard; after a resume what lies behind its step is purged from view."""

    def __init__(self, run: RunName) -> None:
        protos = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        writers = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self.event, self.summary = protos.Event, summaries.Summary
        self.writer = writers.EventFileWriter(str(run.run_dir / TENSORBOARD_NAME), flush_secs=10)
        if run.is_resumed:
            started = protos.SessionLog(status=protos.SessionLog.START)
            self.writer.add_event(self.event(wall_time=time.time(), step=run.step + 1, session_log=started))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [self.summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self.writer.add_event(self.event(wall_time=time.time(), step=step, summary=self.summary(value=values)))

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A run of wandb, which a resume goes on with; its id is kept in RUN."""

    def __init__(self, run: RunName) -> None:
        wandb: Any = importlib.import_module("wandb")
        self.run = wandb.init(
            project=PROJECT,
            name=run.name,
            id=known_id(run.run_dir, "wandb"),
            resume="allow",
            dir=str(run.run_dir),
            config=dict(run.config),
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log({**numbers, "step": step})

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """A run of trackio, which a resume goes on with under the same name."""

    def __init__(self, run: RunName) -> None:
        self.trackio: Any = importlib.import_module("trackio")
        name = f"{run.name}-{known_id(run.run_dir, 'trackio')}"
        self.trackio.init(project=PROJECT, name=name, config=dict(run.config), resume="allow")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.trackio.log(dict(numbers), step=step)

    def close(self) -> None:
        self.trackio.finish()


KINDS: dict[str, Callable[[RunName], Sink]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


def require_packages(names: Sequence[str]) -> None:
    """Raises UserError for a sink whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise UserError(
                f"sinks names {name!r}, and the package {name} is not installed",
                "a package for each sink; metrics.jsonl needs none",
                f"pip install {name}, or drop it from sinks",
            )


def known_id(run_dir: Path, name: str) -> str:
    """The id of this run in a sink: the one in RUN/sinks.json, else a new one that is kept there."""
    path = run_dir / SINKS_NAME
    ids: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if name not in ids:
        ids[name] = secrets.token_hex(4)
        publish(path, (json.dumps(ids, indent=1) + "\n").encode())
    return ids[name]


def plain_numbers(kind: str, line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line under tags like train/loss; those of one origin under that origin. None and text stay."""
    where = f"{kind}/{line['origin']}" if kind not in ("train", "exam") and "origin" in line else kind
    is_number = {name: isinstance(value, (int, float)) for name, value in line.items()}
    return {f"{where}/{name}": float(line[name]) for name, ok in is_number.items() if ok and name != "step"}


class SinkThread:
    """One sink and its thread. It is opened there, too: a network may keep it waiting."""

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self.name, self.make = name, make
        self.lines: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(MOST_WAITING)
        self.num_sent = self.num_lost = 0
        self.is_broken = False
        self.thread = threading.Thread(target=self.work, name=f"sink {name}", daemon=True)
        self.thread.start()

    def send(self, step: int, numbers: dict[str, float]) -> None:
        """Hands over a line; never waits."""
        self.num_sent += 1
        try:
            self.lines.put_nowait((step, numbers))
        except queue.Full:
            self.lose(f"it is {MOST_WAITING} lines behind")

    def work(self) -> None:
        sink = self.attempt(self.make, 0)
        while (line := self.lines.get()) is not None:
            if sink is None:
                self.num_lost += 1
            else:
                self.attempt(partial(sink.write, *line), 1)
        if sink is not None:
            self.attempt(sink.close, 0)

    def attempt(self, run: Callable[[], Any], num_lines: int) -> Any:
        """What it gives back; None where the sink failed, and so many lines are lost."""
        try:
            return run()
        except BaseException as error:  # a library may call sys.exit
            self.lose(f"{type(error).__name__}: {error}".splitlines()[0], num_lines)
            return None

    def lose(self, why: str, count: int = 1) -> None:
        self.num_lost += count
        if not self.is_broken:
            self.is_broken = True
            say(f"sink {self.name} failed ({why}); the run goes on, metrics.jsonl holds every number")

    def close(self, limit_s: float) -> None:
        """Sends what is left, for so long at most, and says what was lost."""
        limit = time.monotonic() + limit_s
        with suppress(queue.Full):
            self.lines.put(None, timeout=limit_s)
            self.thread.join(max(0.0, limit - time.monotonic()))
        if self.thread.is_alive():
            self.lose(f"it did not end within {limit_s:g} s", self.lines.qsize())
        if self.is_broken:
            say(f"sink {self.name} lost {self.num_lost} of {self.num_sent} lines")


class Sinks:
    """All sinks of a run: opened once the trainer says where it starts, closed with the launcher."""

    def __init__(self, names: Sequence[str], run_dir: Path, config: Mapping[str, Any]) -> None:
        """Raises UserError where a package is missing."""
        require_packages(names)
        self.names, self.run_dir, self.config = names, run_dir, config
        self.threads: list[SinkThread] = []

    def open(self, step: int, is_resumed: bool) -> None:
        run = RunName(self.run_dir, step, is_resumed, self.config)
        self.threads = [SinkThread(name, lambda kind=KINDS[name]: kind(run)) for name in self.names]

    def write(self, kind: str, line: Mapping[str, Any]) -> None:
        """A line as metrics.jsonl has it, with its step."""
        for thread in self.threads:
            thread.send(line["step"], plain_numbers(kind, line))

    def close(self, limit_s: float) -> None:
        """Ends every sink, each within so many seconds."""
        for thread in self.threads:
            thread.close(limit_s)
        self.threads = []
