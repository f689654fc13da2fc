"""A run's numbers: `metrics.jsonl`, one flat JSON object a line, one fixed name for each number.

Knows names, lines and steps. It does not know where a number comes from, and no torch.
"""

import json
import math
import os
import re
from pathlib import Path
from types import TracebackType
from typing import Any

from .. import UserError
from ..store.files import publish, storage_error, write_all

METRICS_NAME = "metrics.jsonl"
TRAIN, EXAM = "train", "exam"
NUMBERED = re.compile(r"(?<=_)\d+$")  # names that come once for each slot or length

DEFINITIONS = {
    "kind": "'train': numbers of one optimizer update; 'exam': numbers of one walk over held-out answers",
    "step": "optimizer updates done when the line was written; an exam at step 0 is of the drafter that the run starts "
    "from: random weights, or those of `drafter.init`",
    "epoch": "passes over the training rows after this update: rows trained on over rows of the first pass",
    "loss": "sum of weight * objective (`loss.objective`, cross-entropy by default) over sum of weights, natural log, "
    "over all labelled slots of the step",
    "weight": "sum of the slots' weights: what loss and gradient are divided by",
    "accuracy": "share of labelled slots (slot 0 and slots behind an answer's end have none) whose likeliest token is "
    "the label",
    "accuracy_slot_K": "the same for slot K alone, K = 1 ... block_size - 1",
    "accepted_drafts_teacher_forced": "leading right slots of a block, mean over the step's blocks; they start at "
    "anchors drawn from the training text, so it is rosier than decoding: compare it with itself only",
    "acceptance_length_teacher_forced": "accepted_drafts_teacher_forced + 1",
    "acceptance_expected": "sum over tokens of min(p, q), p the target's and q the drafter's probability at "
    "temperature 1: the chance that a sampled draft is kept, mean over labelled slots; only with objectives on p",
    "grad_norm": "length of the gradient of the mean loss before clipping, over all trained tensors",
    "lr": "learning rate of the update (of the matrices, where the optimizer is muon)",
    "num_blocks": "blocks of the step's rows that count (spare slots not), count",
    "num_samples": "samples in the step's rows, count",
    "num_tokens": "tokens of samples in the step's rows, padding not counted",
    "fill": "num_tokens over all tokens of the step's rows, 0 to 1",
    "step_s": "wall time of the update: its rows, forward, backward and optimizer (exams and checkpoints not), seconds",
    "wait_s": "the part of step_s in which the trainer waited for the loader, seconds",
    "rate_block_tok_s": "draft positions of the step's rows, slot 0 and spare slots counted, over step_s",
    "acceptance_length": "tokens produced by one cycle, bonus token included, mean over held-out answers of each "
    "answer's mean over its cycles; null where there is nothing to measure",
    "acceptance_length_cycles": "the same, mean over all cycles of all held-out answers; null where there is none",
    "num_prompts": "held-out answers with at least one cycle, count",
    "num_cycles": "cycles of the exam, count",
    "num_cycles_gaining_K": "cycles of the exam that produced K tokens, K = 1 ... block_size, count",
    "exam_s": "wall time of the exam, seconds",
}


class MetricsFile:
    """Appends lines; at the start it forgets what lies after the step that a run resumes from."""

    def __init__(self, path: Path, step: int) -> None:
        """Keeps the lines up to and including `step`; `step` -1 starts an empty file."""
        self.path = path
        kept = [line for line in read_lines(path) if json.loads(line)["step"] <= step]
        publish(path, "".join(f"{line}\n" for line in kept).encode())
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND)

    def write(self, kind: str, step: int, **numbers: float | int | None) -> None:
        """Adds one line; numbers must be named in DEFINITIONS and finite, None where there is none."""
        unknown = {NUMBERED.sub("K", name) for name in numbers} - set(DEFINITIONS)
        assert not unknown, f"numbers without a definition: {unknown}"
        infinite = [name for name, value in numbers.items() if value is not None and not math.isfinite(value)]
        assert not infinite, f"not finite at step {step}: {infinite}"
        line = json.dumps({"kind": kind, "step": step, **numbers}) + "\n"
        try:
            write_all(self.fd, [memoryview(line.encode())])
        except OSError as error:
            raise storage_error(error, self.path) from error

    def sync(self) -> None:
        """Makes every line durable: a checkpoint must never be ahead of them."""
        os.fdatasync(self.fd)

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_lines(path: Path) -> list[str]:
    """The whole lines of the file; a last line that a kill cut short does not count.

    Raises UserError for a whole line that is no JSON object with a step.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            is_line = isinstance(json.loads(line)["step"], int)
        except (ValueError, KeyError, TypeError):
            is_line = False
        if not is_line:
            raise UserError(
                f"line {number} of {str(path)!r} is broken: {line[:80]!r}",
                "one JSON object with a step on every line",
                "remove that line; the checkpoints of the run are not touched by it",
            )
    return lines


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines as dicts, in order; of one kind, or of all."""
    lines = [json.loads(line) for line in read_lines(path)]
    return [line for line in lines if kind is None or line["kind"] == kind]
