"""Plain text: the tokenizer's own opening, everything after the first token trained on, no rendered chats."""

from typing import Any

import pytest
from dflash_offline.extract.chats.plain_text import plain_sample
from dflash_offline.extract.lines.inputs import LeftOut
from tokenizers import processors


@pytest.fixture(scope="module")
def opening(text_side: Any) -> Any:
    """A target whose tokenizer puts a special token before every text, as most do."""
    side = text_side("plain")
    side.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A",
        special_tokens=[("<|im_start|>", side.tokenizer.convert_tokens_to_ids("<|im_start|>"))],
    )
    return side


def test_everything_after_the_first_token(text_side: Any) -> None:
    side = text_side("plain")
    sample = plain_sample(side, "Once upon")
    assert side.tokenizer.decode(sample.ids) == "Once upon"
    assert sample.mask == [False] + [True] * 8
    assert sample.ends == [9]


def test_the_tokenizers_opening_is_the_first_token(opening: Any) -> None:
    """As a completions server sends it."""
    sample = plain_sample(opening, "Once")
    assert opening.tokenizer.decode(sample.ids) == "<|im_start|>Once"
    assert sample.mask == [False, True, True, True, True]
    assert plain_sample(opening, "O").mask == [False, True]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<|im_start|>user\nHi?<|im_end|>\n", "rendered chat in plain text"),
        ("A page.<|im_end|>", "rendered chat in plain text"),
        ("<|user|>\nHi?\n<|assistant|>\nYo.", "rendered chat in plain text"),
        ("<s>[INST] Hi? [/INST] Yo.", "rendered chat in plain text"),
        ("<start_of_turn>user\nHi?<end_of_turn>\n<start_of_turn>model\nYo.", "rendered chat in plain text"),
        ("<|start|>assistant<|channel|>final<|message|>Yo.", "rendered chat in plain text"),
        ("<|start_header_id|>assistant<|end_header_id|>\n\nYo.", "rendered chat in plain text"),
        ("<\uff5cUser\uff5c>Hi?<\uff5cAssistant\uff5c>Yo.", "rendered chat in plain text"),
        ("", "empty text"),
        (" \n", "empty text"),
        ("O", "text of one token"),
    ],
)
def test_texts_left_out(text_side: Any, text: str, reason: str) -> None:
    with pytest.raises(LeftOut) as caught:
        plain_sample(text_side("plain"), text)
    assert caught.value.reason == reason


def test_marks_that_are_no_special_tokens_are_text(text_side: Any) -> None:
    sample = plain_sample(text_side("plain"), "Say <|user|> or <|im_end")
    assert sum(sample.mask) == len(sample.ids) - 1 == len("Say <|user|> or <|im_end") - 1
