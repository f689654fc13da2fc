"""Calls and tools under the names that public data sets give to their parts, and those that are broken."""

from typing import Any

import pytest
from dflash_offline.extract.lines.json_lines import LeftOut
from dflash_offline.extract.lines.shapes import Chat, understand

ASKED = {"role": "user", "content": "q"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def calls(message: dict[str, Any]) -> Any:
    content = understand({"messages": [ASKED, {"role": "assistant", **message}]}).content
    assert isinstance(content, Chat)
    return content.messages[1]["tool_calls"]


@pytest.mark.parametrize("key", ["arguments", "parameters", "args"])
@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_arguments_under_any_of_their_names(key: str, arguments: Any) -> None:
    call = {"name": "add", key: arguments}
    assert calls({"tool_calls": [call]}) == [CALL]
    assert calls({"tool_calls": [{"type": "function", "function": call}]}) == [CALL]
    assert calls({"tool_calls": [{"function": {"name": "add"}, key: arguments}]}) == [CALL]
    assert calls({"function_call": call}) == [CALL]
    assert calls({"tool_calls": [{**call, "arguments": {"a": 1}, "args": None}]}) == [CALL]


def test_a_call_without_arguments_has_none() -> None:
    for arguments in ({}, {"arguments": None}, {"arguments": " "}, {"args": "{}"}, {"kwargs": {}}):
        assert (
            calls({"tool_calls": [{"id": "k1", "function": {"name": "add", **arguments}}]})[0]["function"]["arguments"]
            == {}
        )


def test_calls_given_twice_that_are_the_same() -> None:
    old = {"name": "add", "arguments": '{"a": 1}'}
    assert calls({"tool_calls": [{"id": "k1", **CALL}], "function_call": old}) == [{"id": "k1", **CALL}]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"tool_calls": [{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}]}, "broken tool calls"),
        ({"tool_calls": [{"name": "f", "parameters": {}, "args": '{"a": 2}'}]}, "broken tool calls"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": {}}, "args": {"a": 2}}]}, "broken tool calls"),
        ({"tool_calls": [{"type": "tool_use", "name": "f", "input": {"a": 1}}]}, "broken tool calls"),
        ({"tool_calls": [{"function": {"name": "f", "kwargs": '{"a": 1}'}}]}, "broken tool calls"),
        ({"tool_calls": [{"name": "f", "args": [1]}]}, "broken tool calls"),
        ({"tool_calls": [{"name": "", "arguments": {}}]}, "broken tool calls"),
        ({"tool_calls": [{"function": {"name": " \u200b", "arguments": {}}}]}, "broken tool calls"),
        ({"tool_calls": [{"arguments": {"a": 1}}]}, "broken tool calls"),
        ({"tool_calls": [CALL], "function_call": {"name": "sub", "arguments": "{}"}}, "broken tool calls"),
        ({"role": "tool_call", "content": '{"name": "f"}', "tool_calls": [CALL]}, "broken tool calls"),
        ({"tool_calls": [{"name": "f", "arguments": '{"a": 1, "a": 2}'}]}, "key given twice"),
        ({"tool_calls": '[{"name": "f", "name": "g"}]'}, "key given twice"),
        ({"function_call": '{"name": "f", "arguments": {"b": {"a": 1, "a": 2}}}'}, "key given twice"),
    ],
)
def test_calls_that_are_left_out(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(LeftOut) as caught:
        calls(message)
    assert caught.value.reason == reason


def test_functions_are_tools() -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    expected = understand({"prompt": "q", "tools": [{"type": "function", "function": function}]}).content
    assert understand({"prompt": "q", "functions": [function]}).content == expected
    assert understand({"prompt": "q", "functions": [function], "tools": [function]}).content == expected
    for broken, reason in (
        ({"functions": [function], "tools": [{"name": "g"}]}, "shapes disagree"),
        ({"tools": [{"name": " "}]}, "broken tools"),
        ({"tools": '[{"name": "f", "name": "g"}]'}, "key given twice"),
    ):
        with pytest.raises(LeftOut) as caught:
            understand({"prompt": "q", **broken})
        assert caught.value.reason == reason
