"""The work of one process of `prepare`: a stretch of input lines becomes samples, or reasons.

A pure function of the lines and the settings: it knows no other line, no folder and no other process, so it does not
matter who does it, or when. Lines are told apart by their place in their file, never by an id.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from .chats.chat import ChatRenderer, Sample
from .chats.plain_text import plain_ids, plain_sample
from .config import PrepareConfig
from .cutting import CutSample, LengthRules, Uncut, cut
from .lines.inputs import Chunk, InputLine, LeftOut, lines_in
from .lines.messages import is_asked
from .lines.shapes import KEYS, Chat, Line, Text, Tokens, line_meant, shown_id
from .targets.facts import TextSide

NOT_SAMPLED = "not in the sample"
OUT_OF_RANGE = "token id out of range"
TOOLS_UNREAD = "tools_unread"


@dataclass(slots=True)
class Outcome:
    """What became of one input line: samples, or the reason why there is none."""

    number: int
    name: str | None
    """The line's own id as text, for the user's eyes."""
    num_replaced: int
    """Lone surrogates that became U+FFFD."""
    fault: LeftOut | None = None
    samples: list[CutSample] = field(default_factory=list)
    split: str = ""
    task: str = ""
    origin: str = ""
    samples_left_out: list[tuple[int, LeftOut]] = field(default_factory=list)
    """Samples of a used line that were not kept: their numbers from 1, and why."""
    turns_left_out: list[tuple[int, LeftOut]] = field(default_factory=list)
    """Answers of a used line that are not trained on: their numbers from 1, and why."""
    unread_options: list[str] = field(default_factory=list)
    """Template options of the line's own that the template does not read."""
    noted: dict[str, int] = field(default_factory=dict)
    """What else is to be told of a used line, by the name of its count."""


