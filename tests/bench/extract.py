"""What recording costs beside the bare forward: on a RAM disk and on a disk, raw and int8, with one GPU and with two.

Makes a random target at real widths and full depth on the device and samples of random ids, lognormal lengths, and
measures all parts in one go, each beside the bare forward of the same batches in the same process:
    python tests/bench/extract.py --dir DIR [--ram /dev/shm/bench] [--target qwen3-8b] [--minutes 9] [--part raw ...]
    python tests/bench/extract.py --dir DIR --tiny     on a CPU, to see that it runs; no number of it is worth keeping
Parts: `peak` (the largest matmul rate of the device), `raw` and `int8` (a recorder and its writer, store on the RAM
disk), `disk` (raw on DIR, beside the bare write rate of that disk), `gap` (when the device computed nothing, by a
profile of a raw run) and `two` (workers in processes of their own on one GPU, then on two). The bare forward is always
measured, before and after. Tokens are those of the samples, padding not counted. A part that fails, or for which no
time is left, is named with its reason and the others go on; the exit code is 1 then.
"""

import argparse
import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from dflash_offline.extract.survey import Survey
from dflash_offline.store.samples import SampleTable
from dflash_offline.store.size import bytes_per_position
from extract_parts.laid_out import lay_out, write_samples
from extract_parts.machine import idle_share, write_rate
from extract_parts.recording import Bare, error_of_allowed, recording, timed, workers_rate
from extract_parts.targets import TARGETS, layer_parameters, make_target
from step_parts.timing import matmul_tflops

PARTS = ("peak", "raw", "int8", "disk", "gap", "two")
NAMED = {"qwen3-8b": "", "hybrid-27b": "_hybrid_27b", "tiny": ""}  # behind a row's name
Row = tuple[str, float, str]


