"""Whether two things that one line says are the same: two chats, a chat and its beginning, a chat and a part beside it.

Knows messages and the names of the parts; makes no chat.
"""

from collections.abc import Mapping
from typing import Any

from .json_lines import LeftOut
from .json_text import from_json_text, is_filled, short
from .messages import Message, messages_of
from .tool_calls import calls_said

INPUT_KEYS = ("input", "context")
"""Alpaca's and Dolly's names of what an instruction works on."""
ANSWER_KEYS = ("completion", "response", "output")
"""`answer` is none of them: there, benchmarks keep the short right answer that a grader reads."""


def said(messages: list[Message]) -> list[tuple[Any, ...]]:
    """What two shapes of one line must agree on: roles, contents, thoughts and calls."""
    keys = ("role", "content", "reasoning_content")
    return [(*(message.get(key) for key in keys), calls_said(message.get("tool_calls", []))) for message in messages]


def starts_with(messages: list[Message], prompt: list[Message]) -> bool:
    """True when a lone prompt beside a whole chat is that chat's beginning, a system message aside."""
    after_system = messages[1:] if messages[0]["role"] == "system" else messages
    return said(prompt) in (said(messages)[: len(prompt)], said(after_system)[: len(prompt)])


def inputs_of(value: Mapping[str, Any]) -> dict[str, str]:
    """The texts under the names of an input that are not blank."""
    given = {key: value[key] for key in INPUT_KEYS if is_filled(value.get(key))}
    for key, text in given.items():
        if not isinstance(text, str):
            raise LeftOut("not text", f"{key} is {short(text)}")
    return given


def history_of(value: Mapping[str, Any]) -> list[Message]:
    """Earlier turns, from `history`: pairs of question and answer."""
    pairs = from_json_text(value.get("history"), "broken history") or []
    if not isinstance(pairs, list):
        raise LeftOut("broken history", f"history is {short(pairs)}")
    turns: list[Message] = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise LeftOut("broken history", f"a turn is {short(pair)}, expected a question and an answer")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def holds(text: str, part: str) -> bool:
    """True where the part stands in the text, blanks around it aside, and not inside of a word."""
    part = part.strip()
    start = text.find(part)
    while start >= 0:
        around = text[max(start - 1, 0) : start] + text[start + len(part) :][:1]
        if not any(character.isalnum() for character in around):
            return True
        start = text.find(part, start + 1)
    return False


def check_question(messages: list[Message], value: Mapping[str, Any]) -> None:
    """Raises LeftOut where the chat does not hold the input, context or history that stand beside it."""
    asked = [message["content"] for message in messages if message["role"] != "assistant"]
    for key, part in inputs_of(value).items():
        if not any(part.strip() in text for text in asked):
            raise LeftOut("shapes disagree", f"{key} is in no question of the chat: {short(part)}")
    if not starts_with(messages, history_of(value)):
        raise LeftOut("shapes disagree", "history is not the beginning of the chat")


def check_answers(messages: list[Message], value: Mapping[str, Any]) -> None:
    """Raises LeftOut where an answer beside the chat is not the one that the chat ends with."""
    for key in ANSWER_KEYS:
        given = value.get(key)
        if not is_filled(given):
            continue
        if not isinstance(given, (str, list)):
            raise LeftOut("shapes disagree", f"{key} beside a chat is {short(given)}")
        answers = messages_of(given, "assistant", key)
        if shown(answers) != shown(messages[-len(answers) :]):
            raise LeftOut("shapes disagree", f"{key} is not what the chat ends with: {short(given)}")


def shown(messages: list[Message]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]
