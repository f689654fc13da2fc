"""What one input line means: a chat, ready token ids or plain text, whichever of the known shapes it has.

Accepted shapes:
- `messages` (OpenAI), `conversations` or `conversation` (ShareGPT or roles), each a list or its JSON text;
- `prompt` (text: + `input` or `context`, + `history`) with `completion`, `response` or `output`, as text or messages;
- `instruction` (the same beside it) with `output`, `response` or `completion` (Alpaca, Dolly);
- `input_ids` with `loss_mask`, `assistant_masks`, `completion_mask`, `labels` or `prompt_length` (padding of
  `attention_mask` cut off);
- where the target is to answer, `prompt` or `instruction` alone;
- `text`, which the target goes on with. Beside any other shape it is not read: many data sets keep a rendered chat
  beside the chat, and whether the two agree cannot be told without the template that rendered it.

A line that has several shapes must say the same in all, and what else it says of its question or its answer must be in
them (`agreement`); a blank one beside a filled one says nothing. Beside them `system`, `tools` or `functions`,
`chat_template_kwargs`, `reasoning_content`, `finish_reason` or `stop_reason` and a `label` of false (KTO: unwanted) of
the last answer, `id`, `task`, `split` and `response_origin` are read, and `image`, `audio`, `video` and their plurals,
which are left out; other keys are ignored. A null value is an absent key. Text stands for one message: it goes through
the chat template like any other.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..origins import ORIGINS, is_origin
from .agreement import ANSWER_KEYS, check_answers, check_question, said, starts_with
from .endings import KEYS as ENDING_KEYS
from .endings import is_same_ending
from .json_lines import InputLine, LeftOut
from .json_text import from_json_text, is_blank, is_filled, replacements_counted, short
from .messages import MEDIA_KEYS, Message, as_message, media_of, messages_of
from .prompts import read_instruction, read_prompt
from .thoughts import ALL_KEYS, is_switch, with_one_thought
from .token_lines import LABEL_KEY, TOKEN_KEYS, Tokens, tokens_of
from .tool_calls import tools_of

SHAPES = "messages, conversations, prompt + completion, instruction + output, text, input_ids + loss_mask or labels"
SPLITS = {"train": "train", "heldout": "heldout", "validation": "heldout", "test": "heldout"}
"""What a line's own `split` means: validation and test, the names of other tools, are held out."""
WHOLE_KEYS = ("messages", "conversations", "conversation")
QUESTION_KEYS = (*WHOLE_KEYS, "prompt", "instruction")
CHAT_KEYS = (*WHOLE_KEYS, *ANSWER_KEYS)
SYSTEM_KEYS = ("system", "system_prompt")
NOT_OF_TEXT = (*SYSTEM_KEYS, "tools", "functions", "input", "context", "history", *ANSWER_KEYS, "answer")
OWN_OPTIONS = {
    "add_generation_prompt",
    "continue_final_message",
    "conversation",
    "documents",
    "messages",
    "tokenize",
    "tools",
}
"""Names under which a chat itself is given to its template."""
KEYS = TOKEN_KEYS.union(
    MEDIA_KEYS,
    CHAT_KEYS,
    NOT_OF_TEXT,
    ALL_KEYS,
    "prompt instruction text chat_template_kwargs finish_reason stop_reason".split(),
    "id task split response_origin".split(),
    (LABEL_KEY,),
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
    num_replaced: int = 0
    """Lone surrogates inside JSON that it holds as text, which became U+FFFD."""


def line_meant(line: InputLine) -> Line:
    """What a line that was read means. Raises LeftOut where it could not be read, or means nothing."""
    if line.fault is not None or line.value is None:
        raise line.fault or LeftOut("not an object")
    with replacements_counted() as found:
        meant = understand(line.value)
    return replace(meant, num_replaced=sum(found.values())) if found else meant


def shown_id(line: InputLine) -> str | None:
    """The line's own id as text, for the user's eyes: it identifies nothing."""
    known = line.value.get("id") if line.value is not None else None
    return None if known is None else short(known)


def options_under(given: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A line's own template options over those of the run.

    Raises LeftOut where the two contradict each other, and for a name of OWN_OPTIONS.
    """
    if taken := next((name for name in own if name in OWN_OPTIONS), None):
        raise LeftOut("reserved template option", f"{taken} = {short(own[taken])}")
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
    value = without_empty_keys(value)
    messages = messages_in(value)
    if messages is None:
        if "text" in value:
            return text_of_line(value)
        raise LeftOut("unknown shape", f"keys {short(sorted(value))}, expected {SHAPES}")
    if system := system_beside(value):
        messages = with_system(messages, system)
    return Chat(messages, tools_in(value), options_of(value.get("chat_template_kwargs")))


def without_empty_keys(value: dict[str, Any]) -> dict[str, Any]:
    """The line without questions and answers that say nothing beside others that do: columns of merged data sets."""
    empty = {
        key
        for keys in (QUESTION_KEYS, ANSWER_KEYS)
        if any(is_filled(value.get(key)) for key in keys)
        for key in keys
        if not is_filled(value.get(key))
    }
    return {key: item for key, item in value.items() if key not in empty}


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
    if not chats:
        return None
    if not {"prompt", "instruction"} & set(value):
        check_question(chats[0], value)
    if set(WHOLE_KEYS) & set(value):
        read = {key for name in found for key in name}
        check_answers(chats[0], {key: item for key, item in value.items() if key not in read})
    return with_facts_beside(chats[0], value)


def with_facts_beside(messages: list[Message], value: dict[str, Any]) -> list[Message]:
    """The chat with the thought, the ending and the label that its line holds for the last answer.

    `label` false marks an answer that is not wanted, as KTO reads it: one of weight 0. Raises LeftOut where that
    answer has others.
    """
    last = dict(messages[-1])
    if last["role"] != "assistant":
        return messages
    if value.get(LABEL_KEY) is False and last.setdefault("weight", 0) not in (0, False):
        raise LeftOut(
            "shapes disagree", f"label false of the line and weight {short(last['weight'])} of its last answer"
        )
    if beside := {key: value[key] for key in ALL_KEYS if key in value and not is_switch(value[key])}:
        last = with_one_thought(last, beside)
    for key in ENDING_KEYS:
        if key in value and not is_same_ending(last.setdefault(key, value[key]), value[key]):
            raise LeftOut("shapes disagree", f"{key} of the line and of its last answer")
    return [*messages[:-1], last]


def tools_in(value: dict[str, Any]) -> list[Any] | None:
    """The tools under their name or under the one that OpenAI used before, `functions`."""
    tools, functions = tools_of(value.get("tools")), tools_of(value.get("functions"))
    if tools and functions and tools != functions:
        raise LeftOut("shapes disagree", "tools and functions")
    return tools or functions


def text_of_line(value: dict[str, Any]) -> Text:
    """Plain text; beside a part of a chat it is none, and which part it would be cannot be told."""
    text = value["text"]
    if not isinstance(text, str):
        raise LeftOut("not text", f"text is {short(text)}")
    if is_blank(text):
        raise LeftOut("empty text", f"text is {short(text)}")
    if beside := [key for key in NOT_OF_TEXT if is_filled(value.get(key))]:
        raise LeftOut("shapes disagree", f"plain text beside {beside[0]}")
    return Text(text)


def options_of(given: Any) -> dict[str, Any]:
    options = from_json_text(given, "broken template options")
    if options is not None and not isinstance(options, dict):
        raise LeftOut("broken template options", f"chat_template_kwargs is {short(options)}")
    return options or {}


def system_beside(value: dict[str, Any]) -> Message | None:
    """The system message that a line holds beside its chat; a blank one is none. Raises LeftOut where two differ."""
    given = [as_message({"role": "system", "content": value[key]}) for key in SYSTEM_KEYS if key in value]
    filled = [message for message in given if not is_blank(message["content"])]
    if any(message != filled[0] for message in filled):
        raise LeftOut("shapes disagree", " and ".join(SYSTEM_KEYS))
    return filled[0] if filled else None


def with_system(messages: list[Message], system: Message) -> list[Message]:
    """The chat under the system message that its line holds beside it."""
    first = messages[0]
    if first["role"] in ("system", "developer") and first["content"] == system["content"]:
        return messages
    if first["role"] == "system":
        raise LeftOut("shapes disagree", "the system text of the line and the chat's own system message")
    return [system, *messages]


def reader_of(key: str) -> Callable[[dict[str, Any]], list[Message]]:
    return lambda value: messages_of(value[key], "", key)


def reader_after(
    question: Callable[[dict[str, Any]], list[Message]], key: str
) -> Callable[[dict[str, Any]], list[Message]]:
    return lambda value: question(value) + answer_of(value[key], key)


def answer_of(given: Any, key: str) -> list[Message]:
    if not isinstance(given, (str, list)):
        raise LeftOut("not text", f"{key} is {short(given)}")
    return messages_of(given, "assistant", key)


READERS: dict[tuple[str, ...], Callable[[dict[str, Any]], list[Message]]] = {
    **{(key,): reader_of(key) for key in WHOLE_KEYS},
    **{("prompt", key): reader_after(read_prompt, key) for key in ANSWER_KEYS},
    **{("instruction", key): reader_after(read_instruction, key) for key in ANSWER_KEYS},
}
