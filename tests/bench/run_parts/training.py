"""`dflash train` on a store that the page cache is not let hold: one device, two, and the disk by itself.

The store is of a drafter's real widths and holds noise; the target's frozen parts are random, too. What a run costs
beside its arithmetic does not depend on what it learns. A run is killed when it has trained its steps, so no
checkpoint is in it. Rates and shares are sums over the counted steps, those behind the first WARM_UP.
"""

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dflash_offline.extract.targets.hf import read_facts
from dflash_offline.store.frozen import write_frozen
from dflash_offline.store.size import bytes_per_position
from dflash_offline.train.metrics import METRICS_NAME, TRAIN, read_metrics
from step_parts.cases import BLOCK_SIZE, Case
from step_parts.table import Part
from store_parts import made
from store_parts.made import Noise, drawn_lengths, empty_store, fill, write_samples

from .disk import drop_from_cache, read_rate

WARM_UP = 10  # first steps that do not count: kernels are compiled in them
LOOK_S = 0.05
LIMIT_S = 420.0  # of one run
FED_SHARE = 0.8  # of the disk's bare rate: a run that needs more is the disk's to slow, not the loader's
MEDIAN, SHORTEST = 1500, 64  # of the samples' lengths, tokens


def make_store(folder: Path, case: Case, gigabytes: float, codec: str, sample_tokens: int | None = None) -> Path:
    """A store of about so many GB (1e9 bytes) of states in FOLDER/store, all of it in the split train.

    Its samples have `sample_tokens` each, or lengths as of conversations."""
    noise = Noise(hidden=case.hidden, taps=case.taps)
    positions = int(gigabytes * 1e9 / bytes_per_position(case.taps, case.hidden, codec=codec))
    if sample_tokens is None:
        lengths = lengths_of(positions, case.row_tokens - 1)
    else:
        lengths = np.full(max(8, positions // (sample_tokens - 1)), sample_tokens - 1)
    samples = write_samples(folder / "data", lengths, vocabulary=case.vocabulary - 2)
    target = target_facts(case)
    writer = empty_store(folder / "store", samples, hidden=case.hidden, taps=case.taps, codec=codec, target=target)
    fill(writer, noise.encoder(codec), encoded=True)
    write_frozen(folder / "store", frozen_parts(case), target)
    return folder / "store"


def lengths_of(positions: int, longest: int) -> np.ndarray:
    """Lengths as of conversations, up to `longest`, that sum to about so many positions."""
    drawn = drawn_lengths(made.LONGEST * 1000, MEDIAN, SHORTEST)  # again and again: it draws no more than 10,000
    whole = np.minimum(drawn, longest)
    return np.resize(whole, max(8, round(positions / whole.mean())))


def target_facts(case: Case) -> dict[str, Any]:
    """The facts of a target of these widths; what no training reads is the packaged target's."""
    facts = replace(
        read_facts("tiny", "bfloat16", "cpu"),
        name="bench",
        num_layers=36,
        hidden_size=case.hidden,
        vocab_size=case.vocabulary,
        tokenizer_size=case.vocabulary - 1,  # one row is left for the mask token
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        intermediate_size=case.intermediate,
        max_positions=40_960,
        is_tied=False,
        mask_id=None,
    )
    return facts.as_plain()


def frozen_parts(case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (case.vocabulary, case.hidden)
    embedding, head = (torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator) for _ in "eh")
    return {"embedding": embedding, "norm": torch.ones(case.hidden), "head": head}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is trained: the store, its drafter, and how many rows each device has in a step."""

    store: Path
    case: Case
    codec: str
    steps: int
    rows: int

    def command(self, out: Path, devices: Sequence[str]) -> list[str]:
        settings = {
            "uncached": "true",
            "loader_threads": 4,
            "rows.row_tokens": self.case.row_tokens,
            "rows.anchors": self.case.anchors,
            "rows.rows_per_step": self.rows * len(devices),
            "eval_every": WARM_UP + self.steps + 100,
            "checkpoint_every": WARM_UP + self.steps + 100,
            "optim.name": "adamw",
        }
        line = ["train", "--store", str(self.store), "--out", str(out), "--devices", ",".join(devices)]
        line += ["--steps", str(WARM_UP + self.steps + 100), "--layers", str(self.case.layers)]
        line += ["--block-size", str(BLOCK_SIZE)]
        for name, value in settings.items():
            line += ["--set", f"{name}={value}"]
        return [sys.executable, "-m", "dflash_offline.cli", *line]

    @property
    def token_bytes(self) -> float:
        """Bytes of the store for one token of a sample."""
        return bytes_per_position(self.case.taps, self.case.hidden, codec=self.codec)


@dataclass(frozen=True, slots=True)
class Measured:
    """The counted steps of one run, as its metrics.jsonl has them."""

    lines: list[dict[str, Any]]

    def sum(self, name: str) -> float:
        return sum(line[name] for line in self.lines)

    @property
    def positions_per_s(self) -> float:
        return sum(line["rate_block_tok_s"] * line["step_s"] for line in self.lines) / self.sum("step_s")

    @property
    def wait_share(self) -> float:
        return self.sum("wait_s") / self.sum("step_s")

    @property
    def spread(self) -> float:
        """The 99th percentile of the steps' times over their median."""
        return spread([line["step_s"] for line in self.lines])

    @property
    def spread_of_work(self) -> float:
        """The same of what the steps have to compute: long samples have more attention."""
        return spread([line["rate_tflops"] * line["step_s"] for line in self.lines])

    @property
    def reduction_share(self) -> float:
        """What reducing the gradients adds to a step, the wait for the slower rank in it."""
        reduced = self.sum("reduce_s")
        return reduced / (self.sum("step_s") - reduced)

    def need(self, token_bytes: float) -> float:
        """Bytes a second that the rows take from the disk."""
        return self.sum("num_tokens") * token_bytes / self.sum("step_s")


def spread(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99)) / statistics.median(values)


def train(job: Job, out: Path, devices: Sequence[str]) -> Measured:
    """Runs until enough steps are trained, and kills it. Raises SystemExit where it ends before."""
    command = job.command(out, devices)
    print(f"$ dflash {' '.join(command[3:])}", flush=True)
    process, started = subprocess.Popen(command), time.monotonic()
    lines: list[dict[str, Any]] = []
    try:
        while len(lines) < WARM_UP + job.steps:
            if process.poll() is not None or time.monotonic() - started > LIMIT_S:
                raise SystemExit(
                    f"dflash train: {len(lines)} steps in {time.monotonic() - started:.0f} s, then its end"
                )
            time.sleep(LOOK_S)
            lines = read_metrics(out / METRICS_NAME, TRAIN)
    finally:
        process.kill()
        process.wait()
    return Measured(lines[WARM_UP : WARM_UP + job.steps])


def measure(part: Part, folder: Path, job: Job, devices: Sequence[str], keep: Callable[[], None]) -> None:
    """One device alone and, where two are given, both; calls `keep` behind each."""
    files = sorted((job.store / "hidden").glob("c.*"))
    drop_from_cache(files)
    disk = read_rate(files)
    part.put("disk_read", disk / 1e9, "GB/s")
    part.put("store_gb", sum(path.stat().st_size for path in files) / 1e9, "GB")
    runs: dict[str, Measured] = {}
    for count in range(1, len(devices) + 1):
        name = ("one", "two")[count - 1]
        drop_from_cache(files)
        runs[name] = train(job, folder / f"run-{name}", devices[:count])
        shutil.rmtree(folder / f"run-{name}")
        put_run(part, name, runs[name], job, disk)
        put_worst(part, runs, job, disk)
        if name == "two":
            part.put("two_gpus_vs_one", runs["two"].positions_per_s / runs["one"].positions_per_s)
            part.put("ddp_overhead", runs["two"].reduction_share)
        keep()


def put_run(part: Part, name: str, run: Measured, job: Job, disk: float) -> None:
    part.put(f"draft_positions_per_s_{name}", run.positions_per_s, "positions/s")
    part.put(f"step_{name}", statistics.median(line["step_s"] for line in run.lines), "s")
    part.put(f"data_wait_{name}", run.wait_share, "share")
    part.put(f"step_p99_over_p50_{name}", run.spread)
    part.put(f"work_p99_over_p50_{name}", run.spread_of_work)
    part.put(f"need_{name}", run.need(job.token_bytes) / 1e9, "GB/s")
    part.put(f"need_over_disk_{name}", run.need(job.token_bytes) / disk)
    for line in [max(run.lines, key=lambda line: line["step_s"])]:
        print(f"{name}: the slowest step was {line['step']}: {line['step_s']:.3f} s, waited {line['wait_s']:.3f} s")


def put_worst(part: Part, runs: dict[str, Measured], job: Job, disk: float) -> None:
    """The figures with bars: the worse of the runs that the disk can feed."""
    fed = [run for run in runs.values() if run.need(job.token_bytes) <= FED_SHARE * disk]
    if not fed:
        part.left_out["data_wait_share"] = part.left_out["step_p99_over_p50"] = (
            f"every run needs more than {FED_SHARE} of what the disk gives"
        )
        return
    part.put("data_wait_share", max(run.wait_share for run in fed))
    part.put("step_p99_over_p50", max(run.spread for run in fed))
