"""Chats answered by a server that behaves, and by one that does not."""

import asyncio
import json
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web
from dflash_offline import UserError
from dflash_offline.extract.regenerate.config import RegenerateConfig
from dflash_offline.extract.regenerate.run import regenerate

Config = Callable[..., RegenerateConfig]
Questions = Callable[..., str]
Rows = Callable[..., list[dict[str, Any]]]
Replies = types.SimpleNamespace
USER = {"role": "user", "content": "q"}


def test_a_row_holds_what_was_sent_what_came_and_where_from(
    config: Config, questions: Questions, rows: Rows, server: Any, replies: Replies
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    line = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "old"}],
        "tools": json.dumps([tool]),
        "chat_template_kwargs": {"tone": "dry"},
        "id": 7,
        "task": "chat",
        "split": "heldout",
    }
    server.behave = lambda body, tries: replies.completion("new", reasoning="because")
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 3, "max_new_tokens": 99}
    made = config(**settings, template={"enable_thinking": True}, extra={"min_p": 0.1})
    report = regenerate(made, [questions(line)])
    assert rows() == [
        {
            "messages": [USER, {"role": "assistant", "content": "new", "reasoning_content": "because"}],
            "tools": [tool],
            "chat_template_kwargs": {"enable_thinking": True, "tone": "dry"},
            "response_origin": "target T=0.7",
            "response_model": "small",
            "task": "chat",
            "split": "heldout",
            "id": 7,
            "source": "chats.jsonl",
            "source_line": 1,
            "ended": None,
        }
    ]
    (body,) = server.bodies
    seed = body.pop("seed")
    assert 0 <= seed < 2**31
    assert body == {
        "model": "small",
        "messages": [USER],
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "max_tokens": 99,
        "tools": [tool],
        "chat_template_kwargs": {"enable_thinking": True, "tone": "dry"},
        "min_p": 0.1,
    }
    kept = json.loads((Path(made.out) / "regenerate.json").read_text())
    assert kept["facts"]["sampling"] == settings
    assert kept["facts"]["model"] == "small"
    assert kept["report"] == report.counts
    assert report.text().splitlines()[0].endswith("1 chats answered by small (target T=0.7)")
    assert report.text().splitlines()[-1] == f"next: dflash prepare {made.out}/responses.jsonl --target TARGET"


def test_greedy_requests_carry_no_seed_and_nothing_unasked_for(
    config: Config, questions: Questions, server: Any
) -> None:
    regenerate(config(), [questions("q")])
    assert server.bodies == [{"model": "small", "messages": [USER], "temperature": 0.0, "max_tokens": 2048}]


def test_seeds_differ_by_line_and_turn_and_stay_the_same(config: Config, questions: Questions, server: Any) -> None:
    chat = [USER, {"role": "assistant", "content": "x"}, USER]
    chats = questions(chat, chat)
    regenerate(config(temperature=1.0), [chats])
    first = sorted(body["seed"] for body in server.bodies)
    regenerate(config(temperature=1.0, out=config().out + "-again"), [chats])
    assert len(set(first)) == 4
    assert sorted(body["seed"] for body in server.bodies[4:]) == first


