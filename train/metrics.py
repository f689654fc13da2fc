"""A run's numbers: `metrics.jsonl`, one flat JSON object a line, one fixed name for each number.

Knows names, lines and steps. It does not know where a number comes from, and no torch.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from .. import UserError
from ..store.files import StorageError, publish, storage_error, write_all
from .value_rules import is_count, is_finite, is_object, is_text, or_none, wrong_key

METRICS_NAME = "metrics.jsonl"
TRAIN, EXAM, ORIGIN = "train", "exam", "exam of one origin"
GOES_ON = "training goes on from the newest checkpoint"
NUMBERED = re.compile(r"(?<=_)\d+$")  # names that come once for each slot or length
LINE = {"step": is_count, "kind": is_text}
OF_KIND = {
    TRAIN: {"loss": is_finite},
    EXAM: {"acceptance_length": or_none(is_finite), "num_prompts": is_count},
}
"""What is read of a line again: by the run that goes on, at its end, and by a sweep."""

DEFINITIONS = {
    "kind": "'train': numbers of one optimizer update; 'exam': numbers of one walk over held-out answers; 'exam of one "
    "origin': the walk over those of one origin alone, where held-out samples have several",
    "step": "optimizer updates done when the line was written; an exam at step 0 is of the drafter that the run starts "
    "from: random weights, or those of `drafter.init`",
    "epoch": "passes over the training rows after this update: rows trained on over rows of the first pass",
    "loss": "sum of weight * objective (`loss.objective`, cross-entropy by default) over sum of weights, natural log, "
    "over all labelled slots of the step",
    "weight": "sum of the slots' weights: what loss and gradient are divided by",
    "accuracy": "share of labelled slots (slot 0 and slots behind an answer's end have none) whose likeliest token is "
    "the label",
    "accuracy_slot_K": "the same for slot K alone, K = 1 ... block_size - 1",
    "survival_slot_K": "share of the step's blocks whose first K drafts are all right, K = 1 ... block_size - 1; "
    "drafts behind an answer's end do not count as right; the shares add up to accepted_drafts_teacher_forced",
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
    "step_s": "time of the update on the device: its rows, forward, backward and optimizer (exams and checkpoints "
    "not), seconds",
    "wait_s": "the part of step_s in which the device had nothing to compute because the next row was not there, "
    "seconds",
    "reduce_s": "with several ranks: how long rank 0 waited for the others and the gradients were summed, seconds",
    "rate_tok_s": "num_tokens over step_s",
    "rate_block_tok_s": "draft positions of the step's rows, slot 0 and spare slots counted, over step_s",
    "rate_tflops": "operations of forward, loss and backward of rank 0's rows in the step, by the formulas of "
    "`train/flops.py` (multiply and add are two, spare anchors counted, no recomputation), over step_s, in 10^12",
    "mfu": "rate_tflops over what the device of rank 0 reached in a matrix product of 8192 x 8192 x 8192 in the run's "
    "number format at the start of the process; on CUDA only",
    "memory_peak_bytes": "CUDA: most bytes that torch had allocated on rank 0's device since the process began; CPU: "
    "largest resident memory of rank 0's process",
    "rows_ready": "rows that lay ready in the loader's ring when rank 0 asked for one, mean over its rows in the step; "
    "0 throughout says that the loader is behind",
    "origin": "who wrote the held-out answers, as their samples say: 'target greedy', 'target T=0.7' (sampled, at that "
    "temperature), 'elsewhere'; several stand in one line. The walk equals decoding on this very target's greedy "
    "answers; on others it measures agreement with their text",
    "acceptance_length": "tokens produced by one cycle, bonus token included, mean over held-out answers of each "
    "answer's mean over its cycles; null where there is nothing to measure",
    "acceptance_length_cycles": "the same, mean over all cycles of all held-out answers; null where there is none",
    "held_out_accuracy": "accuracy on the held-out samples: drafts from every anchor that training could draw",
    "held_out_accuracy_slot_K": "the same for slot K alone",
    "held_out_survival_slot_K": "survival_slot_K over the same blocks",
    "held_out_accepted_drafts_teacher_forced": "leading right slots of a block, mean over the same blocks",
    "held_out_acceptance_length_teacher_forced": "held_out_accepted_drafts_teacher_forced + 1; rosier than the walk, "
    "which starts its blocks where the draft before failed",
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

    def write(self, kind: str, step: int, **numbers: float | int | str | None) -> None:
        """Adds one line; numbers must be named in DEFINITIONS and finite, None where there is none."""
        unknown = {NUMBERED.sub("K", name) for name in numbers} - set(DEFINITIONS)
        assert not unknown, f"numbers without a definition: {unknown}"
        infinite = [n for n, value in numbers.items() if isinstance(value, float) and not math.isfinite(value)]
        assert not infinite, f"not finite at step {step}: {infinite}"
        line = json.dumps({"kind": kind, "step": step, **numbers}) + "\n"
        with self.explained():
            write_all(self.fd, [memoryview(line.encode())])

    def sync(self) -> None:
        """Makes every line durable: a checkpoint must never be ahead of them."""
        with self.explained():
            os.fdatasync(self.fd)

    def close(self) -> None:
        with self.explained():
            os.close(self.fd)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turns an OSError of its body into a UserError; a descriptor's error names no file."""
        try:
            yield
        except OSError as error:
            raise storage_error(error, self.path, safe=GOES_ON) from error

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StorageError:
            if kind is None:  # else what ended the block is the news
                raise


def read_lines(path: Path) -> list[str]:
    """The whole lines of the file; a last line that a kill cut short does not count.

    Raises UserError for a whole line that lacks what a run reads of it.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    for number, line in enumerate(lines, start=1):
        values = object_of(line)
        if (fault := fault_of(values)) is not None:
            raise UserError(
                f"line {number} of {str(path)!r} is broken: {line[:80]!r}{fault}",
                "one JSON object on every line, with a step and a kind, and the numbers of that kind",
                "bring the file back as it was, or train into another --out: a run ends with the numbers of its exams"
                if values.get("kind") == EXAM
                else "remove that line; the checkpoints of the run are not touched by it",
            )
    return lines


def object_of(line: str) -> dict[str, Any]:
    """The JSON object of a line; empty where it is none."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return values if is_object(values) else {}


def fault_of(values: dict[str, Any]) -> str | None:
    """What a line lacks, as the end of a sentence that shows it; None where nothing is wrong."""
    if not values:
        return ""
    rules = LINE | OF_KIND.get(str(values.get("kind")), {})
    missing = next((name for name in rules if name not in values), None)
    if missing is not None:
        return f" has no {missing}"
    wrong = wrong_key(values, rules)
    return wrong and f" has the {wrong} {values[wrong]!r}"


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines as dicts, in order; of one kind, or of all."""
    lines = [json.loads(line) for line in read_lines(path)]
    return [line for line in lines if kind is None or line["kind"] == kind]
