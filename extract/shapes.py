"""What one input line means: a chat or ready token ids, whichever of the known shapes it has.

Accepted shapes: `messages` (OpenAI), `conversations` (ShareGPT or roles), `prompt` with
`completion` (text or messages), `instruction` (+ `input`) with `output`, `input_ids` with
`loss_mask` or `labels`; and, where the target is to answer, `prompt` or `instruction` alone. Beside them `system`,
`tools`, `id`, `task` and `split` are read; other keys are ignored. A null value is an absent key.
Text stands for one message: it goes through the chat template like any other.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .inputs import LeftOut, without_surrogates

SHAPES = "messages, conversations, prompt + completion, instruction + output, input_ids + loss_mask or labels"
ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
SPLITS = ("train", "heldout")
KEYS = frozenset(
    "messages conversations prompt completion instruction input output input_ids loss_mask labels "
    "system tools id task split".split()
)
"""Every key that is read; the columns of a table that are."""
IGNORED_LABEL = -100  # transformers' and torch's: cross_entropy(ignore_index=-100)
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages ready for a chat template: text contents, tool arguments as objects."""

    messages: list[Message]
    tools: list[Any] | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ready ids [S] with the mask [S] of what is trained on, all False for a prompt alone."""

    ids: list[int]
    mask: list[bool]


@dataclass(frozen=True, slots=True)
class Line:
    """One understood input line. `split` None leaves the choice to the content hash."""

    content: Chat | Tokens
    split: str | None
    task: str


def understand(value: dict[str, Any]) -> Line:
    """Reads one line's value. Raises LeftOut, with a reason to count, for what is no sample."""
    value = {key: item for key, item in value.items() if item is not None}
    split = value.get("split")
    if split is not None and split not in SPLITS:
        raise LeftOut("unknown split", f"split is {short(split)}, expected train or heldout")
    return Line(content_of(value), split, str(value.get("task", "")))


def content_of(value: dict[str, Any]) -> Chat | Tokens:
    if "input_ids" in value:
        others = [name for name in ("messages", "conversations", "completion", "output") if name in value]
        if others:
            raise LeftOut("shapes disagree", f"input_ids beside {others[0]}")
        return tokens_of(value)
    found = {name: reader(value) for name, reader in READERS.items() if set(name) <= set(value)}
    if not found and "instruction" in value and "output" not in value:
        found = {("instruction",): read_instruction({**value, "output": ""})[:1]}
    if not found and "prompt" not in value:
        raise LeftOut("unknown shape", f"keys {short(sorted(value))}, expected {SHAPES}")
    chats = list(found.values())
    if any(said(messages) != said(chats[0]) for messages in chats[1:]):
        raise LeftOut("shapes disagree", " and ".join("+".join(name) for name in found))
    if "prompt" in value and "completion" not in value:
        prompt = messages_of(value["prompt"], "user", "prompt")
        if chats and not starts_with(chats[0], prompt):
            raise LeftOut("shapes disagree", "prompt and " + "+".join(next(iter(found))))
        chats = chats or [prompt]
    messages = chats[0]
    if "system" in value:
        messages = with_system(messages, as_message({"role": "system", "content": value["system"]}))
    return Chat(messages, tools_of(value.get("tools")))


def with_system(messages: list[Message], system: Message) -> list[Message]:
    """The chat under the system message that its line holds beside it; a blank one contradicts none."""
    if messages[0]["role"] != "system":
        return [system, *messages]
    if system["content"].strip() and system["content"] != messages[0]["content"]:
        raise LeftOut("shapes disagree", "system and the chat's own system message")
    return messages


def said(messages: list[Message]) -> list[tuple[Any, ...]]:
    """What two shapes of one line must agree on: roles, contents and calls."""
    return [(message["role"], message["content"], message.get("tool_calls")) for message in messages]


def starts_with(messages: list[Message], prompt: list[Message]) -> bool:
    """True when a lone prompt beside a whole chat is that chat's beginning, a system message aside."""
    after_system = messages[1:] if messages[0]["role"] == "system" else messages
    return said(prompt) in (said(messages)[: len(prompt)], said(after_system)[: len(prompt)])


def read_messages(value: dict[str, Any]) -> list[Message]:
    return messages_of(value["messages"], "", "messages")


def read_conversations(value: dict[str, Any]) -> list[Message]:
    return messages_of(value["conversations"], "", "conversations")


def read_completion(value: dict[str, Any]) -> list[Message]:
    prompt = messages_of(value["prompt"], "user", "prompt")
    return prompt + messages_of(value["completion"], "assistant", "completion")


def read_instruction(value: dict[str, Any]) -> list[Message]:
    """Alpaca: a non-empty `input` follows the instruction after a blank line."""
    parts = [value["instruction"], value.get("input", ""), value["output"]]
    if not all(isinstance(part, str) for part in parts):
        raise LeftOut("not text", "instruction, input or output is no string")
    prompt = f"{parts[0]}\n\n{parts[1]}" if parts[1].strip() else parts[0]
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": parts[2]}]


