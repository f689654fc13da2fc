"""What one input line means: a chat, ready token ids or plain text, whichever of the known shapes it has.

Accepted shapes:
- `messages` (OpenAI), `conversations` or `conversation` (ShareGPT or roles), each a list or its JSON text;
- `prompt` with `completion` or `response`, as text or messages;
- `instruction` (+ `input` or `context`, + `history`) with `output` or `response` (Alpaca, Dolly);
- `input_ids` with `loss_mask`, `assistant_masks`, `completion_mask` or `labels` (padding of `attention_mask` cut off);
- where the target is to answer, `prompt` or `instruction` alone;
- `text`, which the target goes on with. Beside any other shape it is not read: many data sets keep a rendered chat
  beside the chat, and whether the two agree cannot be told without the template that rendered it.

A line that has several shapes must say the same in all. Beside them `system`, `tools`, `chat_template_kwargs`, `id`,
`task`, `split` and `response_origin` are read, and `image`, `audio`, `video` and their plurals, which are left out;
other keys are ignored. A null value is an absent key. Text stands for one message: it goes through the chat template
like any other.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..origins import ORIGINS, is_origin
from .json_lines import InputLine, LeftOut
from .messages import MEDIA_KEYS, Message, as_message, from_json_text, join_calls, media_of, short, tools_of
from .token_lines import TOKEN_KEYS, Tokens, tokens_of

SHAPES = "messages, conversations, prompt + completion, instruction + output, text, input_ids + loss_mask or labels"
SPLITS = {"train": "train", "heldout": "heldout", "validation": "heldout", "test": "heldout"}
"""What a line's own `split` means: validation and test, the names of other tools, are held out."""
CHAT_KEYS = ("messages", "conversations", "conversation", "completion", "output", "response")
KEYS = TOKEN_KEYS.union(
    MEDIA_KEYS,
    "messages conversations conversation prompt completion response instruction input context history output".split(),
    "text system tools chat_template_kwargs id task split response_origin".split(),
)
"""Every key that is read; the columns of a table that are."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages ready for a chat template (text contents, tool arguments as objects), and its options."""

    messages: list[Message]
    tools: list[Any] | None
    options: dict[str, Any] = field(default_factory=dict)
    """The line's `chat_template_kwargs`."""


@dataclass(frozen=True, slots=True)
class Text:
    """A line of plain text, not blank."""

    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """One understood input line. `split` None leaves the choice to the content hash, `origin` None to the user."""

    content: Chat | Tokens | Text
    split: str | None
    task: str
    origin: str | None


def line_meant(line: InputLine) -> Line:
    """What a line that was read means. Raises LeftOut where it could not be read, or means nothing."""
    if line.fault is not None or line.value is None:
        raise line.fault or LeftOut("not an object")
    return understand(line.value)


def shown_id(line: InputLine) -> str | None:
    """The line's own id as text, for the user's eyes: it identifies nothing."""
    known = line.value.get("id") if line.value is not None else None
    return None if known is None else short(known)


