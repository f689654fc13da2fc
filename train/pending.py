"""The numbers of an update on their way from the device: read one update later, so that the device never waits.

Knows tensors and names; writes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .guards import Suspect
from .optim import Update, require_sound
from .speed import StepSpeed
from .step import StepSums


class HostCopy:
    """A copy of a small tensor [n] that is under way to the host while the device works on."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.to("cpu", non_blocking=True) if values.is_cuda else values.clone()  # pinned on CUDA
        self.arrived = torch.cuda.Event() if values.is_cuda else None
        if self.arrived is not None:
            self.arrived.record()

    def read(self) -> list[float]:
        """The numbers; waits for them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values.tolist()


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """An update that was sent to the device, with what is known of it at once."""

    step: int  # updates done with it
    lr: float
    copy: HostCopy  # the sums' values, then the gradient's norm
    known: dict[str, Any]
    speed: StepSpeed | None = None
    rows: tuple[Suspect, ...] = ()  # of this rank
    running_losses: Tensor | None = None  # [rows of this rank] sum of losses after each of them

    @staticmethod
    def of(
        step: int,
        update: Update,
        sums: StepSums,
        known: dict[str, Any],
        speed: StepSpeed | None = None,
        rows: Sequence[Suspect] = (),
        running_losses: Tensor | None = None,
    ) -> "PendingUpdate":
        """Starts the copy; the sums may be zeroed after it, `running_losses` must stay."""
        copy = HostCopy(torch.cat([sums.values, update.gradient_norm[None]]))
        return PendingUpdate(step, update.lr, copy, known, speed, tuple(rows), running_losses)

    def numbers(self, sums: StepSums) -> dict[str, Any]:
        """Everything that metrics.jsonl says of the update; waits for the device to have done it.

        `sums` only names the values. Raises Unsound where the update had nothing to learn from, or no finite
        loss or gradient: its weights must not be kept then.
        """
        *values, norm = self.copy.read()
        weight = values[sums.HEAD.index("weight")]
        require_sound(self.step - 1, weight, norm, values[sums.HEAD.index("loss")])
        speed = {} if self.speed is None else self.speed.numbers()
        return sums.named(values) | {"weight": weight, "lr": self.lr, "grad_norm": norm} | self.known | speed
