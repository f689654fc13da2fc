"""The most device memory that a step takes, in eight configurations, beside what the planner says of each."""

import dataclasses

import torch
from dflash_offline.train.memory import predict_peak

from .cases import CASES, Case, rows_of
from .ours import Choices, Ours, peak_gib
from .table import Part


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """`room_gib` is more than it takes: how many may run beside each other."""

    name: str
    case: Case
    choices: Choices
    room_gib: int


def longer(case: Case, times: float) -> Case:
    return dataclasses.replace(case, row_tokens=int(case.row_tokens * times), anchors=int(case.anchors * times))


CONFIGS = [
    Config("8b", CASES["8b"], Choices(chunk_blocks=64), 60),
    Config("8b_chunk_512", CASES["8b"], Choices(chunk_blocks=512), 66),
    Config("8b_half_muon", longer(CASES["8b"], 0.5), Choices(chunk_blocks=128, optimizer="muon"), 60),
    Config("8b_few_anchors", dataclasses.replace(CASES["8b"], anchors=512), Choices(chunk_blocks=64), 60),
    Config("27b", CASES["27b"], Choices(chunk_blocks=128), 84),
    Config("27b_checkpointing", CASES["27b"], Choices(chunk_blocks=128, is_checkpointed=True), 64),
    Config("8b_double_checkpointing", longer(CASES["8b"], 2), Choices(chunk_blocks=64, is_checkpointed=True), 64),
    Config("small_muon", CASES["small"], Choices(chunk_blocks=256, optimizer="muon"), 24),
]


def predicted_gib(config: Config) -> float:
    """By the package's planner; exams are left out, since none is measured here."""
    choices = config.choices
    assert choices.chunk_blocks is not None
    plan = predict_peak(
        config.case.spec(),
        config.case.shape,
        optimizer=choices.optimizer,
        chunk_blocks=choices.chunk_blocks,
        is_checkpointed=choices.is_checkpointed,
    )
    return plan.step_bytes / 2**30


def measure(part: Part, config: Config, device: torch.device) -> None:
    """Two updates: the second one finds the optimizer's state there. Peaks of all, and of each half of the second."""
    name = f"memory_{config.name}"
    with rows_of(config.case, device) as rows:
        ours = Ours(config.case, device, config.choices)
        staged = torch.empty(rows.memory.shape[1], dtype=torch.uint8, device=device)  # as the trainer has it, unused
        first, second = rows.draw(2)
        built = held_gib()
        ours.run([first])
        peaks, standing = [peak_gib()], held_gib()
        forget_peak()
        ours.step.reset()
        ours.batch.load(second)
        ours.step.accumulate(ours.batch)
        peaks.append(peak_gib())
        forget_peak()
        ours.optimizer.step(ours.step.gradients, ours.step.sums.weight)
        peaks.append(peak_gib())
        del staged
    part.put(f"peak_gib_{name}", max(peaks), "GiB")
    part.facts[name] = {
        "case": dataclasses.asdict(config.case),
        "choices": dataclasses.asdict(config.choices),
        "num_parameters": sum(parameter.numel() for parameter in ours.drafter.parameters()),
        "gib_built": built,
        "gib_between_updates": standing,
        "gib_peak_first_update": peaks[0],
        "gib_peak_forward_backward": peaks[1],
        "gib_peak_update": peaks[2],
    }
    part.put(f"predicted_gib_{name}", predicted_gib(config), "GiB")


def held_gib() -> float:
    return torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def put_error(part: Part) -> None:
    """The largest error of a prediction over all configurations, where every one was predicted and measured."""
    errors = []
    for config in CONFIGS:
        measured = part.values.get(f"peak_gib_memory_{config.name}")
        predicted = part.values.get(f"predicted_gib_memory_{config.name}")
        if measured is None or predicted is None:
            what = "measured" if measured is None else "predicted"
            part.left_out["memory_prediction_error"] = f"{config.name} was not {what}"
            return
        errors.append(abs(predicted[0] / measured[0] - 1.0) if measured[0] else 0.0)
    part.put("memory_prediction_error", max(errors))
