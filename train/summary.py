"""A run in words: what `dflash inspect RUN` prints. Reads the run's files; no torch."""

from pathlib import Path
from typing import Any

from ..settings import as_lines
from .facts import CHECKPOINTS_NAME, read_facts
from .kinds import describe
from .metrics import EXAM, METRICS_NAME, TRAIN, read_metrics

SHOWN_EXAMS = 12


def describe_run(run_dir: Path) -> str:
    """Facts of the run, its checkpoints, and its exams over the steps."""
    facts = read_facts(run_dir)
    spec = facts.spec
    metrics = read_metrics(run_dir / METRICS_NAME) if (run_dir / METRICS_NAME).is_file() else []
    steps = [line["step"] for line in metrics if line["kind"] == TRAIN]
    rows = f"{facts.row_tokens} tokens, {facts.anchors} anchors; {facts.rows_per_step} rows a step"
    described = {
        "run": str(run_dir),
        "target": f"{facts.target['name']}, weights {facts.target['weights_sha256'][:12]}",
        "store": f"{facts.store_path}, plan {facts.store['plan_sha256'][:16]}",
        "drafter": f"{spec.num_layers} layers, hidden {spec.hidden_size}, taps {list(spec.tap_layers)}",
        "attention": describe(spec.attention),
        "started": f"from {facts.init['path']}" if facts.init is not None else "from random weights",
        "block": f"{spec.block_size} tokens, mask token {spec.mask_token_id}; {spec.slot_meaning}",
        "rows": f"{rows}, {facts.rows_per_epoch} rows an epoch",
        "samples": f"{facts.num_train:,} to train on, {facts.num_held_out:,} held out",
        "steps": f"{max(steps, default=0)} of {facts.steps} done, seed {facts.seed}, {facts.dtype}",
        "checkpoints": ", ".join(checkpoint_names(run_dir)) or "none yet",
    }
    return "\n".join([as_lines(described), *exam_lines(metrics)])


def checkpoint_names(run_dir: Path) -> list[str]:
    folder = run_dir / CHECKPOINTS_NAME
    return sorted(entry.name for entry in folder.iterdir() if ".tmp." not in entry.name) if folder.is_dir() else []


def exam_lines(metrics: list[dict[str, Any]]) -> list[str]:
    """A table of at most a dozen exams, the last one always among them."""
    exams = [line for line in metrics if line["kind"] == EXAM]
    if not exams:
        return ["exams        none yet"]
    losses = {line["step"]: line["loss"] for line in metrics if line["kind"] == TRAIN}
    every = -(-len(exams) // SHOWN_EXAMS)
    shown = exams[::-every][::-1]
    origin = exams[-1].get("origin") or "unknown"
    head = f"acceptance length (held-out answers, bonus token included; origin: {origin})"
    lines = ["", f"{'step':>8}  {'loss':>8}  {head}"]
    for exam in shown:
        loss, length = losses.get(exam["step"]), exam["acceptance_length"]
        text = "nothing to measure" if length is None else f"{length:.3f}"
        lines.append(f"{exam['step']:>8}  {'-' if loss is None else f'{loss:.4f}':>8}  {text}")
    return lines
