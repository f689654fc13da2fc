"""One message of a chat as every chat template reads it: role, text, thought, calls with their arguments as objects.

Knows the names that public data sets give to roles and content parts; knows no shape of a line and no template.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .json_lines import LeftOut
from .json_text import from_json_text, is_filled, json_of, short
from .thoughts import with_one_thought
from .tool_calls import BROKEN, calls_of

ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}
ROLE_NAMES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
"""Names of ShareGPT, Gemma and tool data sets; upper and lower case are one."""
CALL_ROLES = {"function_call", "tool_call"}
"""A message that is nothing but an assistant's call, as JSON; several in a row are calls of one turn."""
TOOL_ROLES = {"tool", "function", "ipython"}
UNASKING_ROLES = {"system", "developer", "assistant"}
"""Roles that ask for nothing: no server answers a chat of these alone."""
TEXT_PARTS = {"text", "input_text", "output_text"}
MEDIA_KEYS = {
    "image": "an image",
    "images": "an image",
    "audio": "audio",
    "audios": "audio",
    "video": "video",
    "videos": "video",
}
"""Keys of a line or a message that hold what no text model reads."""
MEDIA_PARTS = {
    "image": "an image",
    "image_url": "an image",
    "input_image": "an image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
}
Message = dict[str, Any]


def messages_of(given: Any, text_role: str, key: str) -> list[Message]:
    """A list of messages, or its JSON text; with `text_role` a plain string is one message of that role."""
    if isinstance(given, str) and text_role:
        return [{"role": text_role, "content": given}]
    given = from_json_text(given, "no messages")
    if not isinstance(given, list) or not given:
        raise LeftOut("no messages", f"{key} is {short(given)}")
    return join_calls([as_message(message) for message in given], given)


def as_message(given: Any) -> Message:
    """One message with role and text content; other names become OpenAI's, nulls vanish, other keys stay.

    An assistant's thought is in `reasoning_content`, wherever it came (`thoughts`); a blank one is none. A
    `finish_reason` stays as it is: an answer cut by a limit has no end mark to be trained on.
    Raises LeftOut for a role or content that no text model reads, for calls that are broken, and for a message
    without content: only an assistant's, which may be nothing but calls, is then an empty text, unless it has a `text`.
    """
    if not isinstance(given, dict):
        raise LeftOut("no messages", f"a message is {short(given)}")
    role = role_of(given)
    message = {key: item for key, item in given.items() if item is not None and key not in ("role", "from")}
    if "value" in message:
        value = message.pop("value")
        if message.setdefault("content", value) != value:
            raise LeftOut("shapes disagree", f"content and value of a {role} message")
    if isinstance(role, str) and role in CALL_ROLES:
        role, message = "assistant", with_calls_of_content(message)
    if not isinstance(role, str) or role not in ROLES:
        raise LeftOut("unknown role", f"role {short(role)}, expected one of {', '.join(sorted(ROLES))}")
    if need := media_of(message):
        raise LeftOut(need, f"a {role} message holds it beside its content")
    message = {key: item for key, item in message.items() if key not in MEDIA_KEYS}  # empty ones
    if "content" not in message and (role != "assistant" or is_filled(message.get("text"))):
        raise LeftOut("no content", f"a {role} message has {short(sorted(message))} and no content")
    text = message.get("text") if "content" in message else None
    message["content"] = text_of(message.get("content", ""), role)
    if is_filled(text) and text != message["content"]:
        raise LeftOut("shapes disagree", f"content and text of a {role} message")
    if role == "assistant":
        message = with_one_thought(message)
    if calls := calls_of(message, role):
        message["tool_calls"] = calls
    return {"role": role, **message}


def is_asked(messages: Sequence[Message], turn: int) -> bool:
    """True where something before message `turn`, counted from 0, asks for an answer: a user or a tool's result."""
    return any(message["role"] not in UNASKING_ROLES for message in messages[:turn])


def role_of(given: Mapping[str, Any]) -> Any:
    """The role under the name that is known here, None where there is none. Raises LeftOut where two differ."""
    roles = [known_role(given[key]) for key in ("role", "from") if given.get(key) is not None]
    if len(roles) == 2 and roles[0] != roles[1]:
        raise LeftOut("shapes disagree", f"role {short(roles[0])} and from {short(roles[1])} of a message")
    return roles[0] if roles else None


def known_role(given: Any) -> Any:
    if not isinstance(given, str) or given in ROLES:
        return given
    return ROLE_NAMES.get(given.lower(), given.lower())


def with_calls_of_content(message: Message) -> Message:
    """An assistant's message with the calls that its content is."""
    if "tool_calls" in message:
        raise LeftOut(BROKEN, "a message of a call's role has tool_calls too")
    calls = from_json_text(message.get("content"), BROKEN)
    rest = {key: item for key, item in message.items() if key != "content"}
    return rest | {"tool_calls": calls if isinstance(calls, list) else [calls]}


def media_of(holder: Mapping[str, Any]) -> str:
    """Why a line or message with these keys cannot be read by a text model; an empty text where it can."""
    return next((f"needs {what}" for key, what in MEDIA_KEYS.items() if key in holder and is_filled(holder[key])), "")


def join_calls(messages: list[Message], given: list[Any]) -> list[Message]:
    """Calls that stand in messages of their own, one after the other, become calls of one turn."""
    joined: list[Message] = []
    was_call = False
    for message, origin in zip(messages, given):
        role = role_of(origin)
        is_call = isinstance(role, str) and role in CALL_ROLES
        if is_call and was_call:
            joined[-1] = joined[-1] | {"tool_calls": joined[-1]["tool_calls"] + message["tool_calls"]}
        else:
            joined.append(message)
        was_call = is_call
    return joined


def text_of(content: Any, role: str) -> str:
    """Text parts are joined, with nothing between; a tool's result that is an object is written as JSON."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and (role not in TOOL_ROLES or all(map(is_known_part, content))):
        return "".join(text_of_part(part, role) for part in content)
    if role in TOOL_ROLES and isinstance(content, (dict, list)):
        return json_of(content, "not text", f"content of a {role} message")
    raise LeftOut("not text", f"content of a {role} message is {short(content)}")


def is_known_part(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and (kind in TEXT_PARTS or kind in MEDIA_PARTS)


def text_of_part(part: Any, role: str) -> str:
    if not is_known_part(part):
        raise LeftOut("unknown content part", f"a part of a {role} message is {short(part)}")
    if part["type"] in MEDIA_PARTS:
        raise LeftOut(f"needs {MEDIA_PARTS[part['type']]}", f"a {role} message has a part of type {part['type']!r}")
    if need := media_of(part):
        raise LeftOut(need, f"a text part of a {role} message holds it beside its text")
    text = part.get("text")
    if text is None and any(isinstance(item, str) and is_filled(item) for key, item in part.items() if key != "type"):
        raise LeftOut("no content", f"a text part of a {role} message is {short(part)}")
    if text is not None and not isinstance(text, str):
        raise LeftOut("not text", f"a text part of a {role} message is {short(part)}")
    return text or ""
