"""The order of turns: what is asked, on which history, and where a chat ends."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from dflash_offline.extract.lines.json_lines import LeftOut
from dflash_offline.extract.lines.shapes import understand
from dflash_offline.extract.regenerate.conversation import Conversation, converse
from dflash_offline.extract.regenerate.replies import Reply, TurnFailed

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: Message) -> Message:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def call(name: str, arguments: Any, number: str) -> Message:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, number: str | None = None) -> Message:
    return {"role": "tool", "content": text, **({"tool_call_id": number} if number else {})}


def talk(messages: Sequence[Message], answers: Sequence[Any]) -> tuple[Conversation, list[list[Message]]]:
    """The conversation where the model says `answers` one after another, and what it was sent each time."""
    asked: list[list[Message]] = []
    chat: Any = understand({"messages": list(messages)}).content

    async def ask(sent: list[Message], turn: int) -> Reply:
        assert turn == len(asked)
        asked.append(sent)
        answer = answers[turn]
        if isinstance(answer, Exception):
            raise answer
        message = answer if isinstance(answer, dict) else assistant(answer)
        return Reply(message, message.get("finish_reason") == "length", 10, 3)

    return asyncio.run(converse(chat.messages, ask)), asked


def test_each_question_is_asked_on_the_models_own_answers() -> None:
    chat = [
        {"role": "system", "content": "be brief"},
        user("a"),
        assistant("old"),
        user("b"),
        assistant("old"),
        user("c"),
    ]
    done, asked = talk(chat, ["one", "two", "three"])
    assert asked[0] == chat[:2]
    assert asked[1] == [*chat[:2], assistant("one"), user("b")]
    assert asked[2] == [*chat[:2], assistant("one"), user("b"), assistant("two"), user("c")]
    assert done.messages == [*asked[2], assistant("three")]
    assert (done.ended, done.num_answers, done.prompt_tokens, done.completion_tokens) == (None, 3, 30, 9)


def test_answers_to_nothing_and_in_a_row() -> None:
    chat = [assistant("hello, I am a bot"), user("a"), user("b"), assistant("old"), assistant("older")]
    done, asked = talk(chat, ["one"])
    assert asked == [chat[:3]], "a greeting is what the user was given: it stays in the prompt"
    assert done.messages == [*chat[:3], assistant("one")]


SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    "chat, num_asked",
    [
        ([user("a"), SYSTEM], [2]),
        ([user("a"), assistant("x"), SYSTEM], [1, 3]),
        ([user("a"), assistant("x"), SYSTEM, assistant("y")], [1, 3]),
        ([user("a"), SYSTEM, assistant("x"), user("b"), SYSTEM], [2, 5]),
        ([SYSTEM, assistant("hello"), user("a"), assistant("x")], [3]),
        ([assistant("hello"), SYSTEM, assistant("again"), user("a")], [4]),
        ([user("a"), assistant("x"), {"role": "developer", "content": "d"}, user("b")], [1, 4]),
    ],
)
def test_no_message_of_the_input_is_dropped_but_answers(chat: list[Message], num_asked: list[int]) -> None:
    """The input's messages in front of each answer, where the model says what the input's assistant said."""
    says = [chat[end]["content"] if end < len(chat) else "new" for end in num_asked]
    done, asked = talk(chat, says)
    assert asked == [chat[:end] for end in num_asked]
    assert (done.ended, done.num_answers) == (None, len(num_asked))


@pytest.mark.parametrize("messages", [[assistant("hello")], [SYSTEM], [SYSTEM, assistant("hello"), SYSTEM]])
def test_a_chat_without_a_question(messages: list[Message]) -> None:
    with pytest.raises(LeftOut, match="no question"):
        talk(messages, [])


@pytest.mark.parametrize("as_text", [True, False])
def test_results_are_given_to_the_same_calls(as_text: bool) -> None:
    where = {"city": "Rome", "days": [1, 2.0]}
    theirs = call("weather", json.dumps(where) if as_text else where, "theirs-1")
    chat = [
        user("weather?"),
        assistant("", theirs),
        result("sunny", "theirs-1"),
        assistant("It is sunny."),
        user("thanks"),
    ]
    made = call("weather", '{"days": [1, 2],   "city": "Rome"}', "made-7")
    done, asked = talk(chat, [assistant("let me look", made), "Sunny!", "bye"])
    assert asked[1] == [user("weather?"), assistant("let me look", made), result("sunny", "made-7")]
    assert done.ended is None
    assert done.num_answers == 3


def test_parallel_results_keep_their_calls_whatever_their_order() -> None:
    theirs = [call("f", "{}", "x"), call("g", "{}", "y")]
    made = [call("f", "{}", "m1"), call("g", "{}", "m2")]
    for given, ids in (
        ([result("of g", "y"), result("of f", "x")], ["m2", "m1"]),
        ([result("of f"), result("of g")], ["m1", "m2"]),
    ):
        _, asked = talk([user("q"), assistant("", *theirs), *given], [assistant("", *made), "done"])
        assert [message["tool_call_id"] for message in asked[1][-2:]] == ids


def test_results_that_no_id_tells_apart_go_by_their_order() -> None:
    """Calls without ids, or all of one, and a system message before their results."""
    made = [call("f", "{}", "m1"), call("g", "{}", "m2")]
    for number in ("", "same"):
        theirs = [call("f", "{}", number), call("g", "{}", number)]
        given = [{"role": "system", "content": "s"}, result("of f", number), result("of g", number)]
        _, asked = talk([user("q"), assistant("", *theirs), *given], [assistant("", *made), "done"])
        assert [message["tool_call_id"] for message in asked[1][-2:]] == ["m1", "m2"]


@pytest.mark.parametrize(
    "answer",
    [
        "no call at all",
        assistant("", call("weather", '{"city": "Paris"}', "m")),
        assistant("", call("climate", '{"city": "Rome"}', "m")),
        assistant("", call("weather", '{"city": "Rome"}', "m"), call("weather", '{"city": "Rome"}', "n")),
    ],
)
def test_other_calls_end_the_chat_after_the_answer(answer: Any) -> None:
    theirs = call("weather", '{"city": "Rome"}', "t")
    done, asked = talk([user("q"), assistant("", theirs), result("sunny", "t"), assistant("It is.")], [answer])
    assert len(asked) == 1
    assert done.ended == "at a tool turn"
    assert done.messages[-1] == (answer if isinstance(answer, dict) else assistant(answer))


def test_a_call_where_the_input_goes_on_with_a_user() -> None:
    done, asked = talk([user("q"), assistant("a"), user("r")], [assistant("", call("f", "{}", "m"))])
    assert (len(asked), done.ended) == (1, "at a tool turn")


def test_a_call_at_the_end_is_an_answer() -> None:
    done, _ = talk([user("q"), assistant("a")], [assistant("", call("f", "{}", "m"))])
    assert done.ended is None


def test_a_cut_answer_ends_the_chat() -> None:
    cut = assistant("and so on") | {"finish_reason": "length"}
    done, asked = talk([user("a"), assistant("x"), user("b")], [cut, "never"])
    assert (len(asked), done.ended, done.num_cut) == (1, "cut at the limit", 1)
    assert done.messages[-1]["finish_reason"] == "length"
    done, _ = talk([user("a")], [cut])
    assert (done.ended, done.num_cut) == (None, 1)


def test_a_final_failure_keeps_the_turns_before_it() -> None:
    chat = [user("a"), assistant("x"), user("b"), assistant("y"), user("c")]
    done, _ = talk(chat, ["one", TurnFailed("refused by the server", "too long"), "never"])
    assert done.messages == [user("a"), assistant("one")]
    assert done.ended == "refused by the server"


def test_a_failure_of_the_first_turn_or_one_that_may_pass_fails_the_line() -> None:
    with pytest.raises(TurnFailed, match="refused"):
        talk([user("a"), assistant("x"), user("b")], [TurnFailed("refused by the server", "too long")])
    with pytest.raises(TurnFailed, match="timed out"):
        talk([user("a"), assistant("x"), user("b")], ["one", TurnFailed("timed out", "", is_final=False)])


def test_only_keys_that_servers_know_are_sent() -> None:
    _, asked = talk([user("a") | {"weight": 1, "name": "Ann", "score": 0.5}], ["one"])
    assert asked == [[user("a") | {"name": "Ann"}]]
