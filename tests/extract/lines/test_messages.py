"""What the public names of roles, parts, thoughts, calls and tools become."""

import json
from typing import Any

import pytest
from dflash_offline.extract.lines.json_lines import LeftOut
from dflash_offline.extract.lines.shapes import Chat, understand
from dflash_offline.extract.lines.thoughts import THOUGHT_KEYS

ASKED, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {"function": {"name": "add", "arguments": '{"a": 1}'}},
        {"name": "add", "arguments": {"a": 1}},
    ],
)
def test_calls_as_text_and_as_object(call: dict[str, Any]) -> None:
    content = understand(
        {"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}], "tools": '["{\\"x\\": 1}"]'}
    )
    assert content.content == Chat([ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}], [{"x": 1}])


def test_the_old_function_call_is_a_tool_call() -> None:
    call = {"name": "add", "arguments": '{"a": 1}'}
    for old in (call, json.dumps(call)):
        content = understand({"messages": [ASKED, {"role": "assistant", "content": None, "function_call": old}]})
        assert content.content == Chat([ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}], None)


def test_null_text_parts_say_nothing() -> None:
    parts = [{"type": "text", "text": None}, {"type": "text", "text": "q"}, {"type": "text"}]
    assert understand({"messages": [{"role": "user", "content": parts}, SAID]}).content == Chat([ASKED, SAID], None)


def test_surrogates_inside_arguments_given_as_text() -> None:
    call = {"name": "f", "arguments": r'{"a": "\ud800"}'}
    content = understand({"messages": [{**SAID, "tool_calls": [call]}]}).content
    assert isinstance(content, Chat)
    assert content.messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": "\ufffd"}


def test_a_tool_result_that_is_an_object_is_written_as_json() -> None:
    content = understand({"messages": [{"role": "tool", "content": {"found": True}}]}).content
    assert isinstance(content, Chat)
    assert content.messages[0]["content"] == '{"found": true}'


@pytest.mark.parametrize("key", THOUGHT_KEYS)
def test_a_thought_under_any_key(key: str) -> None:
    said = {"role": "assistant", "content": "a", key: "t", "finish_reason": "length"}
    expected = {**SAID, "finish_reason": "length", "reasoning_content": "t"}
    assert understand({"messages": [ASKED, said]}).content == Chat([ASKED, expected], None)
    both = {**said, "reasoning_content": "t", "thinking": "\n"}
    if key != "thinking":
        assert understand({"messages": [ASKED, both]}).content == Chat([ASKED, expected], None)


@pytest.mark.parametrize("key", THOUGHT_KEYS)
@pytest.mark.parametrize(
    "content",
    [
        "a",
        "<think>t</think>a",
        "<think>\nt\n</think>\n\na",
        "\n <think> t </think>\n<think>t</think>\na",
        "<think>\n\n</think>\n\na",
        "<think>\n</think><think>t</think>a",
        "t\n</think>\n\na",
        "</think>\n\na",
    ],
)
def test_a_thought_that_the_content_repeats_is_one(key: str, content: str) -> None:
    said = {"role": "assistant", "content": content, key: " t\n"}
    expected = Chat([ASKED, {**SAID, "reasoning_content": " t\n"}], None)
    assert understand({"messages": [ASKED, said]}).content == expected
    also = {**said, "reasoning_content": " t\n", "thinking": "t"}
    assert understand({"messages": [ASKED, also]}).content == expected


@pytest.mark.parametrize(
    "content",
    [
        "<think>u</think>a",
        "<think>t</think><think>u</think>a",
        "u\n</think>\n\na",
        "<think>u",
        "<think></think>u</think>",
    ],
)
def test_a_thought_that_the_content_contradicts(content: str) -> None:
    with pytest.raises(LeftOut) as caught:
        understand({"messages": [ASKED, {"role": "assistant", "content": content, "reasoning_content": "t"}]})
    assert caught.value.reason == "thoughts disagree"


@pytest.mark.parametrize("content", ["<think>t</think>a", "t</think>a", "a <think>t</think>", "<think>\n\n</think>a"])
def test_a_thought_in_the_content_alone_stays(content: str) -> None:
    for thought in ({}, {"reasoning_content": " \n"}):
        messages = [ASKED, {"role": "assistant", "content": content, **thought}]
        assert understand({"messages": messages}).content == Chat([ASKED, {**SAID, "content": content}], None)


def test_marks_inside_of_an_answer_are_no_thought() -> None:
    said = {"role": "assistant", "content": "Write <think>x</think>.", "reasoning_content": "t"}
    assert understand({"messages": [ASKED, said]}).content == Chat([ASKED, said], None)


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool", "human", "observation"])
@pytest.mark.parametrize("rest", [{}, {"text": "x"}, {"content": None}, {"content": None, "parts": ["x"]}])
def test_a_message_without_content_is_no_empty_one(role: str, rest: dict[str, Any]) -> None:
    for key in ("role", "from"):
        with pytest.raises(LeftOut) as caught:
            understand({"messages": [{key: role, **rest}, SAID]})
        assert caught.value.reason == "no content"
        assert all(repr(name) in caught.value.detail for name in rest if name != "content")


