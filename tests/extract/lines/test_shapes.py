"""Every shape of a line that is accepted, and the reason of every one that is not."""

import json
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_offline.extract.lines.inputs import LeftOut, read_lines
from dflash_offline.extract.lines.shapes import KEYS, Chat, Text, Tokens, line_meant, understand
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
        {"messages": json.dumps([ASKED, SAID])},
        {"conversations": ' [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]'},
        {"conversation": [ASKED, SAID]},
        {"prompt": "q", "response": "a"},
        {"prompt": "q", "output": "a"},
        {"instruction": "q", "completion": "a"},
        {"instruction": "q", "output": [SAID]},
        {"prompt": "q", "response": "a", "completion": [SAID], "messages": [ASKED, SAID], "instruction": "q"},
        {"instruction": "q", "response": "a"},
        {"instruction": "q", "context": "", "response": "a", "history": []},
        {"messages": [ASKED, SAID], "text": 5},
        {"messages": [ASKED, SAID], "images": [], "image": None, "audio": "", "video": {}},
        {
            "messages": [
                {"role": "User", "content": "q"},
                {"role": "ASSISTANT", "content": [{"type": "output_text", "text": "a"}]},
            ]
        },
        {"messages": [{**ASKED, "images": []}, {**SAID, "reasoning_content": " ", "thinking": ""}]},
        {"messages": [ASKED, SAID], "chat_template_kwargs": "{}"},
        {"messages": [ASKED, SAID], "conversations": [], "prompt": "", "instruction": " ", "output": ""},
        {"messages": [], "conversation": "", "prompt": "q", "completion": "a", "response": "", "output": []},
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
    for blank in ("", " \n", "\u200b", []):
        assert understand({"system": blank, "prompt": "q"}).content == Chat([ASKED], None)
    developer = {"role": "developer", "content": "s"}
    assert understand({"system": "s", "messages": [developer, ASKED]}).content == Chat([developer, ASKED], None)
    content = understand({"system": "t", "messages": [developer, ASKED]}).content
    assert content == Chat([{"role": "system", "content": "t"}, developer, ASKED], None)


def test_system_under_its_other_name() -> None:
    expected = Chat([{"role": "system", "content": "s"}, ASKED, SAID], None)
    chats: list[dict[str, Any]] = [
        {"messages": [ASKED, SAID]},
        {"messages": expected.messages},
        {"instruction": "q", "output": "a"},
        {"prompt": "q", "response": "a"},
    ]
    for chat in chats:
        for beside in ({}, {"system": "s"}, {"system": ""}):
            assert understand({**chat, "system_prompt": "s", **beside}).content == expected
        with pytest.raises(LeftOut, match="shapes disagree"):
            understand({**chat, "system_prompt": "s", "system": "other"})
    assert understand({**chats[0], "system_prompt": " "}).content == Chat([ASKED, SAID], None)
    for wrong in ({**chats[1], "system_prompt": "other"}, {"text": "Once", "system_prompt": "s"}):
        with pytest.raises(LeftOut, match="shapes disagree"):
            understand(wrong)
    assert "system_prompt" in KEYS


def test_a_prompt_that_is_messages_as_json_text() -> None:
    system = {"role": "system", "content": "s"}
    assert understand({"prompt": json.dumps([ASKED]), "completion": "a"}).content == Chat([ASKED, SAID], None)
    assert understand({"prompt": f"\n{json.dumps([system, ASKED])} "}).content == Chat([system, ASKED], None)
    old = json.dumps([{"from": "human", "value": "q"}])
    assert understand({"prompt": old, "messages": [ASKED, SAID]}).content == Chat([ASKED, SAID], None)
    with pytest.raises(LeftOut, match="unknown role"):
        understand({"prompt": '[{"role": "narrator", "content": "q"}]'})
    with pytest.raises(LeftOut, match="key given twice"):
        understand({"prompt": '[{"role": "user", "content": "q", "content": "r"}]'})
    for text in ('["q"]', "[]", "[1] is a list", '[{"a": 1, "a": 2}]', '{"role": "user", "content": "q"}', "[" * 9999):
        assert understand({"prompt": text}).content == Chat([{"role": "user", "content": text}], None)


