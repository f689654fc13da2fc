"""Our step as the trainer runs it: load a row, forward, loss, backward, update."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from dflash_offline.train.batch import RowBatch
from dflash_offline.train.config import LossConfig, OptimConfig
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.memory_choice import chunk_sizes
from dflash_offline.train.optim import MasterOptimizer
from dflash_offline.train.pending import PendingUpdate
from dflash_offline.train.slot import RowArrays
from dflash_offline.train.staging import Staged
from dflash_offline.train.step import TrainStep

from .cases import Case
from .timing import Mark, finish, mark, ms_between


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """What a run may choose; None leaves it to the package."""

    optimizer: str = "adamw"
    chunk_blocks: int | None = None
    has_graph: bool = False
    is_checkpointed: bool = False


@dataclass(frozen=True, slots=True)
class StepTime:
    """Medians over the timed steps, ms; the parts need not sum to the whole."""

    whole: float
    load: float
    accumulate: float
    update: float

    @property
    def without_load(self) -> float:
        return self.whole - self.load


class Ours:
    """A random drafter on `device` with everything that a step of it needs."""

    def __init__(self, case: Case, device: torch.device, choices: Choices = Choices()) -> None:
        self.case, self.device, self.spec = case, device, case.spec()
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with device:
            drafter = Drafter(self.spec, is_checkpointed=choices.is_checkpointed)
        draw_weights(drafter)
        self.drafter = drafter.to(device, self.dtype)
        table = (case.vocabulary, case.hidden)
        embedding, head = (torch.randn(table, device=device, dtype=self.dtype).mul_(0.02) for _ in range(2))
        chunk_blocks = choices.chunk_blocks or chunk_sizes(case.shape)[0]  # what a card with room takes
        self.loss = LossConfig(chunk_blocks=chunk_blocks)
        self.step = TrainStep(self.drafter, embedding, head, case.shape, self.loss, has_graph=choices.has_graph)
        optim = OptimConfig(name=choices.optimizer, schedule="constant", warmup_share=0.0)
        self.optimizer = MasterOptimizer(self.drafter.named_parameters(), optim, total_steps=1000)
        self.batch = RowBatch(self.spec, case.shape, device, self.dtype)

    def run(self, rows: Sequence[RowArrays]) -> list[list[Mark]]:
        """One update a row, each copied to the device when its turn comes; see `updates`."""
        return self.updates(len(rows), lambda number: self.batch.load(rows[number]), lambda: None)

    def train(self, staged: Staged, num_steps: int) -> list[list[Mark]]:
        """As the trainer: one update a row, the next row copied while the device computes; see `updates`."""

        def load(_number: int) -> None:
            staged.clock.begin()
            staged.load(self.batch)

        return self.updates(num_steps, load, lambda: staged.stage(self.batch))

    def updates(self, num_steps: int, load: Callable[[int], object], stage: Callable[[], object]) -> list[list[Mark]]:
        """Updates of one row each, their numbers read one update later as in the trainer.

        Gives the moments before load, accumulate and update of each, and after the last.
        """
        marks, pending = [], None
        for number in range(num_steps):
            begin = mark(self.device)
            self.step.reset()
            load(number)
            loaded = mark(self.device)
            self.step.accumulate(self.batch)
            if pending is not None:
                pending.numbers(self.step.sums)
            summed = mark(self.device)
            update = self.optimizer.step(self.step.gradients, self.step.sums.weight)
            stage()
            pending = PendingUpdate.of(1, update, self.step.sums, {})
            marks.append([begin, loaded, summed])
        marks.append([mark(self.device)])
        finish(self.device)
        return marks

    def time(self, staged: Staged, num_steps: int) -> StepTime:
        """The step's time; it must be warm."""
        return median_parts(self.train(staged, num_steps))


def median_parts(marks: Sequence[Sequence[Mark]]) -> StepTime:
    """From the moments before load, accumulate and update of each step, and after the last.

    A step ends where the next one begins.
    """
    parts = [[*own, following[0]] for own, following in pairwise(marks)]

    def median(first: int, last: int) -> float:
        return statistics.median(ms_between(part[first], part[last]) for part in parts)

    return StepTime(median(0, 3), median(0, 1), median(1, 2), median(2, 3))


@torch.no_grad()
def draw_weights(drafter: Drafter) -> None:
    """As `Drafter.init_weights` draws them, on the device itself: a billion numbers take the CPU long."""
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, 0.02)
        else:
            parameter.fill_(1.0)


def peak_gib() -> float:
    """The most device memory that this process held at once; 0 without a CUDA device."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