@dataclass(slots=True)
class Maker:
    """Makes samples with one tokenizer, template and set of rules.

    `longest` is the longest sample in tokens, `date` (ISO) the one that a template which prints it is given.
    """

    config: PrepareConfig
    side: TextSide
    longest: int
    date: str | None = None
    renderer: ChatRenderer | None = None
    special: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.special = frozenset(self.side.special_ids)

    def make(self, chunk: Chunk) -> list[Outcome]:
        """One outcome for every input line of the chunk, in order."""
        return [self.outcome(line) for line in lines_in(chunk, KEYS)]

    def outcome(self, line: InputLine) -> Outcome:
        found = new_outcome(line)
        try:
            meant = self.understood(line)
            self.finish(found, meant, self.samples_of(meant, found))
        except LeftOut as fault:
            found.fault = fault
        return found

    def understood(self, line: InputLine) -> Line:
        """What the line means. Raises LeftOut where it means nothing, or is not in the asked sample."""
        meant = line_meant(line)
        share = self.config.sample
        if share is not None and content_share(meant.content) >= share:
            raise LeftOut(NOT_SAMPLED, f"--sample {share}")
        return meant

    def samples_of(self, line: Line, found: Outcome) -> Sequence[Sample | Uncut]:
        """The samples of a line that holds its answers."""
        if isinstance(line.content, Tokens):
            self.check_ids(line.content.ids)
            if not line.content.is_wanted:
                raise LeftOut("weight 0", "label false of the line")
            if not np.any(line.content.mask):
                raise LeftOut("no answer", "no token is trained on by loss_mask or labels")
            return [Uncut(line.content.ids, line.content.mask)]
        if isinstance(line.content, Text):
            return [plain_sample(self.side, line.content.text)]
        rendered = self.chats().render(line.content)
        found.turns_left_out, found.noted = rendered.turns_left_out, rendered.noted
        return rendered.samples

    def question_of(self, line: Line) -> list[int]:
        """The prompt ids of a line that the target is to answer."""
        content = line.content
        if isinstance(content, Tokens):
            self.check_ids(content.ids)
            trained = np.flatnonzero(content.mask)
            prompt = [int(token) for token in content.ids[: trained[0] if len(trained) else None]]
        elif isinstance(content, Text):
            prompt = plain_ids(self.side, content.text)[0]
        else:
            prompt = self.chats().question(content)
        if prompt and not isinstance(content, Tokens):
            self.check_ids(prompt)
        if not prompt:
            raise LeftOut("no question", "the answer starts at the first token, nothing comes before it")
        if len(prompt) > self.longest - 2:
            raise LeftOut("prompt fills the window", f"{len(prompt)} tokens, the longest sample has {self.longest}")
        return prompt

    def finish(self, found: Outcome, line: Line, samples: Sequence[Sample | Uncut]) -> None:
        """Cuts the samples, and notes what is kept of them. Raises the first LeftOut when it is none."""
        found.num_replaced += line.num_replaced
        rules = LengthRules(self.longest, self.config.long, self.config.min_trained)
        first_fault: LeftOut | None = None
        for number, sample in enumerate(samples, start=1):
            try:
                kept = cut(sample, rules)
                if not isinstance(line.content, Tokens):  # ready ids were checked as they were given
                    self.check_ids(kept.made.ids)
            except LeftOut as fault:
                first_fault = first_fault or fault
                found.samples_left_out.append((number, fault))
                continue
            found.samples.append(kept)
        if not found.samples:
            found.samples_left_out.clear()
            raise first_fault or LeftOut("no answer", "the line gives no sample")
        found.split = line.split or self.split_of(line.content)
        found.task, found.origin = line.task, line.origin or self.config.origin
        if isinstance(line.content, Chat):
            template, tools = self.chats().template, line.content.tools
            found.unread_options = template.unread(line.content.options, tools)
            if tools and template.unread({"tools": tools}, tools):
                found.noted[TOOLS_UNREAD] = 1

    def split_of(self, content: Chat | Tokens | Text) -> str:
        """By sha256 of what the line asks, whatever of its answers is used: of all it says where it asks nothing.

        So all samples of a line, and all lines that ask the same, are on one side.
        """
        if isinstance(content, Tokens):
            hashed = np.array(self.asking_ids(content), dtype="<u4").tobytes()
        else:
            hashed = json.dumps(first_question(content)).encode()
        return "heldout" if share_of(hashlib.sha256(hashed).digest()) >= self.config.split else "train"

    def asking_ids(self, tokens: Tokens) -> Any:
        """The ids before the first trained one; all where they ask nothing: a single token, or special tokens alone."""
        trained = np.flatnonzero(tokens.mask)
        before = tokens.ids[: trained[0] if len(trained) else None]
        is_prompt = len(before) > 1 and not all(int(token) in self.special for token in before)
        return before if is_prompt else tokens.ids

    def check_ids(self, ids: Any) -> None:
        """Raises LeftOut for ids that the target's embedding has no row for: a tokenizer may have more than it."""
        lowest, highest = int(np.min(ids)), int(np.max(ids))
        if lowest < 0 or highest >= self.side.vocab_size:
            raise LeftOut(OUT_OF_RANGE, f"ids {lowest}..{highest}, the target has {self.side.vocab_size}")

    def chats(self) -> ChatRenderer:
        """Made at the first chat: token ids need no template."""
        if self.renderer is None:
            now = None if self.date is None else datetime.fromisoformat(self.date)
            self.renderer = ChatRenderer(self.side, self.config.template, self.config.turns, now)
        return self.renderer


def new_outcome(line: InputLine) -> Outcome:
    return Outcome(line.number, shown_id(line), line.num_replaced)


def first_question(content: Chat | Text) -> list[list[str]]:
    """The messages before the first answer that something asks for, as roles and contents; a text is one message.

    Blanks around a content and the tools do not count.
    """
    if isinstance(content, Text):
        return [["text", content.text.strip()]]
    messages = content.messages
    turns = (turn for turn, message in enumerate(messages) if message["role"] == "assistant")
    first = next((turn for turn in turns if is_asked(messages, turn)), len(messages))
    return [[message["role"], message["content"].strip()] for message in messages[:first]]


def content_share(content: Chat | Tokens | Text) -> float:
    """A number in [0, 1) that the content of a line alone decides, spread evenly; for `--sample`."""
    if isinstance(content, Tokens):
        raw = np.asarray(content.ids, dtype="<i8").tobytes() + np.asarray(content.mask, dtype=np.uint8).tobytes()
    elif isinstance(content, Text):
        raw = content.text.encode("utf-8", "surrogatepass")
    else:
        raw = json.dumps([content.messages, content.tools, content.options], sort_keys=True, default=str).encode()
    return share_of(hashlib.sha256(b"sample\0" + raw).digest())


def share_of(hashed: bytes) -> float:
    return int.from_bytes(hashed[:8], "big") / 2**64
