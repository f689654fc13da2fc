"""What ran on the device and when, by torch's profiler: shares by kind of kernel, and time without any."""

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .timing import finish

MATMUL, ATTENTION, OTHER, UNCLASSIFIED = "matmul", "attention", "other", "unclassified"
OTHER_PARTS = """
    elementwise reduce softmax argmax multi_tensor foreach scatter gather index embedding sort scan cum copy fill cat
    norm arange cub::
""".split()
# A kernel is what the first rule says of which all parts are in its lower-case name. Of inductor's kernels only those
# from a template (triton_tem) are products or attention: the others bear names of operations that they were fused with.
RULES = (
    (ATTENTION, ("triton_tem", "flex_attention")),
    (MATMUL, ("triton_tem", "mm")),
    (ATTENTION, ("triton_tem",)),
    (OTHER, ("triton_",)),
    (OTHER, ("slot_kernel",)),  # of the loss, train/label_loss.py
    (OTHER, ("gradient_kernel",)),
    (ATTENTION, ("flash",)),
    (ATTENTION, ("fmha",)),
    *((MATMUL, (part,)) for part in ("nvjet", "gemm", "gemv", "cutlass", "splitk", "cublas")),
    *((OTHER, (part,)) for part in OTHER_PARTS),
)


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel, or one copy or fill by the device (`is_kernel` False); times in microseconds."""

    name: str
    begin: float
    end: float
    is_kernel: bool = True


def kind_of(name: str) -> str:
    """Which kind of kernel bears this name, by RULES: all parts of a rule must be in it."""
    lower = name.lower()
    return next((kind for kind, parts in RULES if all(part in lower for part in parts)), UNCLASSIFIED)


def recorded(run: Callable[[], object], device: torch.device) -> list[Work]:
    """Everything that the device did while `run` ran; nothing on a CPU."""
    if device.type != "cuda":
        run()
        return []
    finish(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        finish(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return parsed(json.loads(path.read_text())["traceEvents"])


def parsed(events: Iterable[dict[str, Any]]) -> list[Work]:
    """The device's part of a Chrome trace."""
    categories = {"kernel": True, "gpu_memcpy": False, "gpu_memset": False}
    return [
        Work(event["name"], event["ts"], event["ts"] + event["dur"], categories[event["cat"]])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in categories
    ]


def covered_us(work: Iterable[Work]) -> float:
    """Time in which at least one of them ran."""
    total, reached = 0.0, float("-inf")
    for one in sorted(work, key=lambda one: one.begin):
        total += max(0.0, one.end - max(one.begin, reached))
        reached = max(reached, one.end)
    return total


def idle_share(work: Sequence[Work], *, copies_count: bool = False) -> float:
    """Share of the time from the first begin to the last end in which no kernel ran (or, with copies, nothing)."""
    window = max(one.end for one in work) - min(one.begin for one in work)
    return 1.0 - covered_us(one for one in work if one.is_kernel or copies_count) / window


def shares(work: Sequence[Work]) -> dict[str, float]:
    """Share of each kind in the summed time of all kernels."""
    kernels = [one for one in work if one.is_kernel]
    total = sum(one.end - one.begin for one in kernels)
    by_kind: dict[str, float] = {kind: 0.0 for kind in (MATMUL, ATTENTION, OTHER, UNCLASSIFIED)}
    for one in kernels:
        by_kind[kind_of(one.name)] += (one.end - one.begin) / total
    return by_kind


def longest(work: Sequence[Work], steps: int, most: int = 40) -> list[str]:
    """A line for each name that takes the most time: its kind, ms and calls of one step."""
    by_name: dict[str, list[float]] = {}
    for one in work:
        by_name.setdefault(one.name if one.is_kernel else f"(copy) {one.name}", []).append(one.end - one.begin)
    ordered = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    lines = [
        f"{kind_of(name):12} {sum(took) / steps / 1e3:9.3f} ms {len(took) / steps:7.1f} calls  {name[:110]}"
        for name, took in ordered
    ]
    return lines[:most] + [line for line in lines[most:] if line.startswith(UNCLASSIFIED)]
