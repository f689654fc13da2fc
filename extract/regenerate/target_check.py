"""Proof that a server speaks for the target: its prompts have the right length, its answers hold no control marks.

Knows our renderer, the count that a server reports and the text that it gives; two prompts of equal length that
differ pass. A control mark in an answer (an end mark, a role) means that the server gives back raw text.
"""

from dataclasses import dataclass
from typing import Any

from ... import UserError
from ..lines.json_lines import LeftOut
from ..lines.json_text import short
from ..lines.messages import Message, as_message
from ..lines.shapes import Chat
from .endpoints import Endpoint
from .replies import Reply, TurnFailed

SHOWN_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a prompt should be: its number of tokens, and its end as text for people."""

    num_tokens: int
    end: str


class TargetCheck:
    """Renders prompts with one target's tokenizer and template. Raises UserError for an unknown target."""

    def __init__(self, target: str) -> None:
        from ..chats.chat import ChatRenderer  # here, because only a run with a target renders
        from ..targets.facts import read_text_side

        self.target = target
        side = read_text_side(target)
        self.tokenizer = side.tokenizer
        self.renderer = ChatRenderer(side, {})
        self.facts = {
            "name": side.name,
            "tokenizer_sha256": side.tokenizer_sha256,
            "template_sha256": side.template_sha256,
        }

    def prompt(self, messages: list[Message], tools: list[Any] | None, options: dict[str, Any]) -> Prompt:
        """The prompt of these messages. Raises TurnFailed where the template refuses them."""
        try:
            ids = self.renderer.question(Chat([as_message(message) for message in messages], tools, options))
        except LeftOut as fault:
            raise TurnFailed(fault.reason, fault.detail) from fault
        return Prompt(len(ids), self.tokenizer.decode(ids[-SHOWN_TOKENS:]))

    def compare(self, endpoint: Endpoint, prompt: Prompt, reply: Reply) -> None:
        """Raises UserError where the first reply of an endpoint is not the target's, TurnFailed later."""
        fault = self.fault_of(prompt, reply)
        if fault is None:
            endpoint.is_proven = True
        elif endpoint.is_proven:
            raise fault
        else:
            raise UserError(
                f"{fault.reason}: {endpoint.url} {fault.detail}",
                f"what the template and tokenizer of {self.target!r} give",
                "serve this target with its own chat template, or correct --target and the template options",
            )

    def fault_of(self, prompt: Prompt, reply: Reply) -> TurnFailed | None:
        if reply.prompt_tokens != prompt.num_tokens:
            counted = "no tokens" if reply.prompt_tokens is None else f"{reply.prompt_tokens:,} tokens"
            seen = f"counts {counted} in a prompt of {prompt.num_tokens:,}, whose end is {short(prompt.end)}"
            return TurnFailed("prompt lengths differ", seen)
        if found := self.renderer.control_marks.typed(reply.message):
            return TurnFailed("control mark in the answer", f"gives {found!r} in {short(reply.message)}")
        return None
