"""What the bar of a training says behind its count. Knows numbers by the names that metrics.jsonl gives them."""

from collections.abc import Mapping
from typing import Any


class StatusLine:
    """Loss, accuracy, streak, acceptance of the last exam, learning rate, noise, rate, data wait and queue.

    Rate and wait are means since this process began; the others are those of the last update. The streak is the mean of
    leading right slots of a block.
    """

    def __init__(self, *, noise: float = 0.0, slots: int = 0) -> None:
        self.noise, self.slots = noise, slots
        self.acceptance: float | None = None
        self.step_s = self.wait_s = self.tokens = 0.0

    def text(self, numbers: Mapping[str, Any]) -> str:
        """The line after one more update."""
        self.step_s += numbers["step_s"]
        self.wait_s += numbers["wait_s"]
        self.tokens += numbers["num_tokens"]
        parts = [
            f"loss {numbers['loss']:.3f}",
            f"acc {100 * numbers['accuracy']:.1f} %",
            f"streak {numbers['accepted_drafts_teacher_forced']:.2f}",
            f"acceptance {'-' if self.acceptance is None else format(self.acceptance, '.2f')}",
            f"lr {numbers['lr']:.2e}",
            *([f"noise {self.noise:g}"] if self.noise else []),
            f"{self.tokens / self.step_s:,.0f} tok/s",
            f"data wait {100 * self.wait_s / self.step_s:.0f} %",
            f"queue {numbers['rows_ready']:.0f}/{self.slots}",
        ]
        return ", ".join(parts)
