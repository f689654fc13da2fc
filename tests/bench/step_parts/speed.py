"""The step of one case: its rate, its share of the matmul peak, its bare kernels, and what its time is made of."""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from dflash_offline.train.clock import StepClock
from dflash_offline.train.device import compiled_once
from dflash_offline.train.flops import mean_visible, step_flops, tokens_behind
from dflash_offline.train.loss import equal_chunk
from dflash_offline.train.slot import RowArrays
from dflash_offline.train.staging import Staged
from torch._dynamo.utils import counters

from . import kernels
from .bare import bare_attention, bare_gemms
from .cases import Case, Rows, rows_of
from .ours import Choices, Ours, StepTime, peak_gib
from .table import Part
from .timing import burst_tflops, matmul_tflops

WARM_UP = 3  # the first compiles, the second has the optimizer's state
PROFILED = 5


def mean_flops(case: Case, rows: Sequence[RowArrays]) -> dict[str, float]:
    """By part, the mean over these rows of what one takes."""
    spec, shape = case.spec(), case.shape
    of_rows = [
        step_flops(spec, shape, [mean_visible(tokens_behind(row), shape.block_size, kind) for kind in spec.attention])
        for row in rows
    ]
    return {name: statistics.mean(flops[name] for flops in of_rows) for name in of_rows[0]}


def measure(part: Part, case: Case, device: torch.device, choices: Choices, num_steps: int) -> None:
    """Rows of one case; their names end with the part's."""
    name = part.name
    size = 8192 if device.type == "cuda" else 256
    with rows_of(case, device) as rows:
        ours = Ours(case, device, choices)
        staged = staged_rows(rows, ours)
        with compiled_once(device):
            ours.train(staged, WARM_UP)
            before = matmul_tflops(device, size)
            taken, again = ours.time(staged, num_steps), ours.time(staged, num_steps)
            after = matmul_tflops(device, size)
            burst = burst_tflops(device, size)
        flops = mean_flops(case, rows.taken[-2 * num_steps :])
        put_speed(part, case, flops, taken, (before + after) / 2)
        part.put(f"share_of_burst_peak_{name}", sum(flops.values()) / taken.whole / 1e9 / burst)
        part.put(f"matmul_tflops_burst_{name}", burst, "TFLOP/s")
        part.put(f"second_run_ms_{name}", again.whole, "ms")
        part.put(f"matmul_tflops_before_{name}", before, "TFLOP/s")
        part.put(f"matmul_tflops_after_{name}", after, "TFLOP/s")
        part.put(f"peak_gib_{name}", peak_gib(), "GiB")
        part.put(f"compiled_frames_{name}", counters["stats"]["unique_graphs"], "count")
        part.facts["chunk_blocks"] = ours.loss.chunk_blocks
        if name in ("8b", "27b"):
            put_bare(part, ours, taken)
        if name == "8b":
            put_profile(part, ours, staged)


def put_speed(part: Part, case: Case, flops: dict[str, float], taken: StepTime, peak: float) -> None:
    """The row's way from the staging memory and the optimizer are in the step; beside it the same without the first."""
    name, total = part.name, sum(flops.values())
    shown = ", ".join(f"{key} {value / 1e12:.1f}" for key, value in flops.items())
    print(f"{name}: {total / 1e12:.1f} TFLOP a step ({shown})", flush=True)
    print(f"{name}: {taken}", flush=True)
    part.put(f"draft_positions_per_s_{name}", case.positions / taken.whole * 1e3, "positions/s")
    part.put(f"draft_positions_per_s_without_load_{name}", case.positions / taken.without_load * 1e3, "positions/s")
    part.put(f"share_of_peak_{name}", total / taken.whole / 1e9 / peak)
    part.put(f"share_of_peak_without_load_{name}", total / taken.without_load / 1e9 / peak)
    part.put(f"step_ms_{name}", taken.whole, "ms")
    part.put(f"load_ms_{name}", taken.load, "ms")
    part.put(f"forward_backward_ms_{name}", taken.accumulate, "ms")
    part.put(f"optimizer_ms_{name}", taken.update, "ms")


