"""One message of a chat as every chat template reads it: role, text, thought, calls with their arguments as objects.

Knows the names that public data sets give to roles, content parts, thoughts and calls; knows no shape of a line and
no template.
"""

import json
from collections.abc import Mapping
from typing import Any

from .json_lines import LeftOut, without_surrogates

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
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
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


def as_message(given: Any) -> Message:
    """One message with role and text content; other names become OpenAI's, nulls vanish, other keys stay.

    An assistant's thought is in `reasoning_content`, whichever key it came under; a blank one is none. A
    `finish_reason` stays as it is: an answer cut by a limit has no end mark to be trained on.
    Raises LeftOut for a role or content that no text model reads, and for calls that are broken.
    """
    if not isinstance(given, dict):
        raise LeftOut("no messages", f"a message is {short(given)}")
    message = {key: item for key, item in given.items() if item is not None}
    role = message.pop("role", None) if "role" in message else message.pop("from", None)
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    if isinstance(role, str):
        role = role if role in ROLES else ROLE_NAMES.get(role.lower(), role.lower())
    if isinstance(role, str) and role in CALL_ROLES:
        calls = from_json_text(message.pop("content", None), "broken tool calls")
        role, message["tool_calls"] = "assistant", calls if isinstance(calls, list) else [calls]
    if not isinstance(role, str) or role not in ROLES:
        raise LeftOut("unknown role", f"role {short(role)}, expected one of {', '.join(sorted(ROLES))}")
    if need := media_of(message):
        raise LeftOut(need, f"a {role} message holds it beside its content")
    message = {key: item for key, item in message.items() if key not in MEDIA_KEYS}  # empty ones
    message["content"] = text_of(message.get("content", ""), role)
    if role == "assistant":
        message = with_one_thought(message)
    if calls := calls_of(message, role):
        message["tool_calls"] = calls
    return {"role": role, **message}


def media_of(holder: Mapping[str, Any]) -> str:
    """Why a line or message with these keys cannot be read by a text model; an empty text where it can."""
    return next((f"needs {what}" for key, what in MEDIA_KEYS.items() if key in holder and is_filled(holder[key])), "")


def is_filled(value: Any) -> bool:
    return value is not None and value is not False and value != "" and value != [] and value != {}


def with_one_thought(message: Message) -> Message:
    """The thought under the key that templates read. Raises LeftOut where two keys hold different ones."""
    thoughts = {key: message[key] for key in THOUGHT_KEYS if key in message}
    message = {key: item for key, item in message.items() if key not in thoughts}
    for key, thought in thoughts.items():
        if not isinstance(thought, str):
            raise LeftOut("not text", f"{key} of an assistant message is {short(thought)}")
    said = {key: thought for key, thought in thoughts.items() if thought.strip()}
    if len(set(said.values())) > 1:
        raise LeftOut("thoughts disagree", " and ".join(said))
    return message | ({"reasoning_content": next(iter(said.values()))} if said else {})


def calls_of(message: Message, role: str) -> list[Message]:
    """Takes the calls out of a message, those of the old `function_call` too."""
    calls = message.pop("tool_calls", None)
    if role == "assistant" and (call := from_json_text(message.pop("function_call", None), "broken tool calls")):
        calls = calls or [{"function": call}]
    calls = from_json_text(calls, "broken tool calls")
    if calls and not isinstance(calls, list):
        raise LeftOut("broken tool calls", f"tool_calls is {short(calls)}")
    return [as_call(call) for call in calls or []]


def join_calls(messages: list[Message], given: list[Any]) -> list[Message]:
    """Calls that stand in messages of their own, one after the other, become calls of one turn."""
    joined: list[Message] = []
    was_call = False
    for message, origin in zip(messages, given):
        role = origin.get("role", origin.get("from"))
        is_call = isinstance(role, str) and role.lower() in CALL_ROLES
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
    text = part.get("text")
    if text is not None and not isinstance(text, str):
        raise LeftOut("not text", f"a text part of a {role} message is {short(part)}")
    return text or ""


def as_call(call: Any) -> Message:
    """A tool call with its arguments as an object, so that text and object give the same ids."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise LeftOut("broken tool calls", f"a call is {short(call)}")
    arguments = from_json_text(inner.get("arguments", {}), "broken tool calls")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise LeftOut("broken tool calls", f"arguments of {inner['name']!r} are {short(arguments)}")
    json_of(arguments, "broken tool calls", f"arguments of {inner['name']!r}")
    rest = {key: item for key, item in call.items() if inner is not call and key not in ("type", "function")}
    bare = {key: item for key, item in inner.items() if inner is not call or key != "type"}
    return {"type": "function", **rest, "function": {**bare, "arguments": arguments}}


def tools_of(given: Any) -> list[Any] | None:
    """Tools as OpenAI writes them, from a list or JSON text, from functions inside an envelope or bare."""
    tools = from_json_text(given, "broken tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise LeftOut("broken tools", f"tools is {short(tools)}")
    return [as_tool(from_json_text(tool, "broken tools")) for tool in tools]


def as_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not tool:
        raise LeftOut("broken tools", f"a tool is {short(tool)}")
    json_of(tool, "broken tools", "a tool")
    if "function" in tool:
        inner, rest = from_json_text(tool["function"], "broken tools"), tool
    elif isinstance(tool.get("name"), str):
        inner, rest = {key: item for key, item in tool.items() if key != "type"}, {}
    else:
        return tool
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise LeftOut("broken tools", f"a tool's function is {short(inner)}")
    if isinstance(inner.get("parameters"), str):
        inner = inner | {"parameters": from_json_text(inner["parameters"], "broken tools")}
    rest = {key: item for key, item in rest.items() if key not in ("type", "function")}
    return {"type": tool.get("type", "function"), **rest, "function": inner}


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


def json_of(value: Any, reason: str, name: str) -> str:
    """The value as JSON text. Raises LeftOut for what JSON does not hold: NaN, and times and bytes of a table."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise LeftOut(reason, f"{name}: {error}") from error


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