@pytest.mark.parametrize("rest", [{}, {"content": None}, {"tool_calls": [CALL]}])
def test_an_answer_under_the_name_of_a_part_is_no_empty_one(rest: dict[str, Any]) -> None:
    """The answers after it would follow an empty one that nobody gave."""
    for role in ({"role": "assistant"}, {"from": "gpt"}):
        with pytest.raises(LeftOut, match="no content"):
            understand({"messages": [ASKED, {**role, "text": "a", **rest}, ASKED, SAID]})


def test_content_that_may_be_empty() -> None:
    assert understand({"messages": [{"role": "user", "content": ""}]}).content == Chat([{**ASKED, "content": ""}], None)
    for rest in ({}, {"content": None}, {"text": " "}, {"refusal": "No."}):
        content = understand({"messages": [ASKED, {"role": "assistant", **rest}]}).content
        assert isinstance(content, Chat)
        assert content.messages[1]["content"] == ""


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "text", "content": "q"}, "no content"),
        ({"type": "text", "text": None, "value": "q"}, "no content"),
        ({"type": "text", "text": "q", "image_url": None, "image": "a.png"}, "needs an image"),
    ],
)
def test_a_text_part_that_holds_something_else(part: dict[str, Any], reason: str) -> None:
    with pytest.raises(LeftOut) as caught:
        understand({"messages": [{"role": "user", "content": [part]}, SAID]})
    assert caught.value.reason == reason


def test_one_message_under_two_names() -> None:
    both = [{"role": "user", "from": "Human", "content": "q", "value": "q"}, {**SAID, "from": "gpt", "value": None}]
    assert understand({"messages": both}).content == Chat([ASKED, SAID], None)
    for other in ({"value": "other"}, {"value": ""}, {"value": ["q"]}, {"from": "gpt"}, {"from": "alice"}):
        with pytest.raises(LeftOut) as caught:
            understand({"messages": [{**ASKED, **other}, SAID]})
        assert caught.value.reason == "shapes disagree"


@pytest.mark.parametrize(
    ("name", "role"),
    [(name, "user") for name in ("human", "user", "Human")]
    + [(name, "assistant") for name in ("gpt", "assistant", "chatgpt", "bing", "bard", "bot", "model", "GPT")]
    + [(name, "tool") for name in ("tool", "observation", "function_response", "tool_response")]
    + [(name, name) for name in ("system", "developer", "function", "ipython")],
)
def test_role_names_of_the_wild(name: str, role: str) -> None:
    for message in ({"from": name, "value": "x"}, {"role": name, "content": "x"}):
        content = understand({"conversations": [message]}).content
        assert content == Chat([{"role": role, "content": "x"}], None)


@pytest.mark.parametrize("message", [ASKED, SAID, {"role": "tool", "content": "x"}, {**SAID, "content": ""}])
def test_text_beside_a_content_is_the_same(message: dict[str, Any]) -> None:
    for same in (message["content"], "", " ", None, []):
        assert understand({"messages": [ASKED, {**message, "text": same}]}).content is not None
    parts = [{"type": "text", "text": message["content"]}]
    assert understand({"messages": [{**message, "content": parts, "text": message["content"]}]}).content is not None
    for other in ("other", ["q"], {"a": 1}):
        with pytest.raises(LeftOut, match="shapes disagree"):
            understand({"messages": [ASKED, {**message, "text": other}]})


def test_calls_in_messages_of_their_own() -> None:
    """ShareGPT's function_call; several in a row are calls of one turn, as a list in one is."""
    call, other = {"name": "add", "arguments": {"a": 1}}, {"name": "sub", "arguments": '{"b": 2}'}
    tool = {"from": "observation", "value": "3"}
    expected = {
        "role": "assistant",
        "content": "",
        "tool_calls": [CALL, {"type": "function", "function": {"name": "sub", "arguments": {"b": 2}}}],
    }
    for calls in (
        [{"from": "function_call", "value": json.dumps(call)}, {"from": "function_call", "value": json.dumps(other)}],
        [{"role": None, "from": "function_call", "value": json.dumps(made)} for made in (call, other)],
        [{"role": "tool_call", "content": json.dumps([call, other])}],
    ):
        content = understand({"conversations": [ASKED, *calls, tool, calls[0]]}).content
        assert isinstance(content, Chat)
        assert content.messages[:3] == [ASKED, expected, {"role": "tool", "content": "3"}]
        assert len(content.messages) == 4


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
        {"function": {"name": "f", "parameters": {"type": "object"}}, "type": "function"},
        {"function": {"name": "f", "parameters": {"type": "object"}}},
        {"function": '{"name": "f", "parameters": {"type": "object"}}'},
        {"name": "f", "parameters": {"type": "object"}},
        {"name": "f", "parameters": '{"type": "object"}'},
        {"type": "function", "name": "f", "parameters": {"type": "object"}},
        '{"name": "f", "parameters": {"type": "object"}}',
    ],
)
def test_tools_in_any_envelope(tool: Any) -> None:
    """One text for the template: the same keys in the same order."""
    expected = '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'
    for tools in ([tool], json.dumps([tool])):
        content = understand({"prompt": "q", "tools": tools}).content
        assert isinstance(content, Chat)
        assert json.dumps(content.tools) == expected
