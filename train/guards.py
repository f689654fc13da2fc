"""What is said of a training that goes wrong: loss spikes, rows that spoil a step, a card that is full.

Pure functions of numbers and names, besides the one class that remembers losses.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from .. import UserError
from .config import OptimConfig
from .memory_choice import Choice, gib, room_bytes
from .optim import Unsound, peak_of
from .order import Place

WINDOW, DEVIATIONS = 100, 6.0
SHOWN_ROWS, SHOWN_SAMPLES = 4, 24


class LossSpikes:
    """Counts losses above the mean of the 100 before them plus 6 of their standard deviations."""

    def __init__(self, losses: Iterable[float] = ()) -> None:
        """`losses` are those of the run so far."""
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.count = 0
        for loss in losses:
            self.note(loss)

    def note(self, loss: float) -> float | None:
        """Takes the loss of the next step: what it would have had to stay below, where it is a spike."""
        limit = None
        if len(self.recent) == WINDOW:
            mean = sum(self.recent) / WINDOW
            deviation = math.sqrt(sum((value - mean) ** 2 for value in self.recent) / WINDOW)
            if loss > mean + DEVIATIONS * deviation:
                limit = mean + DEVIATIONS * deviation
                self.count += 1
        self.recent.append(loss)
        return limit


class Suspect(NamedTuple):
    """A row of a step that went wrong, and the store's ids of its samples."""

    place: Place
    sample_ids: tuple[int, ...]


def suspects(rows: Sequence[Suspect], running_losses: Sequence[float]) -> tuple[bool, list[Suspect]]:
    """Whether a row of this rank made the loss sum non-finite, and that row; else False and all of them.

    `running_losses` are the sums after each row.
    """
    for row, loss in zip(rows, running_losses):
        if not math.isfinite(loss):
            return True, [row]
    return False, list(rows)


def blamed(error: Unsound, found: Sequence[tuple[bool, list[Suspect]]]) -> UserError:
    """The error with the rows that it may come from, of all ranks."""
    sure = [row for is_sure, rows in found if is_sure for row in rows]
    rows = sorted(sure or [row for _, rows in found for row in rows])
    named = "; ".join(
        f"row {row.place.row} of epoch {row.place.epoch} (samples {shortened(row.sample_ids, SHOWN_SAMPLES)})"
        for row in rows[:SHOWN_ROWS]
    )
    more = f"; and {len(rows) - SHOWN_ROWS} rows more" if len(rows) > SHOWN_ROWS else ""
    where = "it comes from" if sure else "its rows are"
    return UserError(f"{error.happened}; {where} {named}{more}", error.expected, error.advice)


def diverged(error: UserError, step: int, config: OptimConfig, run_dir: Path, saved: Sequence[int]) -> UserError:
    """What an exam that found no numbers means for the run; `error` says which, `saved` are the checkpoints there."""
    if step == 0:
        return UserError(
            f"{error.happened} before the first update",
            "a store and first weights that are numbers",
            "check the store with `dflash verify`, and the folder of --warm-start where one was given",
        )
    rates = {"optim.lr": peak_of(config), "optim.weight_decay": config.weight_decay}
    rates |= {"optim.adamw_lr": config.adamw_lr} if config.name == "muon" else {}
    named = ", ".join(f"{name} = {value:g}" for name, value in rates.items() if value)
    export = f"dflash export {quote(str(run_dir))} --checkpoint {saved[-1]}" if saved else ""
    return UserError(
        f"{error.happened} at step {step}: the training diverged, with {named}",
        "updates small enough that loss and weights stay numbers",
        f"train into another --out with a lower {' or '.join(name for name, value in rates.items() if value)}"
        + (
            f", from the newest checkpoint if you like: `{export}`, then --warm-start with that folder" if saved else ""
        ),
    )


def shortened(numbers: Sequence[int], most: int) -> str:
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more


def out_of_memory(text: str, choice: Choice | None) -> UserError:
    """What a card that ran full means for a run whose memory was planned; `text` is what torch said."""
    said = text.strip().partition("\n")[0]
    if choice is None:
        return UserError(
            f"device memory ran out: {said}",
            "a run that fits its device",
            "train a smaller drafter, or with fewer rows.anchors or rows.row_tokens; the newest checkpoint is kept",
        )
    return UserError(
        f"device memory ran out, and the plan above has its peak at {gib(choice.plan.peak_bytes)} GiB: {said}",
        f"{gib(room_bytes(choice.card_bytes))} GiB for this run alone, on a card of {gib(choice.card_bytes)}",
        "end what else runs on that card (nvidia-smi names it), else --set loss.chunk_blocks="
        f"{max(1, choice.chunk_blocks // 2)} or --set checkpointing=on; the newest checkpoint is kept",
    )
