"""What a chat template does around an answer, learnt from what it makes of a chat of ours.

Templates are programs; what they write where a message holds no thought, or after an answer, stands nowhere as data.
So a question and an answer of known words are rendered, and what stands around those words is the template's.
Knows text only.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ..lines.inputs import LeftOut
from ..lines.shapes import Chat, Message
from .templates import THOUGHT_KEYS, ChatTemplate, Renders, thought_of

QUESTION, THOUGHT, ANSWER, RESULT = "quaestioprobe", "cogitatioprobe", "responsumprobe", "eventusprobe"
ASKED: Message = {"role": "user", "content": QUESTION}
PROBE_CALL = {"type": "function", "id": "probe0001", "function": {"name": "probe", "arguments": {"a": 1}}}
PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "A probe.", "parameters": {"type": "object", "properties": {}}},
}
OLD_RESULT_ROLES = ("function", "ipython")
"""Names that a tool's result had before `tool`."""
READS_THOUGHTS = re.compile(r"[.'\"](?:reasoning_content|reasoning|thinking)\b")


@dataclass(frozen=True, slots=True)
class Habits:
    """What one template does under one set of options. Empty text where it does nothing, or where that is unknown."""

    generation_prompt: str
    """What asks for an answer: the end of every prompt."""
    header: str
    """What the template itself opens every answer with: of the generation prompt, what history has as well."""
    empty_thought: str
    """What stands before an answer whose message holds no thought, though the target would have thought there."""
    closing: str
    """What follows an answer."""
    is_thinking: bool
    """True where the template reads or prints thoughts at all, so that dropping one is a fault."""
    takes_thoughts_in_content: bool
    """True where thoughts are read from the content (`<think>`), and not from a key of their own."""
    after_answer: str
    """What follows a closed answer when a user goes on."""
    after_call: str
    """What follows a closed tool call when its result comes."""
    unread_results: frozenset[str] = frozenset()
    """Roles of a tool's result that the template drops or refuses, where it reads `tool`."""

    @property
    def asks(self) -> bool:
        """False where the template opens an answer with a header that no prompt of its holds.

        One may open answers with nothing: Mistral's follow the question's own end.
        """
        return bool(self.generation_prompt) or not self.header.strip()


def read_habits(template: ChatTemplate, options: dict[str, Any], *, with_tools: bool) -> Habits:
    """Renders about a dozen small chats."""
    tools = [PROBE_TOOL] if with_tools else None

    def text(*messages: Message, is_prompt: bool = False) -> str | None:
        renders = Renders(template, Chat(list(messages), tools), options)
        try:
            return renders.text(renders.messages, is_prompt=is_prompt)
        except LeftOut:
            return None

    answer: Message = {"role": "assistant", "content": ANSWER}
    with_thought = answer | {"reasoning_content": THOUGHT}
    source = template.source(tools)
    prompt, plain, thoughtful = text(ASKED, is_prompt=True), text(ASKED, answer), text(ASKED, with_thought)
    asked = text(ASKED)
    called = answer | {"tool_calls": [PROBE_CALL]}
    result = {"content": RESULT, "tool_call_id": "probe0001", "name": "probe"}
    by_role = {role: text(ASKED, called, {"role": role, **result}) for role in ("tool", *OLD_RESULT_ROLES)}
    read = {role for role, seen in by_role.items() if seen is not None and RESULT in seen}
    is_read = thoughtful is not None and THOUGHT in thoughtful
    if not is_read and "</think>" in source:
        thoughtful = text(ASKED, with_thought_in_content(with_thought))
    generation_prompt = rest_of(prompt, asked)
    thought = empty_thought(rest_of(plain, prompt), rest_of(thoughtful, prompt))
    followed = text(ASKED, answer, ASKED)
    before, once = (rest_of(whole, asked).partition(ANSWER)[0] for whole in (plain, followed))
    openings = [before.removesuffix(thought), once or before, generation_prompt or before]
    return Habits(
        generation_prompt=generation_prompt,
        header=shared_start(openings),
        empty_thought=thought,
        closing=(plain or "").rpartition(ANSWER)[2],
        is_thinking=is_read or "</think>" in source or READS_THOUGHTS.search(source) is not None,
        takes_thoughts_in_content=not is_read and "</think>" in source,
        after_answer=rest_of(followed, (plain or "").rstrip()),
        after_call=rest_of(by_role["tool"], (text(ASKED, called) or "").rstrip()),
        unread_results=frozenset(OLD_RESULT_ROLES) - read if "tool" in read else frozenset(),
    )


def rest_of(text: str | None, beginning: str | None) -> str:
    """What follows the beginning, or nothing where the text does not begin so."""
    if not text or not beginning or not text.startswith(beginning):
        return ""
    return text[len(beginning) :]


def shared_start(texts: Sequence[str]) -> str:
    """The longest beginning of all of them."""
    return "".join(letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, zip(*texts)))


def empty_thought(plain: str, thoughtful: str) -> str:
    """The template's words before an answer without a thought, if they are those around a thought, left empty.

    Words that come only without a thought, like the channel name before a final answer of gpt-oss, are no
    empty thought: they are what the target writes when it does not think.
    """
    before, found, _ = plain.partition(ANSWER)
    around, found_too, _ = thoughtful.partition(ANSWER)
    if not found or not found_too or THOUGHT not in around or not before.strip():
        return ""
    return before if squeezed(before) == squeezed(around.replace(THOUGHT, "", 1)) else ""


def squeezed(text: str) -> str:
    return "".join(text.split())


def made_by_template(habits: Habits, message: Message, text: str) -> int:
    """How many characters at the start of an answer are an empty thought that the message does not hold."""
    lead = habits.empty_thought
    core = lead.rstrip()
    if not core or not text.startswith(core) or squeezed(core) in squeezed(message["content"]):
        return 0
    if text.startswith(lead):
        return len(lead)
    return len(core) + len(text[len(core) :]) - len(text[len(core) :].lstrip())


def with_thought_in_content(message: Message) -> Message:
    """The message as templates read it that know thoughts only as part of the content."""
    thought = thought_of(message).strip("\n")
    if message["role"] != "assistant" or not thought or "</think>" in message["content"]:
        return message
    rest = {key: item for key, item in message.items() if key not in THOUGHT_KEYS}
    return rest | {"content": f"<think>\n{thought}\n</think>\n\n" + message["content"].lstrip("\n")}
