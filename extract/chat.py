"""From a chat to token ids with a loss mask, through the target's own chat template.

The rule: a token is trained on only if the target would have been asked for it after exactly
the tokens before it. For every assistant turn the chat before it is rendered with the
generation prompt (the *prompt*, what a server would send), and the chat up to its end without;
what the second adds to the first, up to and including the token that ends the turn, is the
answer. Nothing is found by searching the text for marks, so marks typed by a user open nothing.

Turns share one sample as long as the next prompt begins with the ids so far. Where it does not,
because the template rewrote the history (as those that drop old thoughts do), the next turn
starts a sample of its own, in which only that turn and its followers are trained on.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jinja2

from .. import UserError
from .encoding import Encoder
from .inputs import LeftOut
from .shapes import Chat, Message
from .targets.facts import TextSide

THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
OWN_OPTIONS = {"add_generation_prompt", "continue_final_message", "conversation", "messages", "tokenize", "tools"}
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@dataclass(slots=True)
class Sample:
    """Token ids [S] and what of them is trained on [S]."""

    ids: list[int]
    mask: list[bool]

    def extend(self, prompt: list[int], answer: list[int]) -> None:
        """Grows to prompt + answer, where the prompt begins with the ids so far."""
        self.mask += [False] * (len(prompt) - len(self.ids)) + [True] * len(answer)
        self.ids = prompt + answer


@dataclass(slots=True)
class Rendered:
    """The samples of one chat, and its assistant turns that are not trained on, by reason."""

    samples: list[Sample] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


class ChatRenderer:
    """Renders chats with one tokenizer and one set of template options.

    Raises UserError when the tokenizer has no chat template, or an option is not the template's.
    """

    def __init__(self, side: TextSide, options: dict[str, Any]) -> None:
        if getattr(side.tokenizer, "chat_template", None) is None:
            raise UserError(
                f"the tokenizer of target {side.name!r} has no chat template",
                "a template (chat_template.jinja) for chats, or input lines with input_ids and loss_mask",
                "add the template of the served model, or tokenize the chats yourself",
            )
        if taken := sorted(OWN_OPTIONS & set(options)):
            raise UserError(
                f"template.{taken[0]} = {options[taken[0]]!r}",
                "options of the chat template itself, like enable_thinking",
                f"drop template.{taken[0]}",
            )
        self.tokenizer = side.tokenizer
        self.encoder = Encoder(side.tokenizer)
        self.options = options
        self.stops = set(side.eos_ids)
        self.ends = self.stops | set(side.special_ids)

    def render(self, chat: Chat) -> Rendered:
        """Samples of every usable assistant turn. Raises LeftOut when there is none."""
        self.encoder.forget()
        result = Rendered()
        first_fault = LeftOut("no answer", "the chat holds no assistant turn")
        for turn, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            try:
                prompt, answer = self.turn(chat, turn)
            except LeftOut as fault:
                first_fault = fault if not result.left_out else first_fault
                result.left_out[fault.reason] += 1
                continue
            last = result.samples[-1] if result.samples else None
            if last is None or prompt[: len(last.ids)] != last.ids:
                last = Sample([], [])
                result.samples.append(last)
            last.extend(prompt, answer)
        if not result.samples:
            raise first_fault
        return result

    def question(self, chat: Chat) -> list[int]:
        """The prompt ids that the target is to answer; answers at the chat's end are dropped."""
        self.encoder.forget()
        messages = list(chat.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages or messages[-1]["role"] in ("system", "developer"):
            raise LeftOut("no question", "the chat holds no user turn to answer")
        return self.encoder.encode(self.text(messages, chat.tools, is_prompt=True))

    def turn(self, chat: Chat, turn: int) -> tuple[list[int], list[int]]:
        """Prompt and answer ids of one assistant turn. Raises LeftOut when it cannot be trained on."""
        check_answer(chat.messages[turn])
        before = self.text(chat.messages[:turn], chat.tools, is_prompt=True)
        whole = self.text(chat.messages[: turn + 1], chat.tools, is_prompt=False)
        if not whole.startswith(before):
            raise LeftOut("not what the generation prompt asks for", f"the prompt ends with {before[-40:]!r}")
        text = whole[len(before) :]
        for call in chat.messages[turn].get("tool_calls", []):
            if call["function"]["name"] not in text:
                raise LeftOut("template drops tool calls", call["function"]["name"])
        prompt = self.encoder.encode(before)
        return prompt, self.up_to_end(prompt, before, text)

    def up_to_end(self, prompt: list[int], before: str, text: str) -> list[int]:
        """The answer's ids up to its end mark, which is the first id that stops the target.

        A template that closes turns with another special token ends there; one that closes with
        none ends at the last character that is no blank.
        """
        answer = self.after(prompt, before, text)
        stop = next((i for i, token in enumerate(answer) if token in self.stops), None)
        if stop is None:
            stop = next((i for i in reversed(range(len(answer))) if answer[i] in self.ends), None)
            if stop is None or self.encoder.decode(answer[stop + 1 :]).strip():
                return self.after(prompt, before, text.rstrip())
        elif self.encoder.decode(answer[stop + 1 :]).strip():
            raise LeftOut(
                "end mark inside the answer", f"{self.encoder.decode([answer[stop]])!r} is not its last token"
            )
        return answer[: stop + 1]

    def after(self, prompt: list[int], before: str, text: str) -> list[int]:
        """Ids of `text` where it follows the prompt; tokenized alone where the two would merge."""
        joint = self.encoder.encode(before + text)
        if joint[: len(prompt)] == prompt:
            return joint[len(prompt) :]
        alone = self.encoder.encode(text)
        if self.encoder.decode(alone) != text:
            raise LeftOut("tokens merge across the start of the answer", f"the answer starts with {text[:40]!r}")
        return alone

    def text(self, messages: list[Message], tools: list[Any] | None, *, is_prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=is_prompt, tokenize=False, **self.options
            )
        except TEMPLATE_ERRORS as error:
            raise LeftOut("template error", f"{type(error).__name__}: {error}") from error


def check_answer(message: Message) -> None:
    """Raises LeftOut for a turn that says nothing: a tool call is an answer, a thought alone is none.

    A turn of weight 0 is left out as well: in OpenAI's format it is there to be read, not trained on.
    """
    if message.get("weight") == 0:
        raise LeftOut("weight 0", "the message's own weight")
    if message.get("tool_calls"):
        return
    content = message["content"]
    if not content.strip():
        thought = any(str(message.get(key, "")).strip() for key in ("reasoning_content", "reasoning", "thinking"))
        raise LeftOut("thought without an answer" if thought else "empty answer", f"content is {content[:40]!r}")
    if not THOUGHT.sub("", content).strip():
        raise LeftOut("thought without an answer", f"content is {content[:40]!r}")