def options_under(given: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A line's own template options over those of the run. Raises LeftOut where the two contradict each other."""
    for name, value in own.items():
        if name in given and given[name] != value:
            detail = f"{name} is {value!r} in the line and {given[name]!r} for the run"
            raise LeftOut("template options disagree", detail)
    return {**given, **own}


def understand(value: dict[str, Any]) -> Line:
    """Reads one line's value. Raises LeftOut, with a reason to count, for what is no sample."""
    value = {key: item for key, item in value.items() if item is not None}
    split, origin = value.get("split"), value.get("response_origin")
    if split is not None and not (isinstance(split, str) and split in SPLITS):
        raise LeftOut("unknown split", f"split is {short(split)}, expected one of {list(SPLITS)}")
    if origin is not None and not is_origin(origin):
        raise LeftOut("unknown response_origin", f"response_origin is {short(origin)}, expected {ORIGINS}")
    if need := media_of(value):
        raise LeftOut(need, "the line holds it beside its text")
    return Line(content_of(value), None if split is None else SPLITS[split], str(value.get("task", "")), origin)


def content_of(value: dict[str, Any]) -> Chat | Tokens | Text:
    if "input_ids" in value:
        if others := [name for name in CHAT_KEYS if name in value]:
            raise LeftOut("shapes disagree", f"input_ids beside {others[0]}: drop one, they cannot be compared here")
        return tokens_of(value)
    messages = messages_in(value)
    if messages is None:
        if "text" in value:
            return text_of_line(value["text"])
        raise LeftOut("unknown shape", f"keys {short(sorted(value))}, expected {SHAPES}")
    if "system" in value:
        messages = with_system(messages, as_message({"role": "system", "content": value["system"]}))
    return Chat(messages, tools_of(value.get("tools")), options_of(value.get("chat_template_kwargs")))


def messages_in(value: dict[str, Any]) -> list[Message] | None:
    """The one chat that all chat shapes of a line say; None for a line without any."""
    found = {name: reader(value) for name, reader in READERS.items() if set(name) <= set(value)}
    chats = list(found.values())
    if any(said(messages) != said(chats[0]) for messages in chats[1:]):
        raise LeftOut("shapes disagree", " and ".join("+".join(name) for name in found))
    for key, read_alone in (("prompt", read_prompt), ("instruction", read_instruction)):
        if key in value and not any(key in name for name in found):
            prompt = read_alone(value)
            if chats and not starts_with(chats[0], prompt):
                raise LeftOut("shapes disagree", f"{key} and " + "+".join(next(iter(found), ("prompt",))))
            chats = chats or [prompt]
    return chats[0] if chats else None


def text_of_line(text: Any) -> Text:
    if not isinstance(text, str):
        raise LeftOut("not text", f"text is {short(text)}")
    if not text.strip():
        raise LeftOut("empty text", f"text is {short(text)}")
    return Text(text)


def options_of(given: Any) -> dict[str, Any]:
    options = from_json_text(given, "broken template options")
    if options is not None and not isinstance(options, dict):
        raise LeftOut("broken template options", f"chat_template_kwargs is {short(options)}")
    return options or {}


def with_system(messages: list[Message], system: Message) -> list[Message]:
    """The chat under the system message that its line holds beside it; a blank one contradicts none."""
    if messages[0]["role"] != "system":
        return [system, *messages]
    if system["content"].strip() and system["content"] != messages[0]["content"]:
        raise LeftOut("shapes disagree", "system and the chat's own system message")
    return messages


def said(messages: list[Message]) -> list[tuple[Any, ...]]:
    """What two shapes of one line must agree on: roles, contents, thoughts and calls."""
    keys = ("role", "content", "reasoning_content")
    return [(*(message.get(key) for key in keys), calls_said(message)) for message in messages]


def calls_said(message: Message) -> list[Any]:
    """Names and arguments alone: one of two shapes may lack the ids of the calls."""
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]


def starts_with(messages: list[Message], prompt: list[Message]) -> bool:
    """True when a lone prompt beside a whole chat is that chat's beginning, a system message aside."""
    after_system = messages[1:] if messages[0]["role"] == "system" else messages
    return said(prompt) in (said(messages)[: len(prompt)], said(after_system)[: len(prompt)])


def reader_of(key: str) -> Callable[[dict[str, Any]], list[Message]]:
    return lambda value: messages_of(value[key], "", key)


def read_prompt(value: dict[str, Any]) -> list[Message]:
    return messages_of(value["prompt"], "user", "prompt")


def reader_after_prompt(key: str) -> Callable[[dict[str, Any]], list[Message]]:
    return lambda value: read_prompt(value) + messages_of(value[key], "assistant", key)


def read_instruction(value: dict[str, Any]) -> list[Message]:
    """Alpaca and Dolly: what is to be worked on follows the instruction after a blank line.

    `history` holds earlier turns, as pairs of question and answer.
    """
    given = {key: value[key] for key in ("input", "context") if key in value}
    if not all(isinstance(part, str) for part in (value["instruction"], *given.values())):
        raise LeftOut("not text", f"instruction, {' or '.join(given) or 'input'} is no string")
    inputs = {part for part in given.values() if part.strip()}
    if len(inputs) > 1:
        raise LeftOut("shapes disagree", "input and context")
    question = "\n\n".join([value["instruction"], *inputs])
    return [*history_of(value.get("history")), {"role": "user", "content": question}]


def history_of(given: Any) -> list[Message]:
    pairs = from_json_text(given, "broken history") or []
    if not isinstance(pairs, list):
        raise LeftOut("broken history", f"history is {short(pairs)}")
    turns: list[Message] = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise LeftOut("broken history", f"a turn is {short(pair)}, expected a question and an answer")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def reader_after_instruction(key: str) -> Callable[[dict[str, Any]], list[Message]]:
    return lambda value: read_instruction(value) + [as_message({"role": "assistant", "content": value[key]})]


READERS: dict[tuple[str, ...], Callable[[dict[str, Any]], list[Message]]] = {
    **{(key,): reader_of(key) for key in ("messages", "conversations", "conversation")},
    **{("prompt", key): reader_after_prompt(key) for key in ("completion", "response")},
    **{("instruction", key): reader_after_instruction(key) for key in ("output", "response")},
}


def messages_of(given: Any, text_role: str, key: str) -> list[Message]:
    """A list of messages, or its JSON text; with `text_role` a plain string is one message of that role."""
    if isinstance(given, str) and text_role:
        return [{"role": text_role, "content": given}]
    given = from_json_text(given, "no messages")
    if not isinstance(given, list) or not given:
        raise LeftOut("no messages", f"{key} is {short(given)}")
    return join_calls([as_message(message) for message in given], given)
