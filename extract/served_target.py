"""How a target is given to a serving engine: its folder, and the chat of an input line as a request.

Knows lines, chats and where targets lie; sends nothing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import UserError
from .lines.json_lines import LeftOut, as_input_line
from .lines.shapes import Chat, line_meant
from .regenerate.conversation import as_sent
from .targets.source import locate


def served_path(name: str) -> str:
    """The folder of a target with its weights. Raises UserError for an unknown target and for a GGUF file."""
    source = locate(name, weights=True)
    if source.gguf is not None:
        raise UserError(
            f"target {name!r} is the GGUF file {source.gguf}",
            "a folder with config.json and safetensors, which engines serve",
            "give the folder that the GGUF file was made from",
        )
    return str(source.folder.resolve())


def chat_request(value: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """The chat of a line up to the turn that is asked: messages, and tools and template options where it has them.

    `template` holds options for all lines. Raises ValueError for a line that is no chat.
    """
    try:
        chat = line_meant(as_input_line(Path(), 0, dict(value))).content
    except LeftOut as fault:
        raise ValueError(f"{fault.reason}: {fault.detail}") from fault
    if not isinstance(chat, Chat):
        raise ValueError(f"{type(chat).__name__.lower()}, no chat")
    messages = list(chat.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    request: dict[str, Any] = {"messages": [as_sent(message) for message in messages]}
    if chat.tools:
        request["tools"] = chat.tools
    if options := {**template, **chat.options}:
        request["chat_template_kwargs"] = options
    return request
