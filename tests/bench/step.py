"""The training step on one GPU: against the card's peak, its bare kernels, and speculators.

Each part is measured in processes of its own and kept as DIR/PART.json; parts of several runs are merged into one
table, whose last line is the rows as JSON:
    python tests/bench/step.py --part 8b --part 27b --out DIR
    python tests/bench/step.py --merge DIR
Rows are synthetic: random states in pinned host memory, full rows of samples of 4,096 tokens that are all trained on,
anchors new in every step and drawn as the loader draws them. A step is bf16, one row and one AdamW update; as in the
trainer the next row is copied to the device while it computes. speculators copies its row within the step, as its own
trainer does: its rate without that copy is beside it.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from step_parts import frames, memory, peer, speed
from step_parts.cases import CASES, Case, rows_of, tiny
from step_parts.ours import Choices, Ours
from step_parts.table import Part, merged, parts_in
from store_parts.rows import show

PARTS = ("8b", "27b", "27b_sliding", "small", "recompiles", "memory", "speculators")
LIMIT_S = 420  # of one process
ROOM_GIB = 128  # for the processes of part memory that run beside each other
NUM_ROWS = 200  # of part recompiles


class Runner:
    """Starts the processes of a part, each with a file of its own in `folder`, and reads what they measured."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.failed: list[str] = []

    def start(self, process: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, "--process", process, "--out", str(self.folder)]
        command += ["--device", self.args.device, "--steps", str(self.args.steps)]
        if self.args.chunk_blocks is not None:
            command += ["--chunk-blocks", str(self.args.chunk_blocks)]
        return subprocess.Popen(command + ["--tiny"] * self.args.tiny)

    def end(self, process: str, started: subprocess.Popen[bytes]) -> Part | None:
        """What the process measured, None where it failed."""
        try:
            code: int | str = started.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
            code = f"none in {LIMIT_S} s"
        if code == 0:
            return Part.read(self.folder / f"{process}.json")
        print(f"{process}: FAILED, exit code {code}", flush=True)
        self.failed.append(f"{process} (exit code {code})")
        return None

    def run(self, process: str) -> Part | None:
        return self.end(process, self.start(process))


def run_part(name: str, runner: Runner) -> Part:
    """All processes of a part, one after another; those of part memory beside each other."""
    part = Part(name)
    if name == "speculators":
        found = compare_with_speculators(runner)
    elif name == "memory":
        found = measure_memory(runner)
    elif name == "small":
        found = [runner.run("small-plain")]
        if runner.args.device.startswith("cuda"):
            found.append(runner.run("small-graphs"))
        else:
            part.left_out["gpu_idle_small"] = "CUDA graphs need a CUDA device"
    else:
        found = [runner.run(name)]
    for own in found:
        if own is not None:
            part.values |= own.values
            part.left_out |= own.left_out
            part.facts |= own.facts
    if name == "speculators":
        peer.put_ratios(part)
    elif name == "memory":
        memory.put_error(part)
    if runner.failed:
        part.facts["failed"] = runner.failed
    return part


def compare_with_speculators(runner: Runner) -> list[Part | None]:
    """Their fused loss, or the eager one where it fails; half the row on both sides where neither runs."""
    for row in ("whole", "half"):
        for loss in runner.args.peer_loss:
            theirs = runner.run(f"theirs-{loss}-{row}")
            if theirs is not None:
                return [theirs, runner.run(f"ours-{row}")]
    return []


def measure_memory(runner: Runner) -> list[Part | None]:
    """As many processes at a time as have room on the device."""
    waiting, running = list(memory.CONFIGS), []
    found: list[Part | None] = []
    while waiting or running:
        room = ROOM_GIB - sum(config.room_gib for config, _ in running)
        if waiting and waiting[0].room_gib <= room:
            config = waiting.pop(0)
            running.append((config, runner.start(f"memory-{config.name}")))
            continue
        config, process = running.pop(0)
        found.append(runner.end(f"memory-{config.name}", process))
    return found


