"""Control marks: special tokens that a template or the end of an answer writes, never the words of a text.

A tokenizer reads such a mark out of any text in which it is typed. In a question that is what a server does as well;
in an answer it is a token that the target would not have written there as part of its words. Think marks in a content
are the thought that a server without a reasoning parser leaves there.
"""

import json
from collections.abc import Collection, Iterable
from itertools import chain

from ..lines.inputs import LeftOut
from ..lines.messages import Message
from ..targets.facts import TextSide
from .encoding import Encoder
from .templates import thought_of

THINK_MARKS = ("<think>", "</think>", "[THINK]", "[/THINK]")
INSIDE = "control mark inside the answer"
END_INSIDE = "end mark inside the answer"


def first_mark(ids: Iterable[int], marks: Collection[int]) -> int | None:
    """The first of these ids that is one of the marks."""
    return next((token for token in ids if token in marks), None)


class ControlMarks:
    """The control marks of one target, looked for in the words of assistant messages: content, thought and calls."""

    def __init__(self, side: TextSide, encoder: Encoder) -> None:
        held = side.tokenizer.added_tokens_decoder
        added = {token: mark.content for token, mark in held.items()}
        self.encoder = encoder
        self.literal = {token: text for token, text in added.items() if not held[token].normalized}
        self.think = tuple(text for text in added.values() if text in THINK_MARKS)
        self.special = frozenset(token for token in side.special_ids if added.get(token) not in THINK_MARKS)
        self.stops = frozenset(side.eos_ids)
        self.inside = self.special - self.stops

    def typed(self, message: Message) -> str | None:
        """The first control mark in a message's own words."""
        return self.special_in(message, self.special) or self.nested_thought(message)

    def check(self, message: Message, ids: list[int], text: str) -> None:
        """Raises LeftOut where an answer holds a control mark, no end mark, that the message typed.

        What the template writes inside an answer, around a thought or a call, stands in no words of the message.
        """
        held = self.inside.intersection(ids)
        mark = (self.special_in(message, held) if held else None) or self.nested_thought(message, text)
        if mark is not None:
            raise LeftOut(INSIDE, f"{mark!r} is typed in its words")

    def check_end(self, message: Message, last: int) -> None:
        """Raises LeftOut where the last id of an answer is an end mark that the message typed.

        For a template that closes turns with nothing: any other would write its own mark after the typed one.
        """
        mark = self.special_in(message, self.stops & {last})
        if mark is not None:
            raise LeftOut(END_INSIDE, f"{mark!r} is typed in its words")

    def special_in(self, message: Message, marks: Collection[int]) -> str | None:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", [])]
        words = [thought_of(message), message["content"], *calls]
        if not any(self.literal.get(token, "") in text for token in marks for text in words):
            return None
        found = first_mark(chain.from_iterable(self.encoder.encode_all(words)), marks)
        return None if found is None else self.encoder.decode([found])

    def nested_thought(self, message: Message, text: str = "") -> str | None:
        """A think mark in a thought beside the content, or in the content where the template writes both thoughts."""
        thought, content = thought_of(message), message["content"]
        if not thought:
            return None
        twice = [mark for mark in self.think if mark in content and text.count(mark) > content.count(mark)]
        return next((mark for mark in self.think if mark in thought or mark in twice), None)