def put_bare(part: Part, ours: Ours, taken: StepTime) -> None:
    """Forward, loss and backward of the step against its products and attention calls alone."""
    name = part.name
    assert ours.loss.chunk_blocks is not None
    chunk = equal_chunk(ours.case.anchors, ours.loss.chunk_blocks)
    calls = bare_gemms(ours, chunk)
    if ours.device.type != "cuda":
        part.left_out[f"vs_bare_kernels_{name}"] = "flex attention has a backward on CUDA only"
        return
    calls += bare_attention(ours)
    for call in calls:
        rate = "" if call.tflops is None else f"{call.tflops:6.0f} TFLOP/s"
        print(f"bare {name}: {call.name:30} {call.count:4} calls {call.ms:9.2f} ms {rate}", flush=True)
    attention = sum(call.ms for call in calls if call.tflops is None)
    products = sum(call.ms for call in calls if call.tflops is not None)
    part.put(f"vs_bare_kernels_{name}", taken.accumulate / (products + attention))
    part.put(f"bare_products_ms_{name}", products, "ms")
    part.put(f"bare_attention_ms_{name}", attention, "ms")


def staged_rows(rows: Rows, ours: Ours) -> Staged:
    """The rows as the trainer has the loader's."""
    loader: Any = rows
    return Staged(loader, rows.device, StepClock(rows.device), graph_pool=ours.step.graph_pool)


def put_profile(part: Part, ours: Ours, staged: Staged) -> None:
    """Share of all kernels' time, load and update with it, in kernels that are neither matmul nor attention."""
    kernels.recorded(lambda: ours.train(staged, 1), ours.device)  # the profiler's own start
    work = kernels.recorded(lambda: ours.train(staged, PROFILED), ours.device)
    if not work:
        part.left_out["other_kernels_share"] = "no device to profile"
        return
    print("\n".join(kernels.longest(work, PROFILED)), flush=True)
    by_kind = kernels.shares(work)
    part.put("other_kernels_share", by_kind[kernels.OTHER] + by_kind[kernels.UNCLASSIFIED])
    for kind, share in by_kind.items():
        part.put(f"{kind}_kernels_share_of_8b", share)
    staged.load(ours.batch)
    inner = kernels.shares(kernels.recorded(lambda: ours.step.accumulate(ours.batch), ours.device))
    part.put("other_kernels_share_without_load_and_update", inner[kernels.OTHER] + inner[kernels.UNCLASSIFIED])


def measure_small(part: Part, case: Case, device: torch.device, choices: Choices, num_steps: int) -> None:
    """Share of a step in which no kernel runs."""
    ending = "" if choices.has_graph else "_no_graphs"
    with rows_of(case, device) as rows, compiled_once(device):
        ours = Ours(case, device, choices)
        staged = staged_rows(rows, ours)
        ours.train(staged, WARM_UP)
        taken = ours.time(staged, num_steps)
        part.put(f"step_ms_small{ending}", taken.whole, "ms")
        part.put(f"load_ms_small{ending}", taken.load, "ms")
        part.put(f"optimizer_ms_small{ending}", taken.update, "ms")
        part.put(f"draft_positions_per_s_small{ending}", case.positions / taken.whole * 1e3, "positions/s")
        part.put(f"peak_gib_small{ending}", peak_gib(), "GiB")
        kernels.recorded(lambda: ours.train(staged, 1), device)
        work = kernels.recorded(lambda: ours.train(staged, num_steps), device)
    if not work:
        part.left_out[f"gpu_idle_small{ending}"] = "no device to profile"
        return
    print("\n".join(kernels.longest(work, num_steps)), flush=True)
    busy_ms = kernels.covered_us(one for one in work if one.is_kernel) / num_steps / 1e3
    part.put(f"gpu_idle_small{ending}", kernels.idle_share(work))
    part.put(f"gpu_idle_small{ending}_copies_counted", kernels.idle_share(work, copies_count=True))
    part.put(f"gpu_idle_small{ending}_unprofiled", 1.0 - busy_ms / taken.whole)
