"""The process of one run: trains to a rung or to the end, and there measures what the sweep ranks by.

Each is a fresh interpreter; torch is imported where it is used, behind the folder of the compiled kernels.
"""

import io
import os
import statistics
import sys
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from ...watch import Channel
from ..config import TrainConfig
from ..facts import StorePart
from ..metrics import METRICS_NAME, TRAIN, read_metrics
from ..outcome import REPORT_NAME
from ..rank import Rank
from ..worker import train_here
from .kernels import take_over

MEASURED = "measured"  # kind of the message with the results of a finished run
NO_KERNELS = "no kernels"  # kind of the message that those of another run could not be taken over
CONTEXT, WARM_UPS, REPEATS = 512, 3, 20  # of the timed draft: tokens before the block, calls


def train_one(
    channel: Channel, config: TrainConfig, rank: Rank, part: StorePart | None, log_path: str, kernels: Path | None
) -> None:
    """Trains the run to its rung, or to its end and tells its results. What it writes to stderr goes to a file.

    It reads the `part` of the store that all runs of the sweep do. A new run begins with a copy of the compiled
    `kernels` of another, where it gets one.
    """
    file = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, sys.stderr.fileno())
    if kernels is not None and (reason := take_over(kernels, Path(config.out), channel.beat)):
        channel.tell((NO_KERNELS, {"reason": reason}))
    train_here(channel, config, rank, part)
    is_to_its_end = config.stop_at is None  # a run that another command finished may have rungs before it
    if is_to_its_end and (Path(config.out) / REPORT_NAME).exists():
        channel.tell((MEASURED, measured(channel, Path(config.out), rank.device)))


def measured(channel: Channel, run_dir: Path, device: str) -> dict[str, Any]:
    """The `results` of a finished run; see docs/sweeps.md."""
    import torch

    from ..evaluate.config import EvaluateConfig
    from ..evaluate.evaluate import evaluate
    from ..export.tensors import num_parameters
    from ..facts import read_facts

    if torch.cuda.is_initialized():
        torch.compiler.reset()  # the walk has rows of another shape, and is compiled anew for them, once
    with redirect_stderr(Heard(channel)):
        report = evaluate(run_dir, EvaluateConfig(offline=True, device=device), *[not_opened] * 3)
    found = report.as_dict()
    kept = ("step", "acceptance_length", "acceptance_length_cycles", "intervals", "num_cycles")
    origins = sorted({answer.origin for answer in report.acceptance.answers})
    updates = read_metrics(run_dir / METRICS_NAME, TRAIN)
    return {
        **{name: found[name] for name in kept},
        "num_prompts": found["num_measured"],
        "origin": ", ".join(origins) or None,
        "num_parameters": num_parameters(read_facts(run_dir).spec),
        "draft_s": draft_seconds(run_dir, device),
        "loss": updates[-1]["loss"] if updates else None,
        "train_s": sum(line["step_s"] for line in updates),
    }


def not_opened(*_: Any) -> Any:
    raise AssertionError("the offline exam opens no target and reads no questions")


def draft_seconds(run_dir: Path, device: str) -> float:
    """Median time of one draft: a block through the drafter and the head, behind a context that it has read."""
    import torch

    from ...store.frozen import read_frozen
    from ..checkpoint import LATEST, load_drafter
    from ..device import pick_device
    from ..evaluate.drafting import choose_tokens

    chosen = pick_device(device)
    drafter, facts = load_drafter(run_dir, LATEST, chosen, torch.float32 if chosen.type == "cpu" else None)
    weight, frozen, block = drafter.fc.weight, read_frozen(Path(facts.store_path)), facts.spec.block_size
    head = (frozen.embedding if frozen.is_tied else frozen.head).to(weight)  # [V, H]
    context = min(CONTEXT, facts.spec.max_positions - block)
    positions = torch.arange(context + block, device=chosen)
    cache, times = drafter.new_cache(), []
    with torch.no_grad():
        drafter.extend(cache, weight.new_ones(context, weight.shape[1]), positions[:context])
        embeds = frozen.embedding[:1].to(weight).expand(block, -1)  # [B, H]
        for _ in range(WARM_UPS + REPEATS):
            started = time.perf_counter()
            hidden = drafter.propose(cache, embeds, positions[context:])  # [B, H]
            choose_tokens(hidden[1:], head).tolist()  # a list: the device has ended
            times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UPS:])


class Heard(io.TextIOBase):
    """What is written here, the bar of an exam say, is a sign of life and nothing more."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def write(self, text: str) -> int:
        self.channel.beat()
        return len(text)
