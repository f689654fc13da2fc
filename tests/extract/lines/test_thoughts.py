"""The thought of an answer: in its message, beside it in the line, in pieces; and what only asks for one."""

from typing import Any

import pytest
from dflash_offline.extract.lines.json_lines import LeftOut
from dflash_offline.extract.lines.shapes import KEYS, Chat, understand
from dflash_offline.extract.lines.thoughts import THOUGHT_KEYS

ASKED, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
THOUGHT = Chat([ASKED, {**SAID, "reasoning_content": "t"}], None)
LINES: list[dict[str, Any]] = [
    {"prompt": "q", "completion": "a"},
    {"instruction": "q", "output": "a"},
    {"instruction": "q", "response": "<think>t</think>a"},
    {"messages": [ASKED, SAID]},
    {"conversations": [ASKED, {**SAID, "thinking": " t"}]},
]
PIECES = [{"type": "reasoning.text", "text": "t", "index": 0, "id": None, "format": "unknown", "signature": None}]


@pytest.mark.parametrize("key", THOUGHT_KEYS)
@pytest.mark.parametrize("line", LINES)
def test_a_thought_beside_an_answer_under_any_key(line: dict[str, Any], key: str) -> None:
    assert key in KEYS
    content = understand({**line, key: "t"}).content
    assert isinstance(content, Chat)
    assert content.messages[1]["reasoning_content"].strip() == "t"
    assert content.messages[1]["content"] == "a"
    assert {name for name in content.messages[1]} == {"role", "content", "reasoning_content"}
    for blank in ("", " \n", None, False, []):
        assert understand({**line, key: blank}).content == understand(line).content
    other = "thinking" if key != "thinking" else "reasoning"
    with pytest.raises(LeftOut, match="thoughts disagree"):
        understand({**line, key: "t", other: "u"})
    with pytest.raises(LeftOut, match="not text"):
        understand({**line, key: ["t"]})


@pytest.mark.parametrize("key", THOUGHT_KEYS)
@pytest.mark.parametrize(
    "asks", [True, "on", "OFF", "low", {"effort": "high"}, {"type": "enabled", "budget_tokens": 9}]
)
def test_what_asks_for_a_thought_is_none(key: str, asks: Any) -> None:
    assert understand({"messages": [ASKED, SAID], key: asks}).content == Chat([ASKED, SAID], None)


@pytest.mark.parametrize("line", LINES)
def test_pieces_of_a_thought_are_joined(line: dict[str, Any]) -> None:
    """OpenRouter's reasoning_details, which it gives beside `reasoning` with the same text."""
    assert "reasoning_details" in KEYS
    for said in ({"reasoning_details": PIECES}, {"reasoning_details": PIECES, "reasoning": "t"}):
        content = understand({**line, **said}).content
        assert isinstance(content, Chat)
        assert content.messages[1]["reasoning_content"].strip() == "t"
        assert understand({"messages": [ASKED, {**SAID, **said}]}).content == THOUGHT
    two = [{"type": "reasoning.text", "text": text} for text in ("t", "u")]
    content = understand({"messages": [ASKED, {**SAID, "reasoning_details": two}]}).content
    assert content == Chat([ASKED, {**SAID, "reasoning_content": "tu"}], None)
    assert understand({"messages": [ASKED, {**SAID, "reasoning_details": []}]}).content == Chat([ASKED, SAID], None)


@pytest.mark.parametrize(
    "pieces",
    [
        [{"type": "reasoning.summary", "summary": "s"}],
        [*PIECES, {"type": "reasoning.encrypted", "data": "x"}],
        [{"type": "reasoning.text", "text": None}],
        ["t"],
        {"text": "t"},
        "t",
    ],
)
def test_pieces_that_are_no_text_are_named(pieces: Any) -> None:
    for line in (
        {"messages": [ASKED, {**SAID, "reasoning_details": pieces}]},
        {**LINES[0], "reasoning_details": pieces},
    ):
        with pytest.raises(LeftOut, match="not text") as caught:
            understand(line)
        assert "reasoning_details" in caught.value.detail


def test_a_thought_beside_a_question_says_nothing() -> None:
    for key in (*THOUGHT_KEYS, "reasoning_details"):
        assert understand({"prompt": "q", key: "t"}).content == Chat([ASKED], None)