def test_every_line_is_answered_failed_or_skipped(
    config: Config, questions: Questions, rows: Rows, server: Any, replies: Replies, tmp_path: Path
) -> None:
    def behave(body: dict[str, Any], tries: int) -> Any:
        said = body["messages"][-1]["content"]
        return replies.error(400, f"{said} is too long") if said == "bad" else replies.sensible(body, tries)

    server.behave = behave
    first = questions("a", {"input_ids": [1, 2], "loss_mask": [0, 1]}, "bad", {"text": "plain"}, {"odd": 1})
    second = questions([{"role": "assistant", "content": "hello"}], "b", name="more.jsonl")
    Path(second).write_text(Path(second).read_text() + '\n{"messages": \n')
    report = regenerate(config(), [first, second])
    assert [(row["source"], row["source_line"]) for row in rows()] == [("chats.jsonl", 1), ("more.jsonl", 2)]
    left = [(row["source"], row["line"], row["outcome"], row["reason"]) for row in rows("left-out.jsonl")]
    assert left == [
        ("chats.jsonl", 2, "skipped", "tokens, no chat"),
        ("chats.jsonl", 3, "failed", "refused by the server"),
        ("chats.jsonl", 4, "skipped", "text, no chat"),
        ("chats.jsonl", 5, "skipped", "unknown shape"),
        ("more.jsonl", 1, "skipped", "no question"),
        ("more.jsonl", 4, "skipped", "not JSON"),
    ]
    assert rows("left-out.jsonl")[1]["detail"] == "400: bad is too long"
    assert "8 input lines = 2 answered + 1 failed + 5 skipped" in report.text()
    assert len(server.bodies) == 3


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_an_id_that_json_does_not_hold_is_written_as_text(
    number: float, config: Config, questions: Questions, tmp_path: Path
) -> None:
    lines: list[Any] = [{"messages": [USER], "id": known} for known in (number, [number], 7, "x", None)]
    regenerate(config(), [questions(*lines)])

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = (tmp_path / "out" / "responses.jsonl").read_text()
    ids = [json.loads(line, parse_constant=refuse)["id"] for line in text.splitlines()]
    assert ids == [str(number), str([number]), 7, "x", None]


def test_what_json_does_not_hold_is_not_sent(
    config: Config, questions: Questions, rows: Rows, server: Any, tmp_path: Path
) -> None:
    nan, late = float("nan"), pa.array([0], pa.timestamp("us"))
    lines: list[Any] = [
        {"messages": [USER], "chat_template_kwargs": {"temperature": nan}},
        {"messages": [{"role": "user", "name": nan, "content": "q"}]},
        {"messages": [USER], "id": "good"},
    ]
    path = tmp_path / "more.parquet"
    options = pa.StructArray.from_arrays([late], names=["day"])
    pq.write_table(pa.table({"prompt": ["q"], "chat_template_kwargs": options, "id": late}), path)
    regenerate(config(), [questions(*lines), str(path)])
    assert [row["id"] for row in rows()] == ["good"]
    left = [(row["line"], row["outcome"], row["reason"]) for row in rows("left-out.jsonl")]
    assert left == [(number, "skipped", "no JSON to send") for number in (1, 2, 1)]
    assert len(server.bodies) == 1


def test_surrogates_of_the_input_are_counted(config: Config, questions: Questions, rows: Rows) -> None:
    report = regenerate(config(), [questions("a \ud800 b \udc00", "c")])
    assert rows()[0]["messages"][0]["content"] == "a \ufffd b \ufffd"
    assert report.counts["replaced"] == 2
    assert "2 lone surrogates of the input replaced by U+FFFD" in report.text()


def test_limit_takes_the_first_lines(config: Config, questions: Questions, rows: Rows) -> None:
    report = regenerate(config(limit=2), [questions(*"abcd")])
    assert [row["messages"][0]["content"] for row in rows()] == ["a", "b"]
    assert report.counts["lines_in"] == 2


def test_template_options_of_a_line_and_of_the_run_must_agree(
    config: Config, questions: Questions, rows: Rows, server: Any
) -> None:
    lines = [{"messages": [USER], "chat_template_kwargs": {"enable_thinking": value}} for value in (True, False)]
    regenerate(config(template={"enable_thinking": True}), [questions(*lines)])
    assert [row["source_line"] for row in rows()] == [1]
    assert rows("left-out.jsonl")[0]["reason"] == "template options disagree"


def test_a_line_with_a_reserved_template_option_is_not_asked(
    config: Config, questions: Questions, rows: Rows, server: Any
) -> None:
    """`prepare` would leave the answer out."""
    lines = [{"messages": [USER]}, {"messages": [USER], "chat_template_kwargs": {"add_generation_prompt": False}}]
    regenerate(config(), [questions(*lines)])
    assert len(server.bodies) == 1
    assert rows("left-out.jsonl")[0]["reason"] == "reserved template option"


