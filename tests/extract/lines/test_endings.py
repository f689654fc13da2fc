"""Endings of an answer: one table for the lines of users and the replies of servers."""

from typing import Any

import pytest
from dflash_offline.extract.lines.endings import CUT, WHOLE, is_cut, is_cut_by, is_same_ending
from dflash_offline.extract.lines.inputs import LeftOut
from dflash_offline.extract.lines.messages import is_asked
from dflash_offline.extract.lines.shapes import Chat, understand

ASKED = {"role": "user", "content": "q"}


@pytest.mark.parametrize("change", [str, str.upper, str.title])
def test_known_words_in_any_case(change: Any) -> None:
    assert all(is_cut_by(change(word)) is True for word in CUT)
    assert all(is_cut_by(change(word)) is False for word in WHOLE)
    assert not set(CUT) & set(WHOLE)


def test_no_word_is_a_whole_answer_and_others_are_unknown() -> None:
    assert is_cut_by(None) is False
    for reason in ("", "content_filter", "abort", "error", 0, 2, 1.5, True, [], {"a": 1}):
        assert is_cut_by(reason) is None
        with pytest.raises(LeftOut, match="unknown finish reason"):
            is_cut({"finish_reason": reason})
    assert not is_cut({})
    assert not is_cut({"finish_reason": None, "stop_reason": "end_turn"})
    assert is_cut({"finish_reason": None, "stop_reason": "MAX_TOKENS"})


def test_words_of_one_meaning() -> None:
    assert is_same_ending("stop", "END_TURN")
    assert is_same_ending("abort", "abort")
    assert not is_same_ending("abort", "error")
    assert not is_same_ending("abort", "stop")
    assert not is_same_ending("stop", "abort")
    assert not is_same_ending("length", "stop")


@pytest.mark.parametrize("key", ["finish_reason", "stop_reason"])
def test_a_line_says_how_its_last_answer_ended(key: str) -> None:
    messages = [ASKED, {"role": "assistant", "content": "a"}]
    found = understand({"messages": messages, key: "max_tokens"}).content
    assert isinstance(found, Chat)
    assert found.messages[-1][key] == "max_tokens"
    messages[-1][key] = "length"
    found = understand({"messages": messages, key: "MAX_TOKENS"}).content
    assert isinstance(found, Chat)
    assert is_cut(found.messages[-1])
    with pytest.raises(LeftOut, match="shapes disagree"):
        understand({"messages": messages, key: "stop"})
    assert understand({"messages": [ASKED], key: "abort"}).content == Chat([ASKED], None)


def test_what_asks() -> None:
    roles = ("system", "developer", "assistant", "tool", "assistant", "user")
    messages = [{"role": role} for role in roles]
    assert [is_asked(messages, turn) for turn in range(7)] == [False] * 4 + [True] * 3