def run_process(process: str, args: argparse.Namespace) -> None:
    """One process of a part: measures, and writes its own file."""
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # `cuda` alone has none
    torch.manual_seed(0)
    part = Part(process, facts=facts_of(args, device))
    choices = Choices(chunk_blocks=args.chunk_blocks)

    def sized(case: Case) -> Case:
        return tiny(case) if args.tiny else case

    kind, _, rest = process.partition("-")
    if kind == "small":
        graphs = Choices(chunk_blocks=args.chunk_blocks, has_graph=rest == "graphs")
        speed.measure_small(part, sized(CASES["small"]), device, graphs, args.steps)
    elif kind == "recompiles":
        frames.measure(part, sized(CASES["recompiles"]), device, 20 if args.tiny else NUM_ROWS)
    elif kind == "memory":
        config = next(config for config in memory.CONFIGS if config.name == rest)
        memory.measure(part, dataclasses.replace(config, case=sized(config.case)), device)
    elif kind in ("ours", "theirs"):
        whole = sized(CASES["8b"])
        case = whole.halved() if rest.endswith("half") else whole
        if kind == "theirs":
            peer.measure(part, case, device, rest.partition("-")[0], args.steps)
        else:
            measure_beside(part, case, device, choices, args.steps)
    else:
        speed.measure(part, sized(CASES[process]), device, choices, args.steps)
    part.save(args.out)
    for name, (value, unit) in part.values.items():  # a run that is cut off keeps them in its log
        print(f"{process}: {name} {value:.6g} {unit}", flush=True)
    print(f"{process}: {json.dumps(part.facts)}", flush=True)


def measure_beside(part: Part, case: Case, device: torch.device, choices: Choices, num_steps: int) -> None:
    """Our side of the comparison with speculators."""
    with rows_of(case, device) as rows:
        ours = Ours(case, device, choices)
        staged = speed.staged_rows(rows, ours)
        ours.train(staged, peer.WARM_UP)
        taken, again = ours.time(staged, num_steps), ours.time(staged, num_steps)
    print(f"ours beside speculators: {taken}", flush=True)
    peer.put_side(part, "ours_beside", case, taken, again)


def facts_of(args: argparse.Namespace, device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "steps": str(args.steps), "tiny": str(args.tiny)} | {
        package: installed_version(package) for package in ("torch", "triton", "transformers")
    }


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def run_parts(args: argparse.Namespace) -> bool:
    """Measures the parts that were asked for; False where a process failed without another to take its place."""
    args.out.mkdir(parents=True, exist_ok=True)
    is_whole = True
    for name in args.part:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="step-bench-") as folder:
            runner = Runner(args, Path(folder))
            part = run_part(name, runner)
        part.save(args.out)
        is_whole = is_whole and bool(part.values) and (name == "speculators" or not runner.failed)
        print(f"part {name}: {time.perf_counter() - started:.0f} s", flush=True)
    return is_whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="may be given several times")
    parser.add_argument("--out", type=Path, help="folder of the parts' files")
    parser.add_argument("--merge", type=Path, metavar="DIR", help="prints the table of the parts in DIR")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default 10)")
    parser.add_argument("--chunk-blocks", type=int, help="blocks whose logits exist at once (default: the package's)")
    parser.add_argument("--peer-loss", nargs="+", default=["fused", "eager"], help="losses of speculators to try")
    parser.add_argument("--tiny", action="store_true", help="sizes that say only whether the benchmark runs")
    parser.add_argument("--process", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process:
        run_process(args.process, args)
        return
    if not args.merge and not (args.part and args.out):
        parser.error("give --part and --out, or --merge")
    is_whole = run_parts(args) if args.part else True
    show("step", *merged(parts_in(args.merge or args.out, PARTS)))
    sys.exit(0 if is_whole else 1)


if __name__ == "__main__":
    main()
