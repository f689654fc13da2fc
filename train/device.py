"""Which device a run uses, its copies from shared memory, and the rule that nothing is compiled twice on CUDA."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from .. import UserError


def pick_device(name: str) -> torch.device:
    """`auto` is the first CUDA device, or the CPU on a machine without one; else as named.

    Raises UserError for a name that is none, and for a device that is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if name != "cpu" and not (kind == "cuda" and (number.isdecimal() or name == "cuda")):
        raise UserError(f"device = {name!r}", "auto, cpu, cuda or cuda:N", "change --device")
    index = int(number or 0)
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise UserError(
            f"device = {name!r}, and torch sees {torch.cuda.device_count()} CUDA devices",
            "a device of this machine",
            "change --device; `dflash doctor` says what is there",
        )
    return torch.device("cuda", index) if kind == "cuda" else torch.device("cpu")


class CompileGuard:
    """On CUDA, makes a recompile an error for every kind of work that has run once.

    Two kinds (a training step, an exam) may each compile when they first run.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_on = device.type == "cuda"
        self.warm: set[str] = set()

    @contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        """Guards one piece of work."""
        if not self.is_on:
            yield
            return
        with torch._dynamo.config.patch(error_on_recompile=kind in self.warm, fail_on_recompile_limit_hit=True):
            yield
        self.warm.add(kind)


@contextmanager
def pinned(memory: np.ndarray, device: torch.device) -> Iterator[None]:
    """On CUDA, locks host memory into place while the block runs, so that copies from it are asynchronous."""
    if device.type != "cuda":
        yield
        return
    cudart = torch.cuda.cudart()
    assert cudart is not None
    torch.cuda.check_error(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    try:
        yield
    finally:
        torch.cuda.synchronize(device)
        torch.cuda.check_error(cudart.cudaHostUnregister(memory.ctypes.data))


def copy_mark(device: torch.device) -> Callable[[], None]:
    """A function that waits for what was sent to the device up to now; nothing to wait for on a CPU."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize
