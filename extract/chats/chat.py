"""From a chat to token ids with a loss mask, through the target's own chat template.

The rule: a token is trained on only if the target would have been asked for it after exactly
the tokens before it. For every assistant turn the chat before it is rendered with the
generation prompt (the *prompt*, what a server would send), and the chat up to its end without;
what the second adds to the first, up to and including the token that ends the turn, is the
answer (`answers` says how that is had where templates render otherwise). Nothing is found by
searching the text for marks, so marks typed by a user open nothing; a turn whose own words hold
one is left out (`control_marks`).

What the template writes in the target's place is in the sample and not in the mask: an empty
thought before an answer that holds none. Where a template closes a turn with nothing, as GLM's
do, the target ends it with the mark of the role that comes next; if that mark is one of the
target's stop tokens it is added, and trained on, after the last turn too. An answer that was
cut by a limit (`finish_reason` length) has no end to train on, and nothing follows it in its sample.

A turn is left out where its prompt lacks a message of the chat (`dropped_messages`), or where nothing asks for it.

Turns share one sample as long as the next prompt begins with the ids so far. Where it does not,
because the template rewrote the history (as those that drop old thoughts do), the next turn
starts a sample of its own, in which only that turn and its followers are trained on.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ... import UserError
from ..lines.inputs import LeftOut
from ..lines.shapes import OWN_OPTIONS, Chat, options_under
from ..targets.facts import TextSide
from .answers import Answer, asked_prompt, find_answer
from .control_marks import END_INSIDE, ControlMarks
from .dropped_messages import check_messages, dropped_message
from .encoding import Encoder
from .template_habits import Habits, read_habits
from .templates import ChatTemplate, Renders, thought_of

TURNS = ("auto", "each", "last")
MAX_HABITS = 256
WITHOUT_THOUGHT = "thoughts_unwritten"
WITHOUT_END = "answers_without_end"


@dataclass(slots=True)
class Sample:
    """Token ids [S], what of them is trained on [S], and the number of tokens up to each answer's end, ascending."""

    ids: list[int]
    mask: list[bool]
    ends: list[int] = field(default_factory=list)

    def extend(self, prompt: list[int], answer: list[int]) -> None:
        """Grows to prompt + answer, where the prompt begins with the ids so far."""
        self.mask += [False] * (len(prompt) - len(self.ids)) + [True] * len(answer)
        self.ids = prompt + answer
        self.ends.append(len(self.ids))


@dataclass(slots=True)
class Rendered:
    """The samples of one chat, and its assistant turns that are not trained on: their numbers from 1, and why."""

    samples: list[Sample] = field(default_factory=list)
    turns_left_out: list[tuple[int, LeftOut]] = field(default_factory=list)
    noted: Counter[str] = field(default_factory=Counter)
    """How many answers in the samples have something to be told, by the name of its count."""

    @property
    def left_out(self) -> Counter[str]:
        """Those turns by reason."""
        return Counter(fault.reason for _, fault in self.turns_left_out)


