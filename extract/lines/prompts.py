"""A question that stands outside of a chat: `prompt` or `instruction`, with what it works on and the turns before it.

Knows these keys only; answers are the shapes'.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from .agreement import check_question, history_of, holds, inputs_of
from .json_lines import LeftOut
from .json_text import from_json_text, is_blank, short
from .messages import Message, messages_of


def read_prompt(value: Mapping[str, Any]) -> list[Message]:
    """Messages as they are, or as JSON text; other text like an instruction, unless it holds its input already."""
    prompt = value["prompt"]
    if isinstance(prompt, str) and is_messages(prompt):
        prompt = from_json_text(prompt, "no messages")
    if not isinstance(prompt, str):
        messages = messages_of(prompt, "user", "prompt")
        check_question(messages, value)
        return messages
    return question(value, prompt, (part for part in inputs_of(value).values() if not holds(prompt, part)))


def is_messages(text: str) -> bool:
    """True for the JSON text of a list of messages; anything else is what the user says."""
    if not text.lstrip().startswith("["):
        return False
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return bool(found) and all(isinstance(one, dict) and not {"role", "from"}.isdisjoint(one) for one in found)


def read_instruction(value: Mapping[str, Any]) -> list[Message]:
    """Alpaca and Dolly: what is to be worked on follows the instruction after a blank line."""
    instruction = value["instruction"]
    if not isinstance(instruction, str):
        raise LeftOut("not text", f"instruction is {short(instruction)}")
    return question(value, instruction, inputs_of(value).values())


def question(value: Mapping[str, Any], text: str, inputs: Iterable[str]) -> list[Message]:
    """The earlier turns, and the text with its input, which stands alone under a blank text.

    Raises LeftOut where two inputs differ.
    """
    parts = set(inputs)
    if len(parts) > 1:
        raise LeftOut("shapes disagree", "input and context")
    content = "\n\n".join(parts if parts and is_blank(text) else [text, *parts])
    return [*history_of(value), {"role": "user", "content": content}]