def test_tool_calls_go_there_and_back(
    config: Config, questions: Questions, rows: Rows, server: Any, replies: Replies
) -> None:
    arguments = {"city": "Rome"}
    theirs = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(arguments)}}
    chat = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [theirs]},
        {"role": "tool", "content": "sunny", "tool_call_id": "t1"},
        {"role": "assistant", "content": "It is sunny."},
    ]
    made = replies.call("weather", arguments)

    def behave(body: dict[str, Any], tries: int) -> Any:
        if body["messages"][-1]["role"] == "tool":
            return replies.completion("Sunny!")
        return replies.completion(None, finish="tool_calls", tool_calls=[made], reasoning_content="look it up")

    server.behave = behave
    regenerate(config(), [questions(chat)])
    (row,) = rows()
    assert row["messages"] == [
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "look it up", "tool_calls": [made]},
        {"role": "tool", "content": "sunny", "tool_call_id": made["id"]},
        {"role": "assistant", "content": "Sunny!"},
    ]
    sent = row["messages"][:3]
    assert server.bodies[1]["messages"] == [sent[0], sent[1] | {"reasoning": "look it up"}, sent[2]]


def test_thoughts_can_stay_out_of_the_history(
    config: Config, questions: Questions, rows: Rows, server: Any, replies: Replies
) -> None:
    server.behave = lambda body, tries: replies.completion("a", reasoning_content="hm")
    regenerate(config(send_thoughts=False), [questions([USER, {"role": "assistant", "content": "x"}, USER])])
    assert server.bodies[1]["messages"] == [USER, {"role": "assistant", "content": "a"}, USER]
    assert rows()[0]["messages"][1]["reasoning_content"] == "hm"


def test_cut_and_empty_answers(config: Config, questions: Questions, rows: Rows, server: Any, replies: Replies) -> None:
    says = {
        "cut": replies.completion("half of", finish="length"),
        "empty": replies.completion(""),
        "thought": replies.completion("", finish="length", reasoning_content="hm"),
        "odd": replies.completion("x", finish="content_filter"),
    }
    server.behave = lambda body, tries: says[body["messages"][-1]["content"]]
    report = regenerate(config(), [questions(*says)])
    assert rows()[0]["messages"][-1] == {"role": "assistant", "content": "half of", "finish_reason": "length"}
    assert [row["reason"] for row in rows("left-out.jsonl")] == [
        "empty answer",
        "cut before the answer",
        "finish reason 'content_filter'",
    ]
    assert report.counts["cut"] == 1


@pytest.mark.parametrize("kind", ["429", "500", "dropped", "garbage", "no choices", "503", "408"])
def test_what_may_pass_is_tried_again(
    kind: str, config: Config, questions: Questions, rows: Rows, server: Any, replies: Replies
) -> None:
    def behave(body: dict[str, Any], tries: int) -> Any:
        if tries > 2:
            return replies.sensible(body, tries)
        return {
            "429": lambda: replies.error(429, "slow down", **{"Retry-After": "0.01"}),
            "500": lambda: replies.error(500, "oops"),
            "503": lambda: replies.error(503, "starting"),
            "408": lambda: replies.error(408, "late"),
            "dropped": lambda: None,
            "garbage": lambda: web.Response(text="<html>"),
            "no choices": lambda: {"choices": []},
        }[kind]()

    server.behave = behave
    report = regenerate(config(), [questions(*"abc")])
    assert [row["messages"][-1]["content"] for row in rows()] == [f"1 messages: {name}" for name in "abc"]
    assert len(server.bodies) == 9
    assert report.endpoints[0].retries == 6
    assert report.counts["failed"] == 0


