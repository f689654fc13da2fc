"""The one thought of an answer, under whichever of its names, and at the start of its content.

Knows the names that public data sets and servers give to it; knows no template.
"""

from collections.abc import Mapping
from typing import Any

from .json_lines import LeftOut
from .json_text import is_blank, is_filled, short

THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking", "thought", "thinking_content")
DETAILS = "reasoning_details"
"""OpenRouter's list of a thought's pieces."""
ALL_KEYS = (*THOUGHT_KEYS, DETAILS)
SWITCHES = {"on", "off", "true", "false", "yes", "no", "none", "auto", "minimal", "low", "medium", "high"}
SWITCH_KEYS = {"effort", "enabled", "exclude", "max_tokens", "type", "budget_tokens"}
"""What OpenRouter's and OpenAI's `reasoning` and Anthropic's `thinking` hold where they ask for a thought."""


def with_one_thought(message: dict[str, Any], beside: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """An assistant's message with its thought under the key that templates read, once: the content then does not begin
    with it as well.

    `beside` holds what else the line says that it thought. A thought that only the content holds stays there. Raises
    LeftOut where two places hold different ones, and for one that is no text.
    """
    said = thoughts_of(message, "an assistant message")
    said |= {f"{key} of the line": text for key, text in thoughts_of(beside or {}, "the line").items()}
    message = {key: item for key, item in message.items() if key not in ALL_KEYS}
    if not said:
        return message
    thought = next(iter(said.values()))
    content = message["content"]
    while found := thought_at_start(content):
        inner, content = found
        if is_blank(inner):
            continue
        said["content"] = inner
        if inner.strip() != thought.strip():
            break
    if len({text.strip() for text in said.values()}) > 1:
        raise LeftOut("thoughts disagree", " and ".join(said))
    return message | {"content": content, "reasoning_content": thought}


def thoughts_of(holder: Mapping[str, Any], name: str) -> dict[str, str]:
    """The thoughts of a message or line, by key, without blank ones. Raises LeftOut for one that is no text."""
    given = {key: holder[key] for key in THOUGHT_KEYS if is_filled(holder.get(key))}
    if is_filled(holder.get(DETAILS)):
        given[DETAILS] = text_of_details(holder[DETAILS])
    for key, thought in given.items():
        if not isinstance(thought, str):
            raise LeftOut("not text", f"{key} of {name} is {short(thought)}")
    return {key: thought for key, thought in given.items() if not is_blank(thought)}


def text_of_details(given: Any) -> str:
    """The texts of OpenRouter's pieces, joined. Raises LeftOut for a piece that is a summary, encrypted or else."""
    if not isinstance(given, list):
        raise LeftOut("not text", f"{DETAILS} is {short(given)}")
    for piece in given:
        is_text = isinstance(piece, dict) and piece.get("type") == "reasoning.text"
        if not is_text or not isinstance(piece.get("text"), str):
            raise LeftOut("not text", f"a piece of {DETAILS} is {short(piece)}")
    return "".join(piece["text"] for piece in given)


def is_switch(given: Any) -> bool:
    """True for what a line asks of a thought, instead of one: true, "on", "low", {"effort": "low"}."""
    if isinstance(given, str):
        return given.strip().lower() in SWITCHES
    return isinstance(given, bool) or (isinstance(given, dict) and bool(given) and set(given) <= SWITCH_KEYS)


def thought_at_start(content: str) -> tuple[str, str] | None:
    """The thought that a content begins with, and the rest; None where there is none.

    As templates and servers read it: one that is not closed has no rest, one that the prompt opened has no opening.
    """
    before, closing, rest = content.partition("</think>")
    lead, opening, thought = before.partition("<think>")
    if opening:
        return (thought, rest.lstrip("\n")) if is_blank(lead) else None
    return (before, rest.lstrip("\n")) if closing else None
