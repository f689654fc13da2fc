"""Replies of servers, in their dialects: an answer, a failure by name, or no completion."""

import json
import types
from typing import Any

import pytest
from dflash_offline.extract.regenerate.replies import Reply, TurnFailed, read_reply, server_words


def call_of(arguments: str) -> dict[str, Any]:
    return {"function": {"name": "f", "arguments": f"{{{arguments}}}"}}


def read(body: Any) -> Reply:
    return read_reply(json.dumps(body).encode())


def test_an_answer(replies: types.SimpleNamespace) -> None:
    assert read(replies.completion("yes", prompt_tokens=7)) == Reply(
        {"role": "assistant", "content": "yes"}, is_cut=False, prompt_tokens=7, completion_tokens=3
    )


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_a_thought_is_kept_under_one_name(key: str, replies: types.SimpleNamespace) -> None:
    message = read(replies.completion("yes", **{key: "hm"})).message
    assert message == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert "reasoning_content" not in read(replies.completion("yes", **{key: None})).message


def test_calls_come_as_text_with_the_servers_ids(replies: types.SimpleNamespace) -> None:
    call = replies.call("f", {"a": "\u00e9"}, 3)
    assert read(replies.completion(None, finish="tool_calls", tool_calls=[call])).message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [call],
    }
    call["function"]["arguments"] = {"a": "\u00e9"}
    message = read(replies.completion("", tool_calls=[call])).message
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": "\u00e9"}'


def test_a_thought_that_stands_twice_is_kept_once(replies: types.SimpleNamespace) -> None:
    message = read(replies.completion("<think>\nhm\n</think>\n\nyes", reasoning_content="hm", reasoning="hm")).message
    assert message == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert read(replies.completion("<think>hm</think>yes")).message["content"] == "<think>hm</think>yes"


@pytest.mark.parametrize("refusal", [None, ""])
def test_an_answer_beside_no_refusal(refusal: str | None, replies: types.SimpleNamespace) -> None:
    assert read(replies.completion("yes", refusal=refusal, function_call=None)).message["content"] == "yes"


@pytest.mark.parametrize(
    "said, model", [({}, None), ({"model": "m"}, "m"), ({"model": None}, None), ({"model": 7}, None)]
)
def test_the_name_of_the_model(said: dict[str, Any], model: str | None, replies: types.SimpleNamespace) -> None:
    assert read(replies.completion("yes") | said).model == model


def test_a_cut_answer_says_so(replies: types.SimpleNamespace) -> None:
    reply = read(replies.completion("and so", finish="length"))
    assert reply.is_cut
    assert reply.message["finish_reason"] == "length"


def test_a_reply_without_usage(replies: types.SimpleNamespace) -> None:
    for usage in (None, {}, {"prompt_tokens": None}, {"prompt_tokens": "many"}):
        reply = read(replies.completion("yes") | {"usage": usage})
        assert (reply.prompt_tokens, reply.completion_tokens) == (None, None)


@pytest.mark.parametrize(
    "content, finish, more, reason",
    [
        ("", "stop", {}, "empty answer"),
        (None, "stop", {}, "empty answer"),
        (" \n", "stop", {}, "empty answer"),
        ("\ufeff\u200b\0", "stop", {}, "empty answer"),
        ("\u200c", "length", {"reasoning": "hm"}, "cut before the answer"),
        ("", "stop", {"reasoning": "hm"}, "empty answer"),
        ("", "length", {"reasoning": "hm"}, "cut before the answer"),
        ("half", "content_filter", {}, "finish reason 'content_filter'"),
        ("half", None, {}, "finish reason None"),
        ("", "tool_calls", {"tool_calls": [{"function": {"name": "f", "arguments": '{"a": '}}]}, "broken tool calls"),
        ("", "tool_calls", {"tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}, "broken tool calls"),
        ("", "tool_calls", {"tool_calls": [{"function": {"arguments": "{}"}}]}, "broken tool calls"),
        ("", "tool_calls", {"tool_calls": ["f()"]}, "broken tool calls"),
        ("", "stop", {"tool_calls": [call_of('"a": 1, "a": 2')]}, "broken tool calls"),
        ("", "stop", {"tool_calls": [call_of('"a": NaN')]}, "broken tool calls"),
        ("", "stop", {"tool_calls": [call_of('"a": "\\ud83d"')]}, "broken tool calls"),
        ("hm", "tool_calls", {}, "no call in the answer"),
        ("hm", "tool_calls", {"tool_calls": []}, "no call in the answer"),
        ("hm", "function_call", {"tool_calls": None}, "no call in the answer"),
        ("hm", "stop", {"function_call": {"name": "f", "arguments": "{}"}}, "broken tool calls"),
        (None, "stop", {"refusal": "I will not"}, "refused by the model"),
        ("a part", "stop", {"refusal": "I will not"}, "refused by the model"),
        ("<think>b</think>yes", "stop", {"reasoning_content": "a"}, "thoughts disagree"),
        ("yes", "stop", {"reasoning_content": "a", "reasoning": "b"}, "thoughts disagree"),
        ("yes", "stop", {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}, "not text"),
        ("lone \ud83d", "stop", {}, "lone surrogates in the answer"),
        ("yes", "stop", {"reasoning": "lone \ud83d"}, "lone surrogates in the answer"),
    ],
)
def test_no_usable_answer(
    content: str | None, finish: str, more: dict[str, Any], reason: str, replies: types.SimpleNamespace
) -> None:
    with pytest.raises(TurnFailed) as failed:
        read(replies.completion(content, finish=finish, **more))
    assert failed.value.reason == reason
    assert failed.value.is_final


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"<html>busy</html>",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"choices": []}',
        b'{"choices": [{}]}',
        b'{"choices": [{"message": null}]}',
        b'{"choices": [{"message": {"content": 7}, "finish_reason": "stop"}]}',
        b'{"choices": [{"message": {"content": "a", "tool_calls": {"f": 1}}, "finish_reason": "stop"}]}',
        b'{"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}], "usage": 7}',
        b"[" * 100_000,
    ],
)
def test_no_completion(raw: bytes) -> None:
    with pytest.raises(ValueError, match="it begins|of another type"):
        read_reply(raw)


@pytest.mark.parametrize(
    "raw, words",
    [
        (b'{"error": {"message": "too  long:\\n9 tokens"}}', "too long: 9 tokens"),
        (b'{"error": "no"}', "no"),
        (b'{"detail": "not here"}', "not here"),
        (b'{"message": "no", "code": 400}', "no"),
        (b'{"detail": [{"loc": ["body"], "msg": "field required"}]}', '[{"loc": ["body"], "msg": "field required"}]'),
        (b"Bad Gateway", "Bad Gateway"),
        (b"", "no words"),
        (b"7", "7"),
        (b"\xff" + b"x" * 1000, "\ufffd" + "x" * 296 + "..."),
    ],
)
def test_the_servers_words(raw: bytes, words: str) -> None:
    assert server_words(raw) == words
