"""Checkpoints written while training goes on: copied to host memory first, then written by one thread.

One is under way at a time; the next waits for it. Knows when a checkpoint is written, not what is in it.
"""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..watch import BEAT_S, Stalled
from . import checkpoint
from .checkpoint import LoopState


class CheckpointWriter:
    """Writes the checkpoints of a run beside its loop; `beat` is called while it makes the loop wait.

    A write that fails raises in the loop: at the next `check`, `write` or `wait`. At the end of the block a write under
    way is finished, whatever ended the block, within `stall_s` seconds since it began.
    """

    def __init__(self, run_dir: Path, *, keep: int, stall_s: float, beat: Callable[[], None]) -> None:
        self.run_dir, self.keep, self.stall_s, self.beat = run_dir, keep, stall_s, beat
        self.under_way: Write | None = None

    def write(self, state: LoopState, weights: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any]) -> None:
        """Copies everything and begins to write it. Raises what the write before failed with."""
        self.wait()
        copies = on_host(weights), on_host(optimizer)

        def work() -> None:
            checkpoint.save(self.run_dir, state, *copies)
            checkpoint.prune(self.run_dir, self.keep, state.best_step)

        self.under_way = Write(state.step, work)

    def check(self) -> None:
        """Raises what a write failed with, if one did; waits for nothing."""
        if self.under_way is not None and not self.under_way.thread.is_alive():
            done, self.under_way = self.under_way, None
            if done.error is not None:
                raise done.error

    def wait(self) -> None:
        """Until nothing is under way. Raises what a write failed with, and Stalled after `stall_s` seconds."""
        began = time.monotonic()
        while self.under_way is not None:
            if time.monotonic() - began > self.stall_s:
                raise Stalled("the trainer", f"checkpoint {self.under_way.step} to be written", self.stall_s)
            self.beat()
            self.under_way.thread.join(BEAT_S)
            self.check()

    def let_finish(self) -> None:
        """Gives a write under way the rest of its time, and raises nothing: what ended the block is the news."""
        while self.under_way is not None and self.under_way.has_time(self.stall_s):
            self.beat()  # silence would be taken for the fault
            self.under_way.thread.join(BEAT_S)

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        else:
            self.let_finish()


class Write:
    """One checkpoint under way, in a thread that dies with the process."""

    def __init__(self, step: int, work: Callable[[], None]) -> None:
        self.step, self.work = step, work
        self.began = time.monotonic()
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self.run, name=f"checkpoint {step}", daemon=True)
        self.thread.start()

    def run(self) -> None:
        try:
            self.work()
        except Exception as error:
            self.error = error

    def has_time(self, stall_s: float) -> bool:
        """It is at work, and not for longer than that."""
        return self.thread.is_alive() and time.monotonic() - self.began <= stall_s


def on_host(value: Any) -> Any:
    """Nested dicts, lists and tuples with a copy of every tensor in host memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: on_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(on_host(item) for item in value)
    return value