class ChatRenderer:
    """Renders chats with one tokenizer and one set of template options.

    `turns`: "auto" lets turns share a sample, "each" makes one sample of every assistant turn, "last" only of the
    last usable one. `now` is the date for templates that print one (`prints_date`), default the present.
    Raises UserError when the tokenizer has no chat template (or named ones alone), or an option is not its own.
    """

    def __init__(
        self, side: TextSide, options: dict[str, Any], turns: str = "auto", now: datetime | None = None
    ) -> None:
        template = getattr(side.tokenizer, "chat_template", None)
        if template is None or (isinstance(template, dict) and "default" not in template):
            named = f" but {', '.join(sorted(template))}" if template else ""
            raise UserError(
                f"the tokenizer of target {side.name!r} has no chat template{named}",
                "a template (chat_template.jinja) for chats, or input lines with input_ids and loss_mask",
                "add the template of the served model, or tokenize the chats yourself",
            )
        if taken := sorted(OWN_OPTIONS & set(options)):
            raise UserError(
                f"template.{taken[0]} = {options[taken[0]]!r}",
                "options of the chat template itself, like enable_thinking",
                f"drop template.{taken[0]}",
            )
        assert turns in TURNS
        self.tokenizer = side.tokenizer
        self.template = ChatTemplate(side.tokenizer, now)
        self.encoder = Encoder(side.tokenizer)
        self.options = options
        self.turns = turns
        self.stops = set(side.eos_ids)
        self.ends = self.stops | set(side.special_ids)
        self.control_marks = ControlMarks(side, self.encoder)
        self.end_marks = tuple(self.encoder.decode([token]) for token in side.eos_ids)
        self.habits: dict[tuple[str, bool], Habits] = {}
        self.followers: dict[str, int | None] = {}

    @property
    def prints_date(self) -> bool:
        """True where the template writes the present date: its samples then depend on `now`."""
        return "strftime_now" in self.template.source(None) + self.template.source([{}])

    def render(self, chat: Chat) -> Rendered:
        """Samples of every usable assistant turn. Raises LeftOut when there is none."""
        renders, habits = self.opened(chat)
        turns = [i for i, message in enumerate(renders.messages) if message["role"] == "assistant"]
        faults: dict[int, LeftOut] = {}
        samples: list[Sample] = []
        noted: Counter[str] = Counter()
        for group in ([turn] for turn in reversed(turns)) if self.turns == "last" else [turns]:
            is_open = False
            for answer, prompt, ids in self.answers(renders, habits, group, faults):
                if not is_open or self.turns == "each" or prompt[: len(samples[-1].ids)] != samples[-1].ids:
                    samples.append(Sample([], []))
                samples[-1].extend(prompt, ids)
                is_open = not answer.is_cut
                if not habits.is_thinking and thought_of(renders.messages[answer.turn]):
                    noted[WITHOUT_THOUGHT] += 1
                if not answer.is_cut and ids[-1] not in self.ends:
                    noted[WITHOUT_END] += 1
            if samples:
                break
        if not samples:
            raise faults[min(faults)] if faults else LeftOut("no answer", "the chat holds no assistant turn")
        return Rendered(samples, [(turns.index(turn) + 1, faults[turn]) for turn in sorted(faults)], noted)

    def question(self, chat: Chat) -> list[int]:
        """The prompt ids that the target is to answer; answers at the chat's end are dropped.

        Raises LeftOut for a chat that asks nothing, or whose prompt lacks a message of it.
        """
        count = len(chat.messages)
        while count and chat.messages[count - 1]["role"] == "assistant":
            count -= 1
        renders, habits = self.opened(chat)
        prompt = asked_prompt(renders, habits, count)
        if fault := dropped_message(renders, count):
            raise fault
        return self.encoder.encode(prompt)

    def opened(self, chat: Chat) -> tuple[Renders, Habits]:
        """The chat under its options, and what the template does under those."""
        options = self.options_of(chat)
        key = (json.dumps(options, sort_keys=True, default=repr), bool(chat.tools))
        if key not in self.habits:
            if len(self.habits) >= MAX_HABITS:  # lines that each bring options of their own
                self.habits.clear()
            self.habits[key] = read_habits(self.template, options, with_tools=bool(chat.tools))
        habits = self.habits[key]
        renders = Renders(self.template, chat, options)
        for place, message in enumerate(renders.messages):
            if message["role"] in habits.unread_results:
                renders.messages[place] = message | {"role": "tool"}
        return renders, habits

    def options_of(self, chat: Chat) -> dict[str, Any]:
        """The line's own options over those of the run. Raises LeftOut for reserved ones and where the two disagree."""
        return options_under(self.options, chat.options)

    def answers(
        self, renders: Renders, habits: Habits, turns: list[int], faults: dict[int, LeftOut]
    ) -> Iterator[tuple[Answer, list[int], list[int]]]:
        """Every usable answer of these turns with the ids of its prompt and its own; the others go to `faults`."""
        found: list[Answer] = []
        for turn in turns:
            try:
                found.append(find_answer(renders, habits, turn, self.end_marks))
            except LeftOut as fault:
                faults[turn] = fault
        lacking = check_messages(renders, [answer.turn for answer in found])
        faults |= lacking
        found = [answer for answer in found if answer.turn not in lacking]
        texts = [text for answer in found for text in (answer.prompt, answer.prompt + answer.text)]
        encoded = self.encoder.encode_all(texts)
        for answer, prompt, joint in zip(found, encoded[::2], encoded[1::2]):
            message = renders.messages[answer.turn]
            follower = habits.after_call if message.get("tool_calls") else habits.after_answer
            try:
                ids = self.up_to_end(answer, prompt, joint, follower, habits.closing)
                if not habits.closing.strip():
                    self.control_marks.check_end(message, ids[-1])
                self.control_marks.check(message, ids, answer.text)
            except LeftOut as fault:
                faults[answer.turn] = fault
                continue
            yield answer, prompt, ids

    def up_to_end(self, answer: Answer, prompt: list[int], joint: list[int], follower: str, closing: str) -> list[int]:
        """The answer's ids up to its end mark, which is the first id that stops the target.

        A template that closes turns with no such mark leaves it to the next role's, the `follower`, if that one
        stops the target; else one that closes with another special token ends there; else the answer ends with the
        last character that is no blank. Of a cut answer the end mark is left off.
        """
        ids = self.after(prompt, joint, answer.text)
        stop = min((ids.index(token) for token in self.stops if token in ids), default=None)
        if stop is not None and not self.is_end(ids[stop:], closing):
            mark = self.encoder.decode([ids[stop]])
            raise LeftOut(END_INSIDE, f"{mark!r} is not its last token")
        if answer.is_cut and stop == 0:
            raise LeftOut("empty answer", "nothing stands before the end mark of a cut answer")
        if answer.is_cut:
            return ids if stop is None else ids[:stop]
        if stop is not None:
            return ids[: stop + 1]
        mark = self.stop_at_start(follower)
        if mark is None:
            stop = next((i for i in reversed(range(len(ids))) if ids[i] in self.ends), None)
            if stop is not None and self.encoder.is_blank(ids[stop + 1 :]):
                return ids[: stop + 1]
        text = answer.text.rstrip()
        ids = self.after(prompt, self.encoder.encode(answer.prompt + text), text)
        return ids if mark is None else [*ids, mark]

    def is_end(self, ids: list[int], closing: str) -> bool:
        """True where a stop token has nothing but blanks after it, or what the template itself closes turns with."""
        return self.encoder.is_blank(ids[1:]) or self.encoder.decode(ids).strip() == closing.strip()

    def stop_at_start(self, follower: str) -> int | None:
        """The id that a text begins with, where that id stops the target."""
        if follower not in self.followers:
            first = self.encoder.encode(follower.lstrip())[:1]
            self.followers[follower] = first[0] if first and first[0] in self.stops else None
        return self.followers[follower]

    def after(self, prompt: list[int], joint: list[int], text: str) -> list[int]:
        """Ids of `text` where it follows the prompt; tokenized alone where the two would merge."""
        if joint[: len(prompt)] == prompt:
            return joint[len(prompt) :]
        alone = self.encoder.encode(text)
        if self.encoder.decode(alone) != text:
            raise LeftOut("tokens merge across the start of the answer", f"the answer starts with {text[:40]!r}")
        return alone
