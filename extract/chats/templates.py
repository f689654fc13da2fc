"""A target's chat template, rendered as transformers renders it, without that call's cost.

`apply_chat_template` copies and checks the whole chat at every call; a chat of n answers is rendered 2n times. Here
a chat is copied once, and its beginnings are given to the compiled template that transformers itself uses; a test
holds both to the same bytes. Knows messages and text; knows no tokens and no mask.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta

from ... import UserError
from ..lines.inputs import LeftOut
from ..lines.json_text import is_blank
from ..lines.shapes import Chat, Message

THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
NO_OPTIONS = {"messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception"}
"""Names that a template is given by whoever renders a chat."""
Span = tuple[int, int]
"""Characters [start, stop) of a rendered text."""


class ChatTemplate:
    """The chat template of one tokenizer. `now` is the date that templates which print one are given."""

    def __init__(self, tokenizer: Any, now: datetime | None = None) -> None:
        self.tokenizer = tokenizer
        self.now = now or datetime.now()
        self.sources: dict[bool, str] = {}
        self.reads: dict[bool, set[str]] = {}

    def source(self, tools: Sequence[Any] | None) -> str:
        """The template's text; a tokenizer may hold one of its own for chats with tools."""
        with_tools = bool(tools)
        if with_tools not in self.sources:
            self.sources[with_tools] = self.tokenizer.get_chat_template(None, tools or None)
        return self.sources[with_tools]

    def has_marks(self, tools: Sequence[Any] | None) -> bool:
        """True where the template says itself, by generation tags, what the target writes."""
        return MARKS.search(self.source(tools)) is not None

    def names_read(self, tools: Sequence[Any] | None) -> set[str]:
        """Every name that the template takes from its caller, its options among them; none without a template.

        Raises TemplateError for one that does not compile, ValueError where there is none for such a chat.
        """
        if getattr(self.tokenizer, "chat_template", None) is None:
            return set()
        with_tools = bool(tools)
        if with_tools not in self.reads:
            parsed = self.compiled(tools).environment.parse(self.source(tools))
            self.reads[with_tools] = meta.find_undeclared_variables(parsed)
        return self.reads[with_tools]

    def unread(self, options: Mapping[str, Any], tools: Sequence[Any] | None) -> list[str]:
        """Those of a chat's options that the template does not read; none where that cannot be known."""
        try:
            return sorted(set(options) - self.names_read(tools)) if options else []
        except (jinja2.TemplateError, ValueError):
            return []  # each chat is left out by name then

    def idle_options(self, options: Mapping[str, Any], target: str) -> str | None:
        """A line that names the options of a run that change nothing, as the template reads none at all.

        Raises UserError for an option that no template of the target reads, with or without tools, where others are
        read: it is a mistyped name.
        """
        strange = [name for name in self.unread(options, None) if name in self.unread(options, [{}])]
        if not strange:
            return None
        names = (self.names_read(None) | self.names_read([{}])) - NO_OPTIONS - set(self.tokenizer.special_tokens_map)
        if not names:
            idle = ", ".join(f"template.{name}" for name in strange)
            return f"the chat template of target {target!r} has no options: {idle} changes nothing"
        raise UserError(
            f"template.{strange[0]} = {options[strange[0]]!r} is not read by the chat template of target {target!r}",
            f"one of its options: {', '.join(sorted(names))}",
            f"correct the name, or drop template.{strange[0]}",
        )

    def render(
        self, messages: list[Message], tools: list[Any] | None, options: dict[str, Any], *, is_prompt: bool
    ) -> str:
        """The text of plain messages. Raises what the template raises: one of TEMPLATE_ERRORS."""
        return self.compiled(tools).render(**self.names(messages, tools, options, is_prompt))

    def render_marked(
        self, messages: list[Message], tools: list[Any] | None, options: dict[str, Any]
    ) -> tuple[str, list[Span]]:
        """The text without a generation prompt, and the spans that stand in generation tags."""
        compiled, blocks, spans = self.compiled(tools), [], []
        with compiled.environment.activate_tracker(blocks, spans):
            for block in compiled.generate(**self.names(messages, tools, options, False)):
                blocks.append(block)
        return "".join(blocks), spans

    def compiled(self, tools: Sequence[Any] | None) -> Any:
        # Private, but the only way to transformers' own environment; cached there by the template's text.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        return _compile_jinja_template(self.source(tools))

    def names(
        self, messages: list[Message], tools: list[Any] | None, options: dict[str, Any], is_prompt: bool
    ) -> dict[str, Any]:
        """What the template sees, the tokenizer's special tokens among it; one date for a whole run."""
        names = {"strftime_now": self.now.strftime} if "strftime_now" in self.source(tools) else {}
        names |= {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": is_prompt}
        return names | self.tokenizer.special_tokens_map | options


class Renders:
    """One chat under one template and its options: the text of each of its beginnings.

    Raises LeftOut("template error") in the template's own words. Tool arguments are objects; where the template
    can only join text, as DeepSeek-V3's does, they are given as JSON text from there on.
    """

    def __init__(self, template: ChatTemplate, chat: Chat, options: dict[str, Any]) -> None:
        self.template = template
        self.options = options
        self.messages: list[Message] = [plain_message(message) for message in chat.messages]
        self.tools: list[Any] | None = as_plain(chat.tools) if chat.tools else None
        self.has_marks = template.has_marks(self.tools)
        self.spells_arguments = False

    def prompt(self, count: int) -> str:
        """The first `count` messages and the generation prompt: what a server would send."""
        return self.text(self.messages[:count], is_prompt=True)

    def whole(self, count: int, last: Message) -> tuple[str, list[Span] | None]:
        """The first `count` messages and `last`, and the spans in generation tags; None for a template without tags."""
        messages = [*self.messages[:count], last]
        if not self.has_marks:
            return self.text(messages, is_prompt=False), None
        return self.tried(messages, lambda given: self.template.render_marked(given, self.tools, self.options))

    def text(self, messages: list[Message], *, is_prompt: bool) -> str:
        return self.tried(
            messages, lambda given: self.template.render(given, self.tools, self.options, is_prompt=is_prompt)
        )

    def tried(self, messages: list[Message], render: Callable[[list[Message]], Any]) -> Any:
        """What `render` makes of the messages, tried again with arguments as text after a TypeError."""
        try:
            return render([spelled(message) for message in messages] if self.spells_arguments else messages)
        except TEMPLATE_ERRORS as error:
            fault = LeftOut("template error", f"{type(error).__name__}: {error}")
            has_calls = any(message.get("tool_calls") for message in messages)
            if self.spells_arguments or not isinstance(error, TypeError) or not has_calls:
                raise fault from error
        self.spells_arguments = True
        try:
            return self.tried(messages, render)
        except LeftOut:
            self.spells_arguments = False
            raise fault from None


def spelled(message: Message) -> Message:
    """The message with the arguments of its calls as JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return message | {"tool_calls": [call | {"function": with_text(call["function"])} for call in calls]}


def with_text(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return function
    return function | {"arguments": json.dumps(arguments, ensure_ascii=False)}


def plain_message(message: Message) -> Message:
    """A copy for the template: without nulls and blank thoughts, a thought under both names that templates read."""
    plain = {key: as_plain(item) for key, item in message.items() if item is not None and key not in THOUGHT_KEYS}
    thought = thought_of(message)
    return plain | {"thinking": thought, "reasoning_content": thought} if thought else plain


def thought_of(message: Message) -> str:
    """The thought that a message holds beside its content, empty where there is none."""
    texts = (message.get(key) for key in THOUGHT_KEYS)
    return next((text for text in texts if isinstance(text, str) and not is_blank(text)), "")


def as_plain(value: Any) -> Any:
    """JSON's own types pass; of anything else a template sees the type's name only, as in transformers."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {as_plain(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(item) for item in value]
    return f"<{type(value).__name__}>"