class Bench:
    """One target on one device, and what was measured with it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.deadline = time.perf_counter() + 60 * args.minutes
        self.rows: list[Row] = []
        self.samples: SampleTable = write_samples(args.dir / "data", args.samples, args.longest)
        started = time.perf_counter()
        self.target = make_target(args.target, args.device)
        self.facts = self.target.facts
        self.peak_tflops = 0.0
        print(f"{args.target} made on {args.device} in {time.perf_counter() - started:.0f} s", flush=True)
        found = self.lay_out(args.ram, "raw")
        self.num_tokens = int(found.plan.lengths.sum())
        self.depth = max(found.manifest.tap_layers) + 1
        self.width = bytes_per_position(len(found.manifest.tap_layers), self.facts.hidden_size)
        self.bare = Bare(found, self.target)
        padded = sum(ids.numel() for ids in self.bare.batches)
        print(f"{self.num_tokens:,} tokens in {len(self.bare.batches)} batches")
        self.bare()  # warms up
        self.bare_s = timed(self.target, self.bare)
        self.put("bare_tokens_per_s", self.num_tokens / self.bare_s, "tokens/s")
        self.put("padding", padded / self.num_tokens - 1, "share")
        self.put("error_of_allowed", error_of_allowed(found, self.target), "ratio")

    def put(self, name: str, value: float, unit: str) -> None:
        name += NAMED[self.args.target]
        self.rows.append((name, value, unit))
        print(f"{name:28} {value:14,.4f} {unit}", flush=True)  # a run that is cut off keeps them in its output

    def lay_out(self, folder: Path, codec: str, workers: tuple[str, ...] | None = None) -> Survey:
        """For the target of this process in one group, for workers that are compared in the same groups each time."""
        own, budget = workers or (self.args.device,), self.args.token_budget
        return lay_out(folder / "store", codec, self.facts, self.samples, own, budget, in_one_group=workers is None)

    def recorded(self, folder: Path, codec: str) -> float:
        """Seconds until the store is committed."""
        with recording(self.lay_out(folder, codec), self.target) as run:
            return timed(self.target, run)

    def run_peak(self) -> None:
        self.peak_tflops = matmul_tflops(torch.device(self.args.device), 256 if self.args.tiny else 8192)
        self.put("matmul_peak", self.peak_tflops, "TFLOP/s")

    def run_raw(self) -> None:
        taken = self.recorded(self.args.ram, "raw")
        again = timed(self.target, self.bare)
        self.put("tokens_per_s", self.num_tokens / taken, "tokens/s")
        self.put("vs_bare_forward_raw", min(self.bare_s, again) / taken, "ratio")
        self.put("bare_again", again / self.bare_s, "ratio")
        if self.peak_tflops:
            flops = 2 * layer_parameters(self.target, self.depth) * self.num_tokens / taken
            self.put("share_of_peak", flops / 1e12 / self.peak_tflops, "ratio")

    def run_int8(self) -> None:
        self.put("vs_bare_forward_int8", self.bare_s / self.recorded(self.args.ram, "int8"), "ratio")

    def run_disk(self) -> None:
        before = write_rate(self.args.dir, self.args.write_bytes)
        taken = self.recorded(self.args.dir, "raw")
        after = write_rate(self.args.dir, self.args.write_bytes)
        self.put("vs_bare_forward_disk", self.bare_s / taken, "ratio")
        self.put("disk_bare_write", max(before, after) / 1e9, "GB/s")
        self.put("disk_written", self.num_tokens * self.width / taken / 1e9, "GB/s")

    def run_gap(self) -> None:
        if self.target.device.type != "cuda":
            raise RuntimeError("a profile of kernels needs a CUDA device")
        with recording(self.lay_out(self.args.ram, "raw"), self.target) as run:
            share, longest_ms = idle_share(run)
        self.put("host_gap_share", share, "ratio")
        self.put("longest_gap_ms", longest_ms, "ms")

    def run_two(self) -> None:
        devices = ("cpu", "cpu") if self.target.device.type == "cpu" else ("cuda:0", "cuda:1")
        if self.target.device.type == "cuda" and torch.cuda.device_count() < 2:
            raise RuntimeError(f"two GPUs are needed, there is {torch.cuda.device_count()}")
        del self.target, self.bare  # the workers hold their own
        if devices[0] != "cpu":
            torch.cuda.empty_cache()
        one, two = (
            workers_rate(self.lay_out(self.args.ram, "raw", devices[:count]), self.args.target) for count in (1, 2)
        )
        self.put("two_gpus_vs_one", two / one, "ratio")

    def run(self, name: str) -> str:
        """Why a part gives no number; '' for one that does."""
        if time.perf_counter() > self.deadline:
            return f"no time left of --minutes {self.args.minutes:g}"
        part: Callable[[], None] = getattr(self, f"run_{name}")
        started = time.perf_counter()
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        finally:
            shutil.rmtree(self.args.ram / "store", ignore_errors=True)
            shutil.rmtree(self.args.dir / "store", ignore_errors=True)
        print(f"part {name}: {time.perf_counter() - started:.0f} s", flush=True)
        return ""


def require_room(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends where the stores do not fit, before anything is made."""
    config = TARGETS[args.target]()
    needed = int(args.samples * min(2100, args.longest) * bytes_per_position(5, config.hidden_size))
    for option, folder in (("--ram", args.ram), ("--dir", args.dir)):
        free = shutil.disk_usage(folder).free
        if needed > free:
            parser.error(
                f"{option} {folder} has {free / 1e9:.0f} GB free, a raw store of --samples {args.samples} takes some "
                f"{needed / 1e9:.0f} GB: give fewer samples, or another folder"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="folder on the disk that is to be measured")
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm/extract-bench"), help="folder on a RAM disk")
    parser.add_argument("--part", nargs="+", choices=PARTS, help="default: all, without `gap` on a CPU")
    parser.add_argument("--target", choices=sorted(TARGETS), default="qwen3-8b")
    parser.add_argument("--samples", type=int, default=400, help="some 2,000 tokens each; 120 for hybrid-27b")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of the longest sample")
    parser.add_argument("--token-budget", type=int, default=16_384)
    parser.add_argument("--write-bytes", type=int, default=8 << 30, help="of the bare write")
    parser.add_argument("--minutes", type=float, default=9.0, help="no part begins after so long")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="sizes that say only whether the benchmark runs")
    args = parser.parse_args()
    if args.tiny:
        args.target, args.samples, args.longest, args.token_budget = "tiny", 40, 256, 2048
        args.write_bytes = 16 << 20
        args.device = args.device if torch.cuda.is_available() else "cpu"
    if args.device == "cpu":
        torch.set_num_threads(1)  # as a worker does
    else:
        if not torch.cuda.is_available():
            parser.error(f"--device {args.device}: torch {torch.__version__} sees no CUDA device; --tiny runs on a CPU")
        torch.cuda.set_device(args.device)
    args.part = args.part or [name for name in PARTS if name != "gap" or args.device != "cpu"]
    for folder in (args.dir, args.ram):
        folder.mkdir(parents=True, exist_ok=True)
    require_room(args, parser)
    bench = Bench(args)
    left_out = {name: reason for name in PARTS if name in args.part if (reason := bench.run(name))}
    shutil.rmtree(args.ram)
    for name, reason in left_out.items():
        print(f"part {name} left out: {reason}")
    rows = [{"name": name, "value": round(value, 4), "unit": unit} for name, value, unit in bench.rows]
    print(json.dumps({"bench": "extract", "left_out": left_out, "rows": rows}))
    sys.exit(1 if left_out else 0)


if __name__ == "__main__":
    main()