@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_an_input_under_a_blank_instruction_stands_alone(blank: str) -> None:
    for key in ("prompt", "instruction"):
        for value in ({key: blank, "input": "q"}, {key: blank, "context": "q", "input": " "}):
            assert understand(value).content == Chat([ASKED], None)
        assert understand({key: blank}).content == Chat([{**ASKED, "content": blank}], None)


def test_token_ids_win_over_the_text_beside_them() -> None:
    ids = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    for beside in ({"prompt": "q"}, {"text": "x"}, {"system": "s", "tools": "[{"}, {"instruction": "q", "input": "x"}):
        content = understand({**ids, **beside}).content
        assert isinstance(content, Tokens)
        assert content.ids.tolist() == [1, 2]


def test_surrogates_of_json_texts_are_counted_once_each(tmp_path: Path) -> None:
    lone, call = r"\ud83d", {"name": "f", "arguments": r'{"a": "\udc00 \ud800"}'}
    rows = [
        {"messages": f'[{{"role": "user", "content": "half {lone}"}}]'},
        {"prompt": f'[{{"role": "user", "content": "{lone}"}}]', "completion": "a", "response": "a"},
        {"messages": [ASKED, {**SAID, "tool_calls": [call]}], "chat_template_kwargs": f'{{"x": "{lone}"}}'},
        {"messages": [ASKED, {**SAID, "content": lone}], "tools": r'[{"name": "\ud83d\ude00"}]'},
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = list(read_lines(tmp_path / "x.jsonl", KEYS))
    assert [line.num_replaced for line in lines] == [0] * 4
    assert [line_meant(line).num_replaced for line in lines] == [1, 1, 3, 0]
    assert "half \ufffd" in str(line_meant(lines[0]).content)


def test_plain_text() -> None:
    assert understand({"text": " Once upon a time", "id": 5}).content == Text(" Once upon a time")
    assert understand({"text": "rendered", "prompt": "q"}).content == Chat([ASKED], None)


def test_options_of_a_line() -> None:
    for options in ({"enable_thinking": False}, '{"enable_thinking": false}'):
        content = understand({"prompt": "q", "chat_template_kwargs": options}).content
        assert content == Chat([ASKED], None, {"enable_thinking": False})


def test_where_the_answers_come_from() -> None:
    for origin in ("elsewhere", "target greedy", "target T=0.7", None):
        assert understand({"prompt": "q", "response_origin": origin}).origin == origin


def test_earlier_turns_of_an_instruction() -> None:
    value = {"instruction": "q2", "context": "c", "history": [["q", "a"]], "response": "a2", "system": "s"}
    content = understand(value).content
    assert isinstance(content, Chat)
    assert [m["content"] for m in content.messages] == ["s", "q", "a", "q2\n\nc", "a2"]
    assert [m["role"] for m in content.messages] == ["system", "user", "assistant", "user", "assistant"]


def test_shapes_agree_whatever_ids_their_calls_have() -> None:
    with_id = {"role": "assistant", "tool_calls": [{"id": "k1", **CALL}]}
    without = {"from": "function_call", "value": json.dumps(CALL["function"])}
    content = understand({"messages": [ASKED, with_id], "conversations": [ASKED, without]}).content
    assert isinstance(content, Chat)


HANDED = {
    "c01-encoding": [None] * 5,
    "c03-field-shapes": [None] * 6 + ["shapes disagree", None, "unknown shape", None],
    "c05-empty-answers": [None] * 8,
    "c12-identity": [None] * 10,
}


@pytest.mark.parametrize("name", HANDED)
def test_the_handed_lines(cases: Path, name: str) -> None:
    """What their shapes alone decide: whether an answer is usable is the template's to say."""
    reasons: list[str | None] = []
    for line in read_lines(cases / "data" / f"{name}.jsonl", KEYS):
        try:
            assert line.value is not None
            understand(line.value)
            reasons.append(None)
        except LeftOut as fault:
            reasons.append(fault.reason)
    assert reasons == HANDED[name]


def test_split_and_task() -> None:
    line = understand({"prompt": "q", "split": "heldout", "task": 7})
    assert (line.split, line.task) == ("heldout", "7")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, "unknown shape"),
        ({"text": 5}, "not text"),
        ({"text": " \n"}, "empty text"),
        ({"text": "\ufeff\u200b"}, "empty text"),
        ({"text": ["a"]}, "not text"),
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
        *(
            ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]}]}, reason)
            for kind, reason in {
                "image": "needs an image",
                "image_url": "needs an image",
                "input_audio": "needs audio",
                "video": "needs video",
                "file": "unknown content part",
                "": "unknown content part",
                5: "unknown content part",
            }.items()
        ),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "unknown content part"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "unknown content part"),
        ({"messages": [{"role": "tool", "content": [{"type": "image_url"}]}]}, "needs an image"),
        ({"messages": [{**ASKED, "images": ["a.png"]}]}, "needs an image"),
        ({"messages": [ASKED, SAID], "images": [{"path": "a.png"}]}, "needs an image"),
        ({"conversations": [{"from": "human", "value": "<image>q"}, SAID], "image": "a.jpg"}, "needs an image"),
        ({"prompt": "q", "audios": [1]}, "needs audio"),
        ({"prompt": "q", "video": True}, "needs video"),
        ({"messages": [{**SAID, "reasoning": "a", "thinking": "b"}]}, "thoughts disagree"),
        ({"messages": [{**SAID, "reasoning": {"effort": "low"}}]}, "not text"),
        ({"messages": "[1"}, "no messages"),
        ({"messages": " "}, "no messages"),
        ({"messages": '{"role": "user"}'}, "no messages"),
        ({"conversations": [{"from": "function_call", "value": "f(x)"}]}, "broken tool calls"),
        ({"conversations": [{"from": "function_call"}]}, "broken tool calls"),
        ({"messages": [ASKED, SAID], "conversation": [SAID]}, "shapes disagree"),
        ({"prompt": "q", "completion": "a", "response": "b"}, "shapes disagree"),
        ({"prompt": "q", "instruction": "p"}, "shapes disagree"),
        ({"instruction": "q", "input": "a", "context": "b"}, "shapes disagree"),
        ({"messages": [ASKED, SAID], "instruction": "p"}, "shapes disagree"),
        ({"messages": [ASKED, SAID], "conversations": [ASKED, {**SAID, "reasoning": "t"}]}, "shapes disagree"),
        ({"instruction": "q", "history": "x"}, "broken history"),
        ({"instruction": "q", "history": {"a": 1}}, "broken history"),
        ({"instruction": "q", "history": [["q"]]}, "broken history"),
        ({"instruction": "q", "output": 5}, "not text"),
        ({"prompt": "q", "completion": 5}, "not text"),
        ({"prompt": "q", "chat_template_kwargs": '{"a": 1, "a": 2}'}, "key given twice"),
        ({"prompt": "q", "chat_template_kwargs": [1]}, "broken template options"),
        ({"prompt": "q", "chat_template_kwargs": "{"}, "broken template options"),
        ({"prompt": "q", "response_origin": "somewhere"}, "unknown response_origin"),
        ({"prompt": "q", "response_origin": ["elsewhere"]}, "unknown response_origin"),
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
        ({"messages": [ASKED], "tools": [5]}, "broken tools"),
        ({"messages": [ASKED], "tools": [{}]}, "broken tools"),
        ({"messages": [ASKED], "tools": [{"function": {"parameters": {}}}]}, "broken tools"),
        ({"messages": [ASKED], "tools": [{"name": "f", "parameters": "{"}]}, "broken tools"),
        ({"messages": [ASKED], "tools": [{"name": "f", "parameters": {"max": float("nan")}}]}, "broken tools"),
        (
            {"messages": [{**SAID, "tool_calls": [{"name": "f", "arguments": '{"a": NaN}'}]}]},
            "broken tool calls",
        ),
        (
            {"messages": [{**SAID, "tool_calls": [{"name": "f", "arguments": {"at": datetime(2024, 1, 1)}}]}]},
            "broken tool calls",
        ),
        ({"prompt": "q", "split": "dev set"}, "unknown split"),
        ({"prompt": "q", "split": ["train"]}, "unknown split"),
        ({"input_ids": []}, "broken token ids"),
        ({"input_ids": [1.5]}, "broken token ids"),
        ({"input_ids": [True]}, "broken token ids"),
        ({"input_ids": ["5"]}, "broken token ids"),
        ({"input_ids": "[5]"}, "broken token ids"),
        ({"input_ids": [[5]]}, "broken token ids"),
        ({"input_ids": [5, None]}, "broken token ids"),
        ({"input_ids": [10**30]}, "broken token ids"),
        ({"input_ids": np.array([2**63], np.uint64)}, "broken token ids"),
        ({"input_ids": np.array([1.0])}, "broken token ids"),
        ({"input_ids": np.array([], np.int32)}, "broken token ids"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "completion_mask": [1, 1]}, "shapes disagree"),
        ({"input_ids": [1, 2], "assistant_masks": [0, None]}, "broken loss mask"),
        ({"input_ids": [1, 2], "loss_mask": [0, float("nan")]}, "broken loss mask"),
        ({"input_ids": [1, 2], "loss_mask": np.array([0.5, 1])}, "broken loss mask"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "broken attention mask"),
        ({"input_ids": [1, 2, 3], "attention_mask": [0, 0, 0]}, "broken attention mask"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 1]}, "broken attention mask"),
        ({"input_ids": [1], "response": "a"}, "shapes disagree"),
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


