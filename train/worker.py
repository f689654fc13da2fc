"""The launcher of a training: starts the trainer, watches it, shows its progress, says how it ended.

Imports no torch, so that this process stays small.
"""

import os
from pathlib import Path
from typing import Any

from ..progress import bar, say
from ..watch import Channel, Job, run_all
from .config import TrainConfig
from .facts import KERNELS_NAME
from .outcome import TrainReport, read_report

NAME = "trainer"


def train(config: TrainConfig) -> TrainReport:
    """Trains the run that `config` names: a new one, or the rest of one that was stopped.

    The same command on a finished run changes nothing. Raises UserError for what a user can mend,
    ChildDied where a process was killed, Stalled where nothing moved for `stall_s` seconds.
    """
    with Progress() as progress:
        run_all([Job(NAME, train_here, (config,))], stall_s=config.stall_s, on_message=progress.hear)
    return read_report(Path(config.out), progress.start, progress.start_step)


def train_here(channel: Channel, config: TrainConfig) -> None:
    """The trainer process. Compiled kernels live in RUN, so that a restart runs the very same ones."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(config.out).absolute() / KERNELS_NAME)
    from .loop import run_trainer  # after that line: torch._inductor settles the folder as soon as it is imported

    run_trainer(channel, config)


class Progress:
    """One bar on stderr: loss, acceptance length of the last exam, rate, and share of time spent waiting for data.

    Rate and share are means since this process began.
    """

    def __init__(self) -> None:
        self.start, self.start_step = "new", 0
        self.bar: Any = None
        self.acceptance: float | None = None
        self.step_s = self.wait_s = self.block_tokens = 0.0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def hear(self, _name: str, message: Any) -> None:
        """Takes one message of the trainer: its kind and its numbers."""
        kind, numbers = message
        if kind == "finished":
            self.start = "finished"
        elif kind == "start":
            self.begin(**numbers)
        elif kind == "train":
            self.advance(numbers)
        elif kind == "exam":
            self.note_exam(numbers)

    def begin(self, step: int, steps: int, is_resumed: bool, notes: list[str]) -> None:
        """The trainer is ready to run from `step` to `steps`; `notes` say what was chosen for it."""
        for note in notes:
            say(note)
        self.start, self.start_step = ("resumed", step) if is_resumed else ("new", 0)
        self.bar = bar(NAME, "step", total=steps, initial=step, dynamic_ncols=True)

    def advance(self, numbers: dict[str, Any]) -> None:
        """One update."""
        self.step_s += numbers["step_s"]
        self.wait_s += numbers["wait_s"]
        self.block_tokens += numbers["rate_block_tok_s"] * numbers["step_s"]
        acceptance = "-" if self.acceptance is None else f"{self.acceptance:.2f}"
        self.bar.set_postfix_str(
            f"loss {numbers['loss']:.3f}, acceptance {acceptance}, {self.block_tokens / self.step_s:,.0f} block tok/s, "
            f"data wait {100 * self.wait_s / self.step_s:.0f} %",
            refresh=False,
        )
        self.bar.update(numbers["step"] - self.bar.n)

    def note_exam(self, numbers: dict[str, Any]) -> None:
        """One exam."""
        self.acceptance = numbers["acceptance_length"]
        measured = "nothing to measure" if self.acceptance is None else f"acceptance length {self.acceptance:.3f}"
        say(f"step {numbers['step']}: {measured} ({numbers['num_prompts']} held-out answers)")
