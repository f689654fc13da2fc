"""Every shape of a line that is accepted, and the reason of every one that is not."""

import json
from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest
from dflash_offline.extract.inputs import LeftOut
from dflash_offline.extract.shapes import Chat, Tokens, understand
from hypothesis import given, settings
from hypothesis import strategies as st

ASKED, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    "value",
    [
        {"messages": [ASKED, SAID]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [ASKED, SAID]},
        {"prompt": "q", "completion": "a"},
        {"prompt": [ASKED], "completion": [SAID]},
        {"instruction": "q", "output": "a"},
        {"instruction": "q", "input": " ", "output": "a", "text": "rendered"},
        {"messages": [ASKED, SAID], "conversations": None, "tools": None, "source": 1},
        {"messages": [ASKED, {**SAID, "tool_calls": None}], "prompt": "q"},
        {"messages": [ASKED, SAID], "conversations": [{"from": "user", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, SAID], "tools": []},
        {"messages": [ASKED, {**SAID, "tool_calls": []}], "tools": "null"},
    ],
)
def test_one_chat_in_many_shapes(value: dict[str, Any]) -> None:
    line = understand(value)
    assert line.content == Chat([ASKED, SAID], None)
    assert (line.split, line.task) == (None, "")


def test_instruction_input_reaches_the_prompt() -> None:
    content = understand({"instruction": "Add.", "input": "2 and 4", "output": "6"}).content
    assert isinstance(content, Chat)
    assert content.messages[0]["content"] == "Add.\n\n2 and 4"


@pytest.mark.parametrize(
    "value", [{"prompt": "q"}, {"prompt": [ASKED]}, {"instruction": "q"}, {"prompt": "q", "completion": None}]
)
def test_a_prompt_alone(value: dict[str, Any]) -> None:
    assert understand(value).content == Chat([ASKED], None)


def test_system_beside_the_messages() -> None:
    system = {"role": "system", "content": "s"}
    assert understand({"system": "s", "prompt": "q"}).content == Chat([system, ASKED], None)
    for beside in ("s", " ", None):
        assert understand({"system": beside, "messages": [system, ASKED]}).content == Chat([system, ASKED], None)
    assert understand({"prompt": "q", "messages": [system, ASKED]}).content == Chat([system, ASKED], None)


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


def test_token_ids() -> None:
    assert understand({"input_ids": [5, 6], "loss_mask": [0, True]}).content == Tokens([5, 6], [False, True])
    assert understand({"input_ids": [5, 6]}).content == Tokens([5, 6], [False, False])
    assert understand({"input_ids": [5, 6], "labels": [-100, 6]}).content == Tokens([5, 6], [False, True])
    both = {"input_ids": [5, 6], "labels": [-100, 6], "loss_mask": [1, 1]}
    assert understand(both).content == Tokens([5, 6], [True, True])


def test_split_and_task() -> None:
    line = understand({"prompt": "q", "split": "heldout", "task": 7})
    assert (line.split, line.task) == ("heldout", "7")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, "unknown shape"),
        ({"text": "rendered"}, "unknown shape"),
        ({"question": "q", "answers": {}}, "unknown shape"),
        ({"messages": None}, "unknown shape"),
        ({"messages": [ASKED, SAID], "conversations": [ASKED, {**SAID, "content": "b"}]}, "shapes disagree"),
        ({"messages": [ASKED, SAID], "prompt": "other"}, "shapes disagree"),
        ({"messages": [ASKED, SAID], "instruction": "q", "output": "b"}, "shapes disagree"),
        ({"messages": [ASKED, SAID], "input_ids": [1]}, "shapes disagree"),
        ({"system": "other", "messages": [{"role": "system", "content": "s"}, ASKED, SAID]}, "shapes disagree"),
        ({"messages": []}, "no messages"),
        ({"messages": "text"}, "no messages"),
        ({"messages": ["text"]}, "no messages"),
        ({"messages": [{"content": "q"}]}, "unknown role"),
        ({"messages": [{"role": ["user"], "content": "q"}]}, "unknown role"),
        ({"conversations": [{"from": "narrator", "value": "q"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": 5}]}, "not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "not text"),
        ({"messages": [{"role": "tool", "content": {"at": datetime(2024, 1, 1)}}]}, "not text"),
        ({"messages": [{"role": "tool", "content": [b"raw", Decimal("1.5")]}]}, "not text"),
        ({"instruction": 5, "output": "a"}, "not text"),
        (
            {"messages": [{**SAID, "tool_calls": [{"function": {"name": "f", "arguments": '{"a":'}}]}]},
            "broken tool calls",
        ),
        ({"messages": [{**SAID, "tool_calls": [{"function": {"arguments": {}}}]}]}, "broken tool calls"),
        ({"messages": [{**SAID, "function_call": "add"}]}, "broken tool calls"),
        (
            {"messages": [{**SAID, "function_call": {"name": "f", "arguments": '{"a":' * 150 + "1" + "}" * 150}}]},
            "nested too deeply",
        ),
        ({"messages": [{**SAID, "tool_calls": {"a": 1}}]}, "broken tool calls"),
        ({"messages": [{**SAID, "tool_calls": ["f"]}]}, "broken tool calls"),
        ({"messages": [{**SAID, "tool_calls": [{"name": "f", "arguments": [1]}]}]}, "broken tool calls"),
        ({"messages": [ASKED], "tools": "[{"}, "broken tools"),
        ({"messages": [ASKED], "tools": {"a": 1}}, "broken tools"),
        ({"prompt": "q", "split": "test"}, "unknown split"),
        ({"input_ids": []}, "broken token ids"),
        ({"input_ids": [1.5]}, "broken token ids"),
        ({"input_ids": [True]}, "broken token ids"),
        ({"input_ids": [1, 2], "labels": [-100, 3]}, "broken labels"),
        ({"input_ids": [1, 2], "labels": [2]}, "broken labels"),
        ({"input_ids": [1, 2], "labels": "12"}, "broken labels"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "broken loss mask"),
        ({"input_ids": [1], "loss_mask": [2]}, "broken loss mask"),
        ({"input_ids": [1], "loss_mask": [[1]]}, "broken loss mask"),
    ],
)
def test_what_is_left_out_has_a_reason(value: dict[str, Any], reason: str) -> None:
    with pytest.raises(LeftOut) as caught:
        understand(value)
    assert caught.value.reason == reason


texts = st.sampled_from(["user", "assistant", "q", "", "[]", "{", "text", "train"])
scalars = st.none() | st.booleans() | st.integers(-1, 3) | st.floats(allow_nan=False) | texts
keys = st.sampled_from(
    [
        "role",
        "content",
        "from",
        "value",
        "tool_calls",
        "function_call",
        "function",
        "name",
        "arguments",
        "type",
        "text",
        "tools",
        "split",
        "messages",
        "prompt",
    ]
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4))
lines = st.dictionaries(
    st.sampled_from(
        [
            "messages",
            "conversations",
            "prompt",
            "completion",
            "instruction",
            "input",
            "output",
            "input_ids",
            "loss_mask",
            "labels",
            "tools",
            "system",
            "split",
        ]
    ),
    values,
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(lines)
def test_no_line_ends_the_run(value: dict[str, Any]) -> None:
    """Whatever JSON a line holds, it is understood or left out."""
    try:
        content = understand(value).content
    except LeftOut:
        return
    assert isinstance(content, Tokens) or all(isinstance(m["content"], str) for m in content.messages)
