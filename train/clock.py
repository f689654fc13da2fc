"""How long an update took on its device, and how long the device had no row to work on meanwhile.

The host runs ahead of a CUDA device: its own clock says when work was sent, not when it was done, and while it waits
for a row the device may still be busy with the one before. So moments are events of the computing stream there.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


class Moment:
    """CUDA: when the device is through with all that was sent to the computing stream so far. CPU: now."""

    def __init__(self, device: torch.device) -> None:
        self.event: torch.cuda.Event | None = None
        self.clock_s = 0.0
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))
        else:
            self.clock_s = time.monotonic()

    def seconds_to(self, later: "Moment") -> float:
        """Seconds from this moment to a later one, which the host waits for."""
        if self.event is None or later.event is None:
            return later.clock_s - self.clock_s
        later.event.synchronize()
        return self.event.elapsed_time(later.event) / 1e3


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The moments of one update; on CUDA they are read once it is done."""

    began: Moment
    ended: Moment
    waits: tuple[tuple[Moment, Moment], ...]

    def step_s(self) -> float:
        """From the end of the work sent before it to the end of its own, seconds."""
        return self.began.seconds_to(self.ended)

    def wait_s(self) -> float:
        """How long the device waited for rows in it, seconds."""
        return sum(before.seconds_to(after) for before, after in self.waits)


class StepClock:
    """Takes the moments of a device's updates, one update after another."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.began = Moment(device)
        self.waits: list[tuple[Moment, Moment]] = []

    def begin(self) -> None:
        """An update begins; a wait between two updates belongs to none."""
        self.began, self.waits = Moment(self.device), []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for a row: on the host, or by a wait sent to the computing stream."""
        before = Moment(self.device)
        yield
        self.waits.append((before, Moment(self.device)))

    def end(self) -> StepTimes:
        """The update was sent whole."""
        return StepTimes(self.began, Moment(self.device), tuple(self.waits))
