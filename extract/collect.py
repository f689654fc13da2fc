"""From input lines to written samples: every line is used, or left out by name and counted.

Knows lines, chats, ids and the sample writer; knows nothing of folders, facts or reruns.
Lines are told apart by their place in their file, never by an id.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np

from .. import UserError
from ..progress import bar, say
from ..store.samples import SampleWriter, eligible_anchors
from ..threads import cpu_threads
from .chat import ChatRenderer, Sample
from .config import PrepareConfig
from .counts import Counts
from .devices import num_cuda_devices
from .inputs import InputLine, LeftOut, read_lines, short_names
from .responses import answer_prompts
from .shapes import KEYS, Line, Tokens, short, understand
from .targets.facts import TextSide

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
        raise UserError(f"device = {device!r} is not there", f"this machine has {there}", "correct --device")
    return device


@dataclass(slots=True)
class Collector:
    """One run over the input lines of all sources; the writer and the file are the caller's."""

    config: PrepareConfig
    side: TextSide
    longest: int
    counts: Counts
    writer: SampleWriter
    left_out: TextIO
    renderer: ChatRenderer | None = None
    names: dict[Path, str] = field(default_factory=dict)

    def run(self, sources: Sequence[Path]) -> None:
        self.names = dict(zip(sources, short_names(sources)))
        lines = islice((line for path in sources for line in read_lines(path, KEYS)), self.config.limit)
        if self.config.responses == "target":
            self.answer(lines)
            return
        for line, understood in self.understood(bar("prepare", " lines", lines)):
            try:
                self.keep(line, understood, self.samples_of(understood))
            except LeftOut as fault:
                self.leave_out(line, fault)

    def understood(self, lines: Iterable[InputLine]) -> Iterator[tuple[InputLine, Line]]:
        """Counts every line; gives those that mean something, leaves the others out."""
        for line in lines:
            self.counts.lines_in += 1
            self.counts.sources[self.name(line)] += 1
            self.counts.replaced_surrogates += line.num_replaced
            try:
                if line.fault is not None or line.value is None:
                    raise line.fault or LeftOut("not an object")
                understood = understand(line.value)
            except LeftOut as fault:
                self.leave_out(line, fault)
                continue
            yield line, understood

    def samples_of(self, line: Line) -> list[Sample]:
        """The samples of a line that holds its answers."""
        if isinstance(line.content, Tokens):
            self.check_ids(line.content.ids)
            if not any(line.content.mask):
                raise LeftOut("no answer", "no token is trained on by loss_mask or labels")
            return [Sample(line.content.ids, line.content.mask)]
        rendered = self.chats().render(line.content)
        self.counts.turns_left_out += rendered.left_out
        return rendered.samples

    def question_of(self, line: Line) -> list[int]:
        """The prompt ids of a line that the target is to answer."""
        if isinstance(line.content, Tokens):
            self.check_ids(line.content.ids)
            mask = line.content.mask
            prompt = line.content.ids[: mask.index(True)] if True in mask else line.content.ids
        else:
            prompt = self.chats().question(line.content)
            self.counts.answers_replaced += line.content.messages[-1]["role"] == "assistant"
        if not prompt:
            raise LeftOut("no question", "the answer starts at the first token, nothing comes before it")
        if len(prompt) > self.longest - 2:
            raise LeftOut("prompt fills the window", f"{len(prompt)} tokens, the longest sample has {self.longest}")
        return prompt

    def answer(self, lines: Iterable[InputLine]) -> None:
        """Lets the target answer, a window of prompts at a time, and keeps the input's order."""
        import torch

        from .targets.hf import load_target

        target = load_target(self.config.target, device=chosen_device(self.config.device), dtype=self.config.dtype)
        torch.set_num_threads(cpu_threads(target.facts.hidden_size))
        if target.kernel_note:
            say(target.kernel_note)
        understood = self.understood(lines)
        with bar("answer", " prompts", total=0) as shown:
            while window := list(islice(understood, PROMPTS_AT_ONCE)):
                asked: list[tuple[InputLine, Line, list[int]]] = []
                for line, meant in window:
                    try:
                        asked.append((line, meant, self.question_of(meant)))
                    except LeftOut as fault:
                        self.leave_out(line, fault)
                shown.total += len(asked)
                answers = answer_prompts(
                    target,
                    [prompt for _, _, prompt in asked],
                    eos_ids=self.side.eos_ids,
                    max_new_tokens=self.config.max_new_tokens,
                    longest=self.longest,
                    token_budget=self.config.token_budget,
                    bar=shown,
                )
                for (line, meant, _), answer in zip(asked, answers):
                    self.counts.answers_cut += answer.is_cut
                    try:
                        self.keep(line, meant, [answer.sample])
                    except LeftOut as fault:
                        self.leave_out(line, fault)

    def keep(self, line: InputLine, meant: Line, samples: list[Sample]) -> None:
        """Cuts, writes and counts the samples of a line. Raises LeftOut when none holds an anchor."""
        kept: list[tuple[np.ndarray, np.ndarray]] = []
        for sample in samples:
            ids = np.array(sample.ids[: self.longest], dtype=np.uint32)  # [S]
            mask = np.array(sample.mask[: self.longest], dtype=bool)  # [S]
            if eligible_anchors(mask).sum() >= self.config.min_anchors:
                kept.append((ids, mask))
                self.counts.cut += len(sample.ids) > self.longest
            else:
                self.counts.samples_without_anchor += 1
        if not kept:
            self.counts.samples_without_anchor -= len(samples)
            is_cut = any(len(sample.ids) > self.longest for sample in samples)
            longest = max(len(sample.ids) for sample in samples)
            raise LeftOut(
                "no anchor left after the cut" if is_cut else "answer too short",
                f"{longest} tokens, fewer than {self.config.min_anchors} anchors in the first {self.longest}",
            )
        split = meant.split or self.split_of(samples[0])
        for ids, mask in kept:
            self.writer.add(ids, mask, split=split, task=meant.task, source=self.name(line), source_line=line.number)
            self.counts.add_sample(ids, mask, split)
        self.counts.lines_used += 1

    def split_of(self, first: Sample) -> str:
        """By sha256 of the prompt ids of the line's first sample; of all ids where it has no prompt.

        So all samples of a line, and all lines that ask the same, are on one side.
        """
        start = first.mask.index(True) or len(first.ids)
        digest = hashlib.sha256(np.array(first.ids[:start], dtype="<u4").tobytes()).digest()
        return "heldout" if int.from_bytes(digest[:8], "big") < self.config.held_out * 2**64 else "train"

    def leave_out(self, line: InputLine, fault: LeftOut) -> None:
        known = line.value.get("id") if line.value is not None else None
        entry = {
            "source": self.name(line),
            "line": line.number,
            "id": known if known is None else short(known),
            "reason": fault.reason,
            "detail": fault.detail[:300],
        }
        self.left_out.write(json.dumps(entry) + "\n")
        self.counts.add_left_out(entry)

    def check_ids(self, ids: list[int]) -> None:
        highest = max(ids)
        if min(ids) < 0 or highest >= self.side.vocab_size:
            raise LeftOut("token id out of range", f"ids {min(ids)}..{highest}, the target has {self.side.vocab_size}")

    def chats(self) -> ChatRenderer:
        """Made at the first chat: token ids need no template."""
        if self.renderer is None:
            self.renderer = ChatRenderer(self.side, self.config.template)
        return self.renderer

    def name(self, line: InputLine) -> str:
        return self.names[line.source]
