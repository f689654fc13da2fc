"""What a trainer says of its run: numbers into metrics.jsonl and to the launcher, words to the launcher alone.

Rank 0 speaks for all; on the others every method does nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .guards import LossSpikes
from .metrics import METRICS_NAME, TRAIN, MetricsFile, read_metrics
from .ranks import Ranks


class Telling:
    """The launcher's ear and, inside `opened`, the file of numbers."""

    def __init__(self, run_dir: Path, ranks: Ranks) -> None:
        self.path, self.ranks = run_dir / METRICS_NAME, ranks
        self.metrics: MetricsFile | None = None
        self.spikes = LossSpikes()

    @contextmanager
    def opened(self, step: int) -> Iterator[None]:
        """The file of numbers while the block runs; lines behind `step` go, all of them where it is -1."""
        if not self.ranks.is_first:
            yield
            return
        with MetricsFile(self.path, step) as self.metrics:
            self.spikes = LossSpikes(line["loss"] for line in read_metrics(self.path, TRAIN))
            yield

    def say(self, kind: str, **numbers: Any) -> None:
        """To the launcher."""
        if self.ranks.is_first:
            self.ranks.channel.tell((kind, numbers))

    def write(self, kind: str, step: int, numbers: dict[str, Any]) -> None:
        """A line of metrics.jsonl, and the same to the launcher."""
        if self.metrics is not None:
            self.metrics.write(kind, step, **numbers)
        self.say(kind, step=step, **numbers)

    def write_update(self, step: int, numbers: dict[str, Any]) -> None:
        """The numbers of an update; a loss far above those before it is said on top."""
        self.write(TRAIN, step, numbers)
        limit = self.spikes.note(numbers["loss"])
        if limit is not None:
            self.say("spike", step=step, loss=numbers["loss"], limit=limit, count=self.spikes.count)

    def sync(self) -> None:
        """Makes every line durable."""
        if self.metrics is not None:
            self.metrics.sync()
