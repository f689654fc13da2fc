"""States on their way off the device: copied on a stream of their own while the next forward computes.

On a CPU the same path without streams: everything is done at once. Knows tensors; no target, no store, no ring.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Mark:
    """A moment in a stream: a CUDA event, or nothing on a CPU, where everything is done at once."""

    def __init__(self, event: Any = None) -> None:
        self.event = event

    def wait(self) -> None:
        """The host waits."""
        if self.event is not None:
            self.event.synchronize()


class SideStream:
    """The stream that copies beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def computed(self) -> Mark:
        """Everything that was sent to the computing stream so far."""
        return Mark() if self.side is None else Mark(torch.cuda.current_stream(self.device).record_event())

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Mark) -> Mark:
        """Copies each (on the device, on the host) as soon as `after` is reached; the mark says when all are done.

        The caller keeps the tensors until then: memory that it drops earlier may be computed in again.
        """
        with self.beside(after):
            for there, here in pairs:
                here.copy_(there, non_blocking=self.side is not None)
            return Mark() if self.side is None else Mark(self.side.record_event())

    @contextmanager
    def beside(self, after: Mark) -> Iterator[None]:
        """Inside, work is sent to the side stream, behind `after`: it does not wait for later forwards."""
        if self.side is not None:
            self.side.wait_event(after.event)
        with nullcontext() if self.side is None else torch.cuda.stream(self.side):
            yield

    def make_room(self) -> None:
        """Waits until the device has done all that was sent to it, and gives back what torch keeps of its memory."""
        if self.side is not None:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def host(self, like: Tensor) -> Tensor:
        """Memory on the host for a copy of a tensor, page-locked where that makes it asynchronous."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self.side is not None)

    def upload(self, array: np.ndarray) -> Tensor:
        """An array on the device; the host does not wait for it, nor for what computes there."""
        tensor = torch.from_numpy(array)
        return tensor if self.side is None else tensor.pin_memory().to(self.device, non_blocking=True)