@pytest.mark.parametrize(
    "kind, reason",
    [("429", "too many requests"), ("500", "server error"), ("dropped", "connection lost"), ("slow", "timed out")],
)
def test_tries_have_an_end_that_fails_the_line_alone(
    kind: str, reason: str, config: Config, questions: Questions, rows: Rows, server: Any, replies: Replies
) -> None:
    async def slow() -> None:
        await asyncio.sleep(20)  # a server that hangs; the client's limit ends the wait, not this

    def behave(body: dict[str, Any], tries: int) -> Any:
        if body["messages"][-1]["content"] == "good":
            return replies.sensible(body, tries)
        return slow() if kind == "slow" else None if kind == "dropped" else replies.error(int(kind), "no")

    server.behave = behave
    limits = {"request_s": 1.0} if kind == "slow" else {}
    regenerate(config(attempts=3, **limits), [questions("good", "bad", "good")])
    assert [row["source_line"] for row in rows()] == [1, 3]
    (left,) = rows("left-out.jsonl")
    assert (left["line"], left["outcome"], left["reason"]) == (2, "failed", reason)
    assert left["detail"].endswith("(3 tries)")
    assert sum(body["messages"][-1]["content"] == "bad" for body in server.bodies) == 3


def test_a_pause_that_the_server_asks_for_is_kept_by_all(
    config: Config, questions: Questions, server: Any, replies: Replies
) -> None:
    times: list[float] = []

    def behave(body: dict[str, Any], tries: int) -> Any:
        times.append(server.loop.time())
        is_first = len(times) == 2
        return replies.error(429, "later", **{"Retry-After": "0.5"}) if is_first else replies.sensible(body, tries)

    server.behave = behave
    regenerate(config(longest_wait_s=5.0, concurrency=2), [questions(*"abcdefgh")])
    assert len(times) == 9
    assert sum(time < times[1] + 0.5 for time in times[2:]) <= 2, "so many may have been on their way already"


@pytest.mark.parametrize("status, advice", [(401, "OPENAI_API_KEY"), (403, "OPENAI_API_KEY"), (404, "--model")])
def test_what_is_wrong_for_all_ends_the_run(
    status: int, advice: str, config: Config, questions: Questions, server: Any, replies: Replies
) -> None:
    server.behave = lambda body, tries: replies.error(status, "no such thing")
    with pytest.raises(UserError, match=f"answered {status}: no such thing") as error:
        regenerate(config(), [questions(*"abcdefgh")])
    assert advice in error.value.advice
    assert len(server.bodies) == 1, "the first line is asked alone"