texts = st.sampled_from(["user", "assistant", "q", "", "[]", "{", "text", "train", "<think>q</think>", "t</think>"])

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
        "parameters",
        "reasoning_content",
        "thinking",
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
            "attention_mask",
            "tools",
            "system",
            "split",
            "text",
            "history",
            "context",
            "response",
            "answer",
            "functions",
            "reasoning_content",
            "response_origin",
            "chat_template_kwargs",
            "images",
        ]
    ),
    values,
    max_size=4,
)

token_lines = st.dictionaries(
    st.sampled_from(["input_ids", "loss_mask", "completion_mask", "labels", "attention_mask"]),
    st.lists(st.integers(0, 1), max_size=3).map(np.array),
    max_size=3,
)


@settings(max_examples=300, deadline=None)
@given(lines, st.just({}) | token_lines)
def test_no_line_ends_the_run(value: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Whatever JSON a line holds, and whatever arrays stand in a table beside it, it is understood or left out."""
    try:
        content = understand(value | arrays).content
    except LeftOut:
        return
    assert isinstance(content, (Tokens, Text)) or all(isinstance(m["content"], str) for m in content.messages)


@pytest.mark.parametrize(("name", "split"), [("train", "train"), ("heldout", "heldout")] + [("validation", "heldout")])
def test_splits_of_other_tools_are_known(name: str, split: str) -> None:
    assert understand({"prompt": "q", "split": name}).split == split


KTO = {"prompt": "q", "completion": "a"}


@pytest.mark.parametrize("label", [True, None, 0, 1, "false"])
def test_a_label_that_is_not_false_says_nothing(label: Any) -> None:
    """0 and 1 are classes of other data."""
    assert understand(KTO | {"label": label}).content == understand(KTO).content


@pytest.mark.parametrize(
    "line", [KTO, {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}]}]
)
def test_an_answer_labelled_false_is_not_trained_on(line: dict[str, Any]) -> None:
    content = understand(line | {"label": False}).content
    assert isinstance(content, Chat)
    assert [message.get("weight") for message in content.messages] == [None, 0]


def test_a_label_of_false_beside_a_weight_of_1_disagrees() -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 1}]
    with pytest.raises(LeftOut, match="shapes disagree"):
        understand({"messages": messages, "label": False})


def test_a_label_of_a_question_alone_says_nothing() -> None:
    assert understand({"prompt": "q", "label": False}).content == understand({"prompt": "q"}).content
