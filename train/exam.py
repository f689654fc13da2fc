"""The exam during training: the walk over the run's held-out answers, as numbers for metrics.jsonl.

Knows the run's samples and the walk; it changes no weight.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from .order import HELD_OUT_SPLIT
from .run import Run
from .step import TrainStep
from .walk import recorded_samples, walk


def examine(run: Run, step: TrainStep, beat: Callable[[], None]) -> dict[str, Any]:
    """Acceptance of the step's drafter on the first `eval_samples` held-out samples; None where there are none.

    `beat` is called before each forward.
    """
    started = time.monotonic()

    def forward(*inputs: Any) -> torch.Tensor:
        beat()
        return step.infer(*inputs)

    numbers = run.samples(HELD_OUT_SPLIT)[: run.facts.eval_samples]
    samples = recorded_samples(run.reader, numbers, run.facts.spec.tap_layers)
    acceptance = walk(step.drafter, step.embedding, step.head.weight, samples, step.shape, forward=forward)
    return {
        "acceptance_length": acceptance.acceptance_length,
        "acceptance_length_cycles": acceptance.acceptance_length_cycles,
        "num_prompts": acceptance.num_prompts,
        "num_cycles": acceptance.num_cycles,
        "exam_s": time.monotonic() - started,
        **{f"num_cycles_gaining_{k}": count for k, count in enumerate(acceptance.histogram, start=1)},
    }
