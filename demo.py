"""The demo: the real commands in a row, on prompts that the tiny target can answer.

It writes the prompts, then runs `dflash` commands as a user would, printing each line
before it runs; everything it reports comes from files that those commands wrote. Nothing
here touches a model or a store.
"""

import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from . import UserError
from .settings import require, setting

SMOLLM2_MASK = 16  # <empty_output>: its tokenizer has no mask token and fills the embedding; no chat holds this one
SETTINGS: dict[str, dict[str, int]] = {
    "tiny": {"prompts": 2048, "exam": 64, "layers": 2, "block": 8, "steps": 700, "tokens": 192},
    "tiny-hybrid": {"prompts": 2048, "exam": 64, "layers": 2, "block": 8, "steps": 700, "tokens": 192},
    "smollm2": {"prompts": 192, "exam": 12, "layers": 2, "block": 8, "steps": 300, "tokens": 64},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """The whole pipeline, small."""

    out: str = setting("./demo", "folder for everything the demo makes", flag="--out")
    target: str = setting(
        "tiny",
        "tiny or tiny-hybrid (packaged, 1.1 and 1.6 M parameters, the second with Gated DeltaNet) or smollm2 "
        "(a real chat model, extra 'gguf')",
        flag="--target",
    )
    prompts: int | None = setting(None, "prompts to train on, count; default: 2048 (192 for smollm2)", flag="--prompts")
    exam: int | None = setting(
        None, "held-out prompts to decode at the end, count; default: 64 (12 for smollm2)", flag="--exam"
    )
    shards: int = setting(2, "extraction workers, count", flag="--shards")
    steps: int | None = setting(None, "training steps; default: 700 (300 for smollm2)", flag="--steps")
    seed: int = setting(0, "seed of the prompts and of the training", flag="--seed")

    def __post_init__(self) -> None:
        require(self.target in SETTINGS, "target", self.target, f"one of {', '.join(SETTINGS)}")
        for name in ("prompts", "exam", "steps"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "at least 1")

    def value(self, name: str) -> int:
        """A number as given, else the target's default."""
        given = getattr(self, name, None)
        return SETTINGS[self.target][name] if given is None else given


def demo(config: DemoConfig) -> None:
    """Runs every command and prints the summary; its last two lines are the result.

    Raises UserError when a command fails (its own message stands above).
    """
    started = time.perf_counter()
    out = Path(config.out)
    if out.exists() and any(out.iterdir()):
        raise UserError(
            f"the folder {config.out!r} is not empty",
            "a new or empty folder for the demo",
            "remove it or name another with --out",
        )
    write_prompts(out, config)
    for line in command_lines(out, config):
        run(line)
    summary(out, config, time.perf_counter() - started)


def write_prompts(out: Path, config: DemoConfig) -> None:
    """Two files of chats: prompts for the target to answer, and the exam with right answers."""
    from .extract.targets.tasks import distinct_tasks
    from .store.files import make_folder, publish, storage_error

    train = distinct_tasks(config.value("prompts"), config.seed, held_out=False)
    exam = distinct_tasks(config.value("exam"), config.seed, held_out=True)
    try:
        make_folder(out)
    except OSError as error:
        raise storage_error(error, out) from error

    def line(task: Any, split: str) -> dict[str, Any]:
        chat = [{"role": "user", "content": task.prompt}]
        return {"messages": chat, "task": task.kind, "split": split}

    prompts = [line(task, "train") for task in train] + [line(task, "heldout") for task in exam]
    answers = [{**line(task, "heldout"), "answer": task.answer} for task in exam]
    for name, lines in (("prompts.jsonl", prompts), ("exam.jsonl", answers)):
        publish(out / name, "".join(json.dumps(entry) + "\n" for entry in lines).encode())
    click.echo(f"{len(train)} prompts to train on, {len(exam)} others held out, in {out}")


def command_lines(out: Path, config: DemoConfig) -> list[list[str]]:
    """Every command of the demo, as typed after `dflash`."""
    data, store, drafter = str(out / "data"), str(out / "store"), str(out / "run")
    layers, block, steps, tokens = (str(config.value(name)) for name in ("layers", "block", "steps", "tokens"))
    return [
        ["prepare", str(out / "prompts.jsonl"), "--target", config.target, "--responses", "target"]
        + ["--max-new-tokens", tokens, "--set", "min_trained=2", "--out", data],
        ["plan", "--data", data, "--store", store, "--shards", str(config.shards)],
        ["extract", "--data", data, "--store", store, "--shards", str(config.shards)],
        ["verify", store],
        ["inspect", store],
        ["train", "--store", store, "--out", drafter, "--layers", layers, "--block-size", block]
        + (["--mask-token", str(SMOLLM2_MASK)] if config.target == "smollm2" else [])
        + ["--steps", steps, "--set", "rows.row_tokens=512", "--set", "rows.rows_per_step=2"]
        + ["--seed", str(config.seed)],
        ["inspect", drafter],
        ["evaluate", drafter, "--offline"],
        ["evaluate", drafter, "--prompts", str(out / "exam.jsonl"), "--max-new-tokens", tokens],
        ["export", drafter, "--out", str(out / "export")],
    ]


def run(line: list[str]) -> None:
    click.echo(f"\n$ dflash {shlex.join(line)}")
    done = subprocess.run([sys.executable, "-m", f"{__package__}.cli", *line], check=False)
    if done.returncode:
        raise UserError(
            f"`dflash {line[0]}` ended with exit code {done.returncode}",
            "every command of the demo to succeed",
            "read its message above; `dflash doctor` checks this machine",
        )


def summary(out: Path, config: DemoConfig, seconds: float) -> None:
    """What was measured, what to do next, and the two result lines."""
    result = json.loads((out / "run" / "evaluation.json").read_text(encoding="utf-8"))
    click.echo(f"\nThe demo took {seconds:.0f} s. Everything it made is in {out}; the plots are:")
    for picture in sorted((out / "run").glob("*.png")):
        click.echo(f"  {picture}")
    click.echo("On your own model and chats the same commands are:")
    click.echo("  dflash prepare CHATS.jsonl --target YOUR_MODEL --out data")
    click.echo("  dflash extract --data data --store store --shards 6")
    click.echo("  dflash train --store store --out runs/first")
    click.echo("  dflash evaluate runs/first --target YOUR_MODEL")
    click.echo("  dflash export runs/first --out served")
    click.echo(f"lossless: {result['num_equal']}/{result['num_prompts']}")
    click.echo(f"acceptance length: {result['acceptance_length']:.2f}")
