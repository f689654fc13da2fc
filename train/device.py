"""Which device a run uses, and the rule that nothing is compiled twice on CUDA."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
        raise UserError(f"device = {name!r}", "auto, cpu, cuda or cuda:N", "name another device")
    index = int(number or 0)
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise UserError(
            f"device = {name!r}, and torch sees {torch.cuda.device_count()} CUDA devices",
            "a device of this machine",
            "name another device; `dflash doctor` says what is there",
        )
    return torch.device("cuda", index) if kind == "cuda" else torch.device("cpu")


def card_bytes(device: torch.device) -> int | None:
    """All memory of a CUDA device, used or not; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def device_name(device: torch.device) -> str:
    """What the device calls itself: the card, or the model of the processor where Linux tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU, {models[0]}" if models else "CPU"


@contextmanager
def compiled_once(device: torch.device) -> Iterator[None]:
    """On CUDA, makes compiling a function a second time an error (torch's RecompileError) while the block runs.

    Training rows and exams share one compiled frame, see `TrainStep.infer`; so nothing is ever compiled after
    the first row, and torch's limit of compiled versions, behind which flex attention runs dense, is out of reach.
    """
    if device.type != "cuda":
        yield
        return
    with torch._dynamo.config.patch(error_on_recompile=True, fail_on_recompile_limit_hit=True):
        yield
