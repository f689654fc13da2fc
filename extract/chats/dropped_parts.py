"""Which part of a message its template leaves out of the answer: the thought, the content, a call or its arguments.

The words of a message may stand in its answer twice, so that finding them does not say which part was written: a
name that the content mentions, a thought that the content repeats. Thought and content must therefore stand in places
of their own; and where there are calls, whose text is the template's, all parts are rendered once more with a
word of ours in each. Knows text only.
"""

import re
from itertools import count
from typing import Any

from ..lines.inputs import LeftOut
from ..lines.json_text import is_blank
from ..lines.shapes import Message
from .template_habits import Habits
from .templates import THOUGHT_KEYS, Renders, thought_of

THINK_MARK = re.compile(r"</?think>")
DROPPED = "template drops part of the answer"


def missing_part(message: Message, text: str, habits: Habits) -> str | None:
    """A part of the message that has no place of its own in the answer's text, None where all have.

    The longest part is looked for first: no shorter one holds it. Templates that know no thoughts may leave out one
    that stands beside the content: their targets write none.
    """
    content, thought = message["content"], thought_of(message).strip()
    parts = [content.strip()]
    if habits.is_thinking:
        has_own = "</think>" in content
        parts = [part.strip() for part in THINK_MARK.split(content)] if has_own else parts
        parts += [] if has_own and thought in parts else [thought]
    pieces = [text]
    for part in sorted(filter(None, parts), key=len, reverse=True):
        at = next((place for place, piece in enumerate(pieces) if part in piece), None)
        if at is None:
            return part
        before, _, after = pieces[at].partition(part)
        pieces[at : at + 1] = [before, after]
    return None


def check_calls(renders: Renders, habits: Habits, turn: int, message: Message, whole: str) -> None:
    """Raises LeftOut where the template drops a call of the turn, its arguments, or what stands beside the calls.

    `whole` is the rendered chat up to the turn's end; the words put into the parts are words that it does not hold.
    """
    word = next(found for number in count() if (found := f"vocatioprobe{number}x") not in whole)
    calls = message["tool_calls"]
    probed = message | {"tool_calls": [with_argument(call, f"{word}{place}z") for place, call in enumerate(calls)]}
    beside = [key for key in ("content", *THOUGHT_KEYS) if not is_blank(message.get(key, ""))]
    for key in beside:
        probed[key] = f"{message[key]} {word}{key}"
    seen = renders.text([*renders.messages[:turn], probed], is_prompt=False)
    for place, call in enumerate(calls):
        if f"{word}{place}z" not in seen:
            name = call["function"]["name"]
            raise LeftOut("template drops tool calls", f"call {place + 1} of {len(calls)}, {name!r}")
    if "content" in beside and f"{word}content" not in seen:
        raise LeftOut(DROPPED, f"{message['content'].strip()[:80]!r} beside a call")
    thoughts = [f"{word}{key}" for key in beside if key != "content"]
    if thoughts and habits.is_thinking and not any(thought in seen for thought in thoughts):
        raise LeftOut(DROPPED, f"{thought_of(message).strip()[:80]!r} beside a call")


def with_argument(call: dict[str, Any], word: str) -> dict[str, Any]:
    function = call["function"]
    return call | {"function": function | {"arguments": {**function["arguments"], "probe": word}}}
