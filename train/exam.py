"""The exam during training: the walk over the run's held-out answers, as numbers for metrics.jsonl.

Knows the run's samples and the walk; it changes no weight.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .evaluate.acceptance import Acceptance, AnswerCycles
from .evaluate.walk import recorded_samples, walk
from .order import HELD_OUT_SPLIT
from .ranks import Ranks
from .run import Run
from .slot_counts import SlotCounts
from .step import TrainStep

HELD_OUT = "held_out_"  # begins the names of slots on held-out samples


class Stopped(Exception):
    """The run was told to end while an exam was under way."""


def examine(
    run: Run, step: TrainStep, ranks: Ranks, is_stopped: Callable[[], bool]
) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """What the step's drafter does on the first `eval_samples` held-out samples, and the walk by origin.

    Numbers are None where there are no samples; the second are for each origin of answers, where there are several.
    Each rank walks its share of the samples; all get the numbers of all. `is_stopped` is asked before each forward:
    where one rank was told to end, every rank gets None instead. Raises NotFinite for a drafter whose output is none.
    """
    started = time.monotonic()
    slots = SlotCounts(step.shape.block_size)
    parts = ranks.gather((own_answers(run, step, ranks, is_stopped, slots), slots), "the exam of the other ranks")
    if any(answers is None for answers, _ in parts):
        return None
    acceptance = Acceptance(tuple(answer for answers, _ in parts for answer in answers), step.shape.block_size)
    counts = SlotCounts(step.shape.block_size)
    for _, own in parts:
        counts.merge(own)
    by_origin = acceptance.by_origin()
    numbers = {
        "origin": ", ".join(by_origin) or None,
        **walk_numbers(acceptance),
        "exam_s": time.monotonic() - started,
        **counts.numbers(HELD_OUT),
        **{f"num_cycles_gaining_{k}": count for k, count in enumerate(acceptance.histogram, start=1)},
    }
    several = by_origin if len(by_origin) > 1 else {}
    return numbers, [{"origin": origin, **walk_numbers(part)} for origin, part in several.items()]


def walk_numbers(acceptance: Acceptance) -> dict[str, Any]:
    return {
        "acceptance_length": acceptance.acceptance_length,
        "acceptance_length_cycles": acceptance.acceptance_length_cycles,
        "num_prompts": acceptance.num_prompts,
        "num_cycles": acceptance.num_cycles,
    }


def own_answers(
    run: Run, step: TrainStep, ranks: Ranks, is_stopped: Callable[[], bool], slots: SlotCounts
) -> tuple[AnswerCycles, ...] | None:
    """The answers of this rank's share, neighbours in the order of the store; None where the run is told to end.

    `slots` counts their slots.
    """

    def forward(*inputs: Any) -> torch.Tensor:
        ranks.channel.beat()
        if is_stopped():
            raise Stopped
        return step.infer(*inputs)

    numbers = np.array_split(run.samples(HELD_OUT_SPLIT)[: run.facts.eval_samples], ranks.count)[ranks.number]
    samples = recorded_samples(run.reader, numbers, run.facts.spec.tap_layers)
    try:
        return walk(
            step.drafter, step.embedding, step.head.weight, samples, step.shape, forward=forward, slots=slots
        ).answers
    except Stopped:
        return None
