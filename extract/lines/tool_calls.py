"""Tool calls, and the tools that may be called, as OpenAI writes them, with arguments and schemas as objects.

Knows the names that public data sets give to their parts; knows no role and no shape of a line.
"""

from collections.abc import Mapping
from typing import Any

from .json_lines import LeftOut
from .json_text import from_json_text, is_blank, is_filled, json_of, short

BROKEN = "broken tool calls"
ARGUMENT_KEYS = ("arguments", "parameters", "args")
"""Names of one thing: OpenAI's, that of Llama 3 and that of LangChain."""
CALL_KEYS = {"name", "type", "id", "index", "call_id", "tool_call_id", *ARGUMENT_KEYS}
Call = dict[str, Any]


def calls_of(message: dict[str, Any], role: str) -> list[Call]:
    """Takes the calls out of a message, those of the old `function_call` too; beside others it must be the same."""
    given = from_json_text(message.pop("tool_calls", None), BROKEN)
    if given and not isinstance(given, list):
        raise LeftOut(BROKEN, f"tool_calls is {short(given)}")
    calls = [as_call(call) for call in given or []]
    if role != "assistant" or not (old := from_json_text(message.pop("function_call", None), BROKEN)):
        return calls
    old_calls = [as_call({"function": old})]
    if calls and calls_said(calls) != calls_said(old_calls):
        raise LeftOut(BROKEN, f"tool_calls has other calls than function_call, {short(old)}")
    return calls or old_calls


def calls_said(calls: list[Call]) -> list[tuple[str, Any]]:
    """Names and arguments alone: one of two shapes may lack the ids of the calls."""
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def as_call(call: Any) -> Call:
    """A tool call with its arguments as an object, so that text and object give the same ids."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or is_blank(inner["name"]):
        raise LeftOut(BROKEN, f"a call is {short(call)}")
    arguments = arguments_of(inner, {} if inner is call else call)
    dropped = ("type", "function", *ARGUMENT_KEYS)
    rest = {key: item for key, item in call.items() if inner is not call and key not in dropped}
    others = ARGUMENT_KEYS[1:] if inner is not call else ("type", *ARGUMENT_KEYS[1:])
    bare = {key: item for key, item in inner.items() if key not in others}
    return {"type": "function", **rest, "function": {**bare, "arguments": arguments}}


def arguments_of(inner: Mapping[str, Any], envelope: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, under whichever of their names; none at all are an empty object.

    Raises LeftOut where two differ, where they are no object, and where they may stand under a name not known.
    """
    name = short(inner["name"])
    given = [holder[key] for holder in (inner, envelope) for key in ARGUMENT_KEYS if key in holder]
    found = [arguments for item in given if (arguments := from_json_text(item, BROKEN)) is not None]
    if any(arguments != found[0] for arguments in found):
        raise LeftOut(BROKEN, f"arguments of {name} are given twice, {short(found[0])} is one of them")
    strange = [key for key in inner if key not in CALL_KEYS and is_filled(inner[key])]
    if not found and strange:
        raise LeftOut(BROKEN, f"a call of {name} has {short(strange)}, expected arguments")
    arguments = found[0] if found else {}
    if not isinstance(arguments, dict):
        raise LeftOut(BROKEN, f"arguments of {name} are {short(arguments)}")
    json_of(arguments, BROKEN, f"arguments of {name}")
    return arguments


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
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or is_blank(inner["name"]):
        raise LeftOut("broken tools", f"a tool's function is {short(inner)}")
    if isinstance(inner.get("parameters"), str):
        inner = inner | {"parameters": from_json_text(inner["parameters"], "broken tools")}
    rest = {key: item for key, item in rest.items() if key not in ("type", "function")}
    return {"type": tool.get("type", "function"), **rest, "function": inner}