def test_the_key_comes_from_the_environment_and_is_written_nowhere(
    config: Config, questions: Questions, server: Any, replies: Replies, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    server.behave = lambda body, tries: (
        replies.error(400, "key sk-very-secret has no quota")
        if tries and "b" in str(body["messages"])
        else replies.sensible(body, tries)
    )
    regenerate(config(), [questions("a", "b")])
    assert set(server.keys) == {"Bearer sk-very-secret"}
    written = "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    assert "key *** has no quota" in written
    assert "sk-very-secret" not in written


def test_the_model_is_the_only_one_or_named(config: Config, questions: Questions, make_server: Any, rows: Rows) -> None:
    two = make_server("small", "large")
    with pytest.raises(UserError, match="serves small, large") as error:
        regenerate(config(endpoint=(two.url,)), [questions("q")])
    assert "--model" in error.value.advice
    other = make_server("large")
    with pytest.raises(UserError, match="serves small; .* serves large"):
        regenerate(config(endpoint=(config().endpoint[0], other.url)), [questions("q")])
    regenerate(config(endpoint=(two.url,), model="large"), [questions("q")])
    assert rows()[0]["response_model"] == "large"


def test_no_server_at_all(config: Config, questions: Questions, server: Any) -> None:
    server.stop()
    with pytest.raises(UserError, match="no server answers at http://127.0.0.1"):
        regenerate(config(), [questions("q")])


def test_two_servers_share_the_work_and_a_dead_one_is_set_aside(
    config: Config, questions: Questions, make_server: Any, server: Any, rows: Rows, replies: Replies
) -> None:
    other = make_server()
    names = [str(number) for number in range(60)]
    answered, end = {server: 0, other: 0}, time.monotonic() + 60.0

    def as_fast_as(beside: Any, own: Any) -> Callable[..., Any]:
        """Answers when four have been on their way, and not before the server beside has answered as many."""

        async def behave(body: dict[str, Any], tries: int) -> Any:
            num_asked = len(own.bodies) + len(beside.bodies)
            while 1 < num_asked < len(names) and time.monotonic() < end:  # the first line is asked alone
                if own.most_running == 4 and answered[own] <= answered[beside] + 2:
                    break
                await asyncio.sleep(0.001)
                num_asked = len(own.bodies) + len(beside.bodies)
            answered[own] += 1
            return replies.sensible(body, tries)

        return behave

    server.behave, other.behave = as_fast_as(other, server), as_fast_as(server, other)
    made = config(endpoint=(server.url, other.url), concurrency=4)
    regenerate(made, [questions(*names)])
    assert min(len(server.bodies), len(other.bodies)) >= 20
    assert max(server.most_running, other.most_running) == 4
    expected = rows()

    other.stop()
    report = regenerate(config(endpoint=(server.url, other.url), out=made.out + "-again"), [questions(*names)])
    again = Path(made.out + "-again") / "responses.jsonl"
    assert [json.loads(line) for line in again.read_text().splitlines()] == expected
    assert report.endpoints[1].times_aside == 1
    assert "set aside 1 times" in report.text()


def test_a_server_that_comes_back_is_used_again(
    config: Config, questions: Questions, make_server: Any, server: Any, rows: Rows, replies: Replies
) -> None:
    """The second dies under its first request, and is started anew on its port while the first goes on."""
    other = make_server()
    steps: list[str] = []
    revived: list[Any] = []

    def dies(body: dict[str, Any], tries: int) -> Any:
        if not steps:
            other.loop.create_task(other.runner.cleanup())
            steps.append("dying")
        return None

    end = time.monotonic() + 60.0

    async def waits(body: dict[str, Any], tries: int) -> Any:
        while time.monotonic() < end:
            if steps == ["dying"] and not other.runner.sites:  # its port is free
                steps.append("revived")
                revived.append(await asyncio.to_thread(make_server, port=other.port))
            if len(server.bodies) < 5 or (revived and revived[0].bodies):
                break
            await asyncio.sleep(0.01)
        return replies.sensible(body, tries)

    other.behave, server.behave = dies, waits
    made = config(endpoint=(server.url, other.url), concurrency=2)
    report = regenerate(made, [questions(*map(str, range(40)))])
    assert revived[0].bodies
    assert report.counts["answered"] == 40
    assert len(rows()) == 40


def test_when_all_servers_are_gone_it_gives_up_and_says_what_is_safe(
    config: Config, questions: Questions, server: Any, make_server: Any, rows: Rows, replies: Replies
) -> None:
    def behave(body: dict[str, Any], tries: int) -> Any:
        if len(server.bodies) == 4:
            server.loop.create_task(server.runner.cleanup())
            return None
        return replies.sensible(body, tries)

    server.behave = behave
    chats = questions(*"abcdefgh")
    with pytest.raises(UserError, match="no endpoint has answered for 0.3 s") as error:
        regenerate(config(concurrency=1, give_up_s=0.3, attempts=2), [chats])
    assert "3 answered lines are safe" in error.value.advice
    again = make_server()
    report = regenerate(config(endpoint=(again.url,)), [chats])
    assert report.counts["answered"] == 8
    assert len(again.bodies) == 5


def test_nothing_answered_is_an_error_that_binds_nobody(
    config: Config, questions: Questions, server: Any, replies: Replies, rows: Rows
) -> None:
    server.behave = lambda body, tries: replies.error(400, "max_tokens is too large")
    with pytest.raises(UserError, match="none of 2 input lines was answered, the first: line 1.*too large"):
        regenerate(config(), [questions("a", "b")])
    assert len(rows("left-out.jsonl")) == 2
    server.behave = replies.sensible
    regenerate(config(max_new_tokens=5), [questions("a", "b")])
    assert len(rows()) == 2


def test_an_input_without_lines(config: Config, questions: Questions) -> None:
    with pytest.raises(UserError, match="hold no line"):
        regenerate(config(), [questions()])


def test_a_folder_of_something_else_is_left_alone(config: Config, questions: Questions, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="holds 'thesis.tex'"):
        regenerate(config(), [questions("a")])


def test_the_prompts_length_is_compared_with_the_targets(
    config: Config, questions: Questions, server: Any, replies: Replies, rows: Rows
) -> None:
    from dflash_offline.extract.targets.facts import read_text_side

    tokenizer = read_text_side("tiny").tokenizer

    def behave(body: dict[str, Any], tries: int) -> Any:
        ids = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        wrong = 1 if body["messages"][-1]["content"] == "wrong" else 0
        return replies.completion("fine", prompt_tokens=len(ids) + wrong)

    server.behave = behave
    chat = [USER, {"role": "assistant", "content": "x"}, {"role": "user", "content": "and then?"}]
    report = regenerate(config(target="tiny"), [questions(chat, "wrong", "right")])
    assert [row["source_line"] for row in rows()] == [1, 3]
    (left,) = rows("left-out.jsonl")
    assert (left["outcome"], left["reason"]) == ("failed", "prompt lengths differ")
    assert "3 of 3 prompts are as long" in report.text()
    assert report.text().endswith("--target tiny")


@pytest.mark.parametrize("counted", [None, 5])
def test_a_first_prompt_of_another_length_refuses_to_start(
    counted: int | None, config: Config, questions: Questions, server: Any, replies: Replies
) -> None:
    server.behave = lambda body, tries: replies.completion("fine", prompt_tokens=counted)
    with pytest.raises(UserError, match="in a prompt of [0-9]+, whose end is .*assistant") as error:
        regenerate(config(target="tiny"), [questions(*"abc")])
    assert ("counts 5 tokens" if counted else "counts no tokens") in error.value.happened
    assert len(server.bodies) == 1


def test_an_answer_with_a_control_mark_is_raw_text(
    config: Config, questions: Questions, server: Any, replies: Replies, rows: Rows
) -> None:
    from dflash_offline.extract.targets.facts import read_text_side

    tokenizer = read_text_side("tiny").tokenizer

    def behave(body: dict[str, Any], tries: int) -> Any:
        ids = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        said = body["messages"][-1]["content"]
        return replies.completion(f"<think>so</think>{said}", prompt_tokens=len(ids))

    server.behave = behave
    regenerate(config(target="tiny"), [questions("good", "raw<|end|>")])
    assert [row["source_line"] for row in rows()] == [1]
    assert rows("left-out.jsonl")[0]["reason"] == "control mark in the answer"
    with pytest.raises(UserError, match=r"control mark in the answer: .* gives '<\|end\|>' in"):
        regenerate(config(target="tiny", out=config().out + "-raw"), [questions("raw<|end|>", "good")])


@pytest.mark.parametrize("is_call", [True, False])
def test_a_control_mark_in_a_thought_or_a_call_is_raw_text(
    is_call: bool, config: Config, questions: Questions, server: Any, replies: Replies
) -> None:
    from dflash_offline.extract.targets.facts import read_text_side

    tokenizer = read_text_side("tiny").tokenizer

    def behave(body: dict[str, Any], tries: int) -> Any:
        ids = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        marked = {"tool_calls": [replies.call("f", {"a": "<|end|>"}, 0)]} if is_call else {"reasoning": "<|end|>"}
        return replies.completion("fine", prompt_tokens=len(ids), **marked)

    server.behave = behave
    with pytest.raises(UserError, match=r"control mark in the answer: .* gives '<\|end\|>' in"):
        regenerate(config(target="tiny"), [questions("a")])


def test_a_template_that_refuses_a_chat_fails_it_before_it_is_sent(
    config: Config, questions: Questions, server: Any, replies: Replies, rows: Rows
) -> None:
    chat = [{"role": "system", "content": "the tiny target knows no system"}, USER]
    with pytest.raises(UserError, match="template error"):
        regenerate(config(target="tiny"), [questions(chat)])
    assert not server.bodies
