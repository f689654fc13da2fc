"""`--responses target`: the lines' questions, answered by the target in this process, in the order of the input."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from .. import UserError
from ..progress import bar, say
from ..threads import cpu_threads
from .collect import Collector
from .devices import num_cuda_devices
from .lines.inputs import Chunk, LeftOut, lines_in
from .lines.shapes import KEYS, Chat, Line, Tokens
from .origins import GREEDY
from .responses import answer_prompts
from .work import Maker, Outcome, new_outcome

PROMPTS_AT_ONCE = 4096


def chosen_device(device: str) -> str:
    """'auto' is the first GPU where there is one, else the CPU.

    `device` names one (PrepareConfig sees to that); raises UserError for a GPU that is not there.
    """
    if device == "cpu":
        return device
    available = num_cuda_devices()
    if device == "auto":
        return "cuda" if available else "cpu"
    if int(device.partition(":")[2] or 0) >= available:
        there = f"CUDA devices 0-{available - 1}" if available else "no CUDA device"
        raise UserError(f"device = {device!r} is not there", f"this machine has {there}", "correct device")
    return device


@dataclass(slots=True)
class Question:
    """A line on its way: `meant` and `prompt` where it asks something, else the outcome says why not."""

    source: Path
    outcome: Outcome
    meant: Line | None = None
    prompt: list[int] | None = None


def answer(chunks: Iterator[Chunk], maker: Maker, collector: Collector) -> None:
    """Lets the target answer, a window of prompts at a time, and keeps the input's order."""
    import torch

    from .targets.hf import load_target

    config = maker.config
    target = load_target(config.target, device=chosen_device(config.device), dtype=config.dtype)
    torch.set_num_threads(cpu_threads(target.facts.hidden_size))
    if target.kernel_note:
        say(target.kernel_note)
    asked = questions(chunks, maker)
    with bar("answer", " prompts", total=0) as shown:
        while window := list(islice(asked, PROMPTS_AT_ONCE)):
            open_ones = [one for one in window if one.prompt is not None]
            shown.total += len(open_ones)
            answers = answer_prompts(
                target,
                [one.prompt for one in open_ones if one.prompt is not None],
                eos_ids=maker.side.eos_ids,
                max_new_tokens=config.answer_tokens,
                longest=maker.longest,
                token_budget=config.token_budget,
                bar=shown,
            )
            for one, written in zip(open_ones, answers):
                assert one.meant is not None
                collector.counts.answers_cut += written.is_cut
                collector.counts.answers_replaced += has_answer(one.meant)
                try:
                    maker.finish(one.outcome, one.meant, [written.sample])
                    one.outcome.origin = GREEDY
                except LeftOut as fault:
                    one.outcome.fault = fault
            for one in window:
                collector.take(one.source, [one.outcome])


def questions(chunks: Iterator[Chunk], maker: Maker) -> Iterator[Question]:
    for chunk in chunks:
        for line in lines_in(chunk, KEYS):
            found = Question(chunk.source, new_outcome(line))
            try:
                found.meant = maker.understood(line)
                found.prompt = maker.question_of(found.meant)
            except LeftOut as fault:
                found.outcome.fault = fault
            yield found


def has_answer(line: Line) -> bool:
    if isinstance(line.content, Tokens):
        return bool(line.content.mask.any())
    return isinstance(line.content, Chat) and line.content.messages[-1]["role"] == "assistant"
