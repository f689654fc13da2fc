"""The launcher of a training: starts the trainer, watches it, shows its progress, says how it ended.

Imports no torch, so that this process stays small.
"""

import os
import signal
from pathlib import Path
from typing import Any

from ..progress import bar, say
from ..settings_text import as_dict
from ..watch import Channel, Job, run_all
from .config import TrainConfig
from .facts import FACTS_NAME, KERNELS_NAME, StorePart, read_facts
from .metrics import EXAM, ORIGIN, TRAIN
from .outcome import TrainReport, read_report
from .rank import Rank, ranks_here
from .sinks import CLOSE_S, HURRIED_S, Sinks
from .status_line import StatusLine

NAME = "trainer"
LEAVE_S = 60.0  # for the checkpoint after SIGTERM


def train(config: TrainConfig) -> TrainReport | None:
    """Trains the run that `config` names: a new one, or the rest of one that was stopped.

    The same command on a finished run changes nothing. None where another command, that of rank 0, has the report, and
    where the run stands at `stop_at`.
    Raises UserError for what a user can mend, ChildDied where a process was killed, PeerLost where one of another
    command is gone, Stalled where nothing moved for `stall_s` seconds, SystemExit(143) after SIGTERM to a trainer.
    """
    ranks = ranks_here(config.devices, num_cuda_devices(config), known_rows(config), os.environ)
    jobs = [Job(rank.name, train_here, (config, rank)) for rank in ranks]
    sinks = Sinks(config.sinks, Path(config.out), as_dict(config))
    with Progress(StatusLine(noise=config.noise, slots=config.loader_slots), sinks) as progress:
        run_all(jobs, stall_s=config.stall_s, on_message=progress.hear, leave_s=LEAVE_S)
    if progress.is_stopped:
        raise SystemExit(128 + signal.SIGTERM)
    if ranks[0].number or progress.is_paused:
        return None
    return read_report(Path(config.out), progress.start, progress.start_step)


def num_cuda_devices(config: TrainConfig) -> int:
    """How many CUDA devices torch sees; asked only where the config leaves the choice to us."""
    if config.devices != "auto":
        return 0
    import torch

    return torch.cuda.device_count()


def known_rows(config: TrainConfig) -> int | None:
    """Rows of a step, where the config or the run says so."""
    is_there = (Path(config.out) / FACTS_NAME).exists()
    return config.rows.rows_per_step or (read_facts(Path(config.out)).rows_per_step if is_there else None)


def train_here(channel: Channel, config: TrainConfig, rank: Rank, part: StorePart | None = None) -> None:
    """The trainer process. Compiled kernels live in RUN, so that a restart runs the very same ones."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(config.out).absolute() / KERNELS_NAME)
    from .start import run_trainer  # after that line: torch._inductor settles the folder as soon as it is imported

    run_trainer(channel, config, rank, part)


class Progress:
    """One bar on stderr, and what goes to the sinks. Its line of numbers is that of `status`."""

    def __init__(self, status: StatusLine, sinks: Sinks) -> None:
        self.status, self.sinks = status, sinks
        self.start, self.start_step, self.is_stopped, self.is_paused = "new", 0, False, False
        self.port: int | None = None  # where rank 0 waits for the others
        self.bar: Any = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
        self.sinks.close(CLOSE_S if kind is None else HURRIED_S)

    def hear(self, _name: str, message: Any) -> int | None:
        """Takes one message of a trainer: its kind and its numbers. Gives back the port of rank 0, if it is known."""
        kind, numbers = message
        if kind == "finished":
            self.start = "finished"
        elif kind == "port":
            self.port = numbers.get("port", self.port)
        elif kind == "notes":
            for note in numbers["notes"]:
                say(note)
        elif kind == "stopped":
            self.is_stopped = True
            say(f"ended at step {numbers['step']}, with a checkpoint; the same command goes on")
        elif kind == "paused":
            self.is_paused = True
            say("at step {step} of {steps}, where stop_at ends it, with an exam and a checkpoint".format(**numbers))
            say("next: the same command without stop_at, or with a later one")
        elif kind == "spike":
            say(
                "loss spike: step {step} has {loss:.4f}, above {limit:.4f}, the mean of the 100 steps before plus 6 "
                "standard deviations; number {count} of this run".format(**numbers)
            )
        elif kind == "start":
            self.begin(**numbers)
        elif kind == TRAIN:
            self.advance(numbers)
        elif kind == EXAM:
            self.note_exam(numbers)
        if kind in (TRAIN, EXAM, ORIGIN):
            self.sinks.write(kind, numbers)
        return self.port

    def begin(self, step: int, steps: int, is_resumed: bool, notes: list[str]) -> None:
        """The trainer is ready to run from `step` to `steps`; `notes` say what was chosen for it."""
        for note in notes:
            say(note)
        self.start, self.start_step = ("resumed", step) if is_resumed else ("new", 0)
        self.bar = bar(NAME, "step", total=steps, initial=step, dynamic_ncols=True)
        self.sinks.open(step, is_resumed)

    def advance(self, numbers: dict[str, Any]) -> None:
        """One update."""
        self.bar.set_postfix_str(self.status.text(numbers), refresh=False)
        self.bar.update(numbers["step"] - self.bar.n)

    def note_exam(self, numbers: dict[str, Any]) -> None:
        """One exam."""
        self.status.acceptance = value = numbers["acceptance_length"]
        measured = "nothing to measure" if value is None else f"acceptance length {value:.3f}"
        origin = f", origin: {numbers['origin']}" if numbers["origin"] else ""
        say(f"step {numbers['step']}: {measured} ({numbers['num_prompts']} held-out answers{origin})")
