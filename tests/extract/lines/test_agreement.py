"""What stands beside a question or a chat: it reaches the sample, or the line is left out."""

from typing import Any

import pytest
from dflash_offline.extract.lines.json_lines import LeftOut
from dflash_offline.extract.lines.shapes import Chat, understand

ASKED, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
LATER = [ASKED, SAID, {"role": "user", "content": "q2\n\nc"}, {"role": "assistant", "content": "a2"}]


@pytest.mark.parametrize("answer", ["completion", "response", "output"])
@pytest.mark.parametrize("question", ["prompt", "instruction"])
@pytest.mark.parametrize("key", ["input", "context"])
def test_all_that_a_question_says_reaches_the_prompt(question: str, answer: str, key: str) -> None:
    value = {question: "q2", key: "c", "history": [["q", "a"]], answer: "a2"}
    assert understand(value).content == Chat(LATER, None)
    del value[answer]
    assert understand(value).content == Chat(LATER[:-1], None)
    assert understand({**value, "input": "c", "context": "c"}).content == Chat(LATER[:-1], None)
    with pytest.raises(LeftOut, match="shapes disagree"):
        understand({**value, "input": "c", "context": "d"})
    with pytest.raises(LeftOut, match="broken history"):
        understand({**value, "history": [{"role": "user", "content": "q"}]})


@pytest.mark.parametrize(
    ("prompt", "given", "text"),
    [
        ("Translate: cat", "cat", "Translate: cat"),
        ("Read:\nA cat sat.\nWho?", " A cat sat.\n", "Read:\nA cat sat.\nWho?"),
        ("Double the 2nd, not the 2nd", "2", "Double the 2nd, not the 2nd\n\n2"),
        ("Double the 2nd by 2", "2", "Double the 2nd by 2"),
        ("q", "\u200b", "q"),
    ],
)
def test_a_prompt_that_holds_its_input_is_not_given_it_twice(prompt: str, given: str, text: str) -> None:
    assert understand({"prompt": prompt, "input": given}).content == Chat([{"role": "user", "content": text}], None)


@pytest.mark.parametrize("key", ["messages", "conversations", "conversation", "prompt"])
def test_what_stands_beside_messages_is_in_them(key: str) -> None:
    system = {"role": "system", "content": "Facts: c."}
    for beside in (
        {"input": "c"},
        {"context": " q2\n"},
        {"input": "", "context": [], "history": []},
        {"history": [["q", "a"]]},
        {"history": '[["q", "a"]]', "context": "Facts: c."},
    ):
        assert understand({key: [system, *LATER], **beside}).content == Chat([system, *LATER], None)
    for beside, reason in (
        ({"input": "a2"}, "shapes disagree"),
        ({"context": "other"}, "shapes disagree"),
        ({"context": {"page": 1}}, "not text"),
        ({"history": [["q", "b"]]}, "shapes disagree"),
        ({"history": [["q"]]}, "broken history"),
    ):
        with pytest.raises(LeftOut) as caught:
            understand({key: LATER, **beside})
        assert caught.value.reason == reason


@pytest.mark.parametrize("key", ["completion", "response", "output"])
def test_an_answer_beside_a_chat_is_its_last(key: str) -> None:
    thinking = {**SAID, "reasoning_content": "t"}
    for messages in ([ASKED, SAID], [ASKED, thinking]):
        for same in ("a", [SAID], "", None, []):
            for chat in ({"messages": messages}, {"conversations": messages}):
                assert understand({**chat, key: same}).content == Chat(messages, None)
    for messages, other in (
        ([ASKED, SAID], "b"),
        ([ASKED], "a"),
        ([ASKED, SAID, ASKED], "a"),
        ([ASKED, SAID], [ASKED, {**SAID, "content": "b"}]),
        ([ASKED, SAID], 5),
    ):
        with pytest.raises(LeftOut) as caught:
            understand({"messages": messages, key: other})
        assert caught.value.reason == "shapes disagree"


@pytest.mark.parametrize("key", ["system", "tools", "functions", "input", "context", "history", "output", "response"])
def test_plain_text_beside_a_part_of_a_chat_is_none(key: str) -> None:
    assert understand({"text": "Once", key: ""}).content == understand({"text": "Once"}).content
    with pytest.raises(LeftOut) as caught:
        understand({"text": "Once", key: "x"})
    assert caught.value.reason == "shapes disagree"


def test_a_thought_beside_an_answer_is_its_thought() -> None:
    expected = Chat([ASKED, {**SAID, "reasoning_content": "t"}], None)
    values: list[dict[str, Any]] = [
        {"prompt": "q", "response": "a"},
        {"instruction": "q", "output": "<think>t</think>a"},
        {"messages": [ASKED, SAID]},
        {"messages": [ASKED, {**SAID, "reasoning": "t"}]},
    ]
    for value in values:
        assert understand({**value, "reasoning_content": "t"}).content == expected
    assert understand({"prompt": "q", "reasoning_content": "t"}).content == Chat([ASKED], None)
    with pytest.raises(LeftOut, match="thoughts disagree"):
        understand({**values[1], "reasoning_content": "u"})
    with pytest.raises(LeftOut, match="not text"):
        understand({**values[0], "reasoning_content": ["t"]})


def test_an_answer_that_its_line_says_was_cut() -> None:
    expected = Chat([ASKED, {**SAID, "finish_reason": "length"}], None)
    for value in ({"prompt": "q", "response": "a"}, {"messages": expected.messages}, {"messages": [ASKED, SAID]}):
        assert understand({**value, "finish_reason": "length"}).content == expected
    assert understand({"prompt": "q", "finish_reason": "length"}).content == Chat([ASKED], None)
    with pytest.raises(LeftOut, match="shapes disagree"):
        understand({"messages": expected.messages, "finish_reason": "stop"})
