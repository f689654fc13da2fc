"""What text a reader sees nothing in."""

import pytest
from dflash_offline.extract.lines.json_text import is_blank
from dflash_offline.extract.lines.shapes import understand

UNSEEN = ["", " \n\t\r", "\ufeff", "\u200b", "\u200c", "\u200d", "\u2060", "\0", "\u3000 \u200b\0\n", "\u00ad\u200f"]
UNSEEN += ["\u3164", "\u2800 \u115f", "\ufe0f", "\u034f", "\U000e0101"]


@pytest.mark.parametrize("text", UNSEEN)
def test_what_no_reader_sees_is_blank(text: str) -> None:
    assert is_blank(text)
    assert not is_blank(f"{text}.{text}")


@pytest.mark.parametrize("text", ["a", "0", "\ufffd", "\U0001f600", "\u0301", "-", "\u2801", "\u2764\ufe0f"])
def test_what_a_reader_sees_is_not(text: str) -> None:
    assert not is_blank(text)


@pytest.mark.parametrize("text", UNSEEN)
def test_a_thought_that_no_reader_sees_is_none(text: str) -> None:
    said = {"role": "assistant", "content": "a", "reasoning_content": text}
    content = understand({"messages": [{"role": "user", "content": "q"}, said]}).content
    assert content == understand({"prompt": "q", "completion": "a"}).content