READERS: dict[tuple[str, ...], Callable[[dict[str, Any]], list[Message]]] = {
    ("messages",): read_messages,
    ("conversations",): read_conversations,
    ("prompt", "completion"): read_completion,
    ("instruction", "output"): read_instruction,
}


def messages_of(given: Any, text_role: str, key: str) -> list[Message]:
    """A list of messages, or with `text_role` a plain string as one message of that role."""
    if isinstance(given, str) and text_role:
        return [{"role": text_role, "content": given}]
    if not isinstance(given, list) or not given:
        raise LeftOut("no messages", f"{key} is {short(given)}")
    return [as_message(message) for message in given]


def as_message(given: Any) -> Message:
    """One message with role and text content; ShareGPT names become OpenAI's, nulls vanish."""
    if not isinstance(given, dict):
        raise LeftOut("no messages", f"a message is {short(given)}")
    message = {key: item for key, item in given.items() if item is not None}
    role = message.pop("role", None) if "role" in message else message.pop("from", None)
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if not isinstance(role, str) or role not in ROLES:
        raise LeftOut("unknown role", f"role {short(role)}, expected one of {', '.join(sorted(ROLES))}")
    message["content"] = text_of(message.get("content", ""), role)
    calls = message.pop("tool_calls", None)
    if role == "assistant" and (call := from_json_text(message.pop("function_call", None), "broken tool calls")):
        calls = calls or [{"function": call}]
    if calls := from_json_text(calls, "broken tool calls"):
        if not isinstance(calls, list):
            raise LeftOut("broken tool calls", f"tool_calls is {short(calls)}")
        message["tool_calls"] = [as_call(call) for call in calls]
    return {"role": role, **message}


def text_of(content: Any, role: str) -> str:
    """Text parts are joined; a tool's result that is an object is written as JSON."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        texts = ["" if part.get("text") is None else part["text"] for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise LeftOut("not text", f"a text part of a {role} message is {short(content)}")
        return "".join(texts)
    if role in ("tool", "function", "ipython") and isinstance(content, (dict, list)):
        try:
            return json.dumps(content, ensure_ascii=False)
        except TypeError as error:  # times, bytes and decimals of a table
            raise LeftOut("not text", f"content of a {role} message: {error}") from error
    raise LeftOut("not text", f"content of a {role} message is {short(content)}")


def as_call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, so that text and object give the same ids."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise LeftOut("broken tool calls", f"a call is {short(call)}")
    arguments = from_json_text(inner.get("arguments", {}), "broken tool calls")
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, dict):
        raise LeftOut("broken tool calls", f"arguments of {inner['name']!r} are {short(arguments)}")
    rest = {key: item for key, item in call.items() if inner is not call and key != "function"}
    return {"type": "function", **rest, "function": {**inner, "arguments": arguments}}


def tools_of(given: Any) -> list[Any] | None:
    tools = from_json_text(given, "broken tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise LeftOut("broken tools", f"tools is {short(tools)}")
    return [from_json_text(tool, "broken tools") for tool in tools]


def from_json_text(given: Any, reason: str) -> Any:
    """JSON that came as text is parsed; anything else, and blank text as None, passes."""
    if not isinstance(given, str):
        return given
    if not given.strip():
        return None
    try:
        return without_surrogates(json.loads(given))[0]
    except (ValueError, RecursionError) as error:
        raise LeftOut(reason, f"{short(given)}: {error}") from error


def tokens_of(value: dict[str, Any]) -> Tokens:
    ids, mask = value["input_ids"], value.get("loss_mask")
    if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
        raise LeftOut("broken token ids", f"input_ids is {short(ids)}")
    if mask is None:
        labels = value.get("labels")
        return Tokens(ids, [False] * len(ids) if labels is None else mask_of_labels(ids, labels))
    if not isinstance(mask, list) or len(mask) != len(ids) or any(m not in (0, 1) for m in mask):
        raise LeftOut("broken loss mask", f"loss_mask is {short(mask)} for {len(ids)} ids")
    return Tokens(ids, [bool(m) for m in mask])


def mask_of_labels(ids: list[int], labels: Any) -> list[bool]:
    """The loss mask that transformers' `labels` mean: -100 is not trained on, else the id itself."""
    if not isinstance(labels, list) or len(labels) != len(ids) or any(type(label) is not int for label in labels):
        raise LeftOut("broken labels", f"labels is {short(labels)} for {len(ids)} ids")
    for place, (token, label) in enumerate(zip(ids, labels)):
        if label not in (token, IGNORED_LABEL):
            raise LeftOut("broken labels", f"label {label} at token {place}, expected its id {token} or -100")
    return [label != IGNORED_LABEL for label in labels]


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
