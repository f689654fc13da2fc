"""Plain text: everything after the tokenizer's own opening, or the first token, is trained on; no rendered chats."""

import dataclasses
from typing import Any

import pytest
from dflash_offline.extract.chats.plain_text import plain_ids, plain_sample
from dflash_offline.extract.lines.inputs import LeftOut
from tokenizers import processors


@pytest.fixture(scope="module")
def around(text_side: Any) -> Any:
    """around("<|im_start|> $A"): a target whose tokenizer puts these tokens around every text."""

    def make(single: str) -> Any:
        side = text_side("plain")
        names = [name for name in single.split() if name != "$A"]
        side.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(name, side.tokenizer.convert_tokens_to_ids(name)) for name in set(names)]
        )
        return side

    return make


@pytest.fixture(scope="module")
def opening(around: Any) -> Any:
    """A target whose tokenizer puts a special token before every text, as most do."""
    return around("<|im_start|> $A")


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
    ("single", "opening", "mask"),
    [
        ("<|im_start|> <|pad|> $A", "<|im_start|><|pad|>", [False, False, True, True]),
        ("<|im_start|> <|pad|> <|pad|> $A", "<|im_start|><|pad|><|pad|>", [False, False, False, True, True]),
        ("$A <|im_end|>", "", [False, True]),
        ("<|im_start|> $A <|im_end|>", "<|im_start|>", [False, True, True]),
        ("<|im_start|> <|pad|> $A <|pad|> <|im_end|>", "<|im_start|><|pad|>", [False, False, True, True]),
    ],
)
def test_tokens_of_the_tokenizers_own_are_not_trained_on(
    around: Any, single: str, opening: str, mask: list[bool]
) -> None:
    """As [gMASK]<sop>, which opens a text of GLM's; and no text was ended by the target."""
    side = around(single)
    sample = plain_sample(side, "Hi")
    assert side.tokenizer.decode(sample.ids) == opening + "Hi"
    assert sample.mask == mask
    assert sample.ends == [len(mask)]


def test_one_token_is_a_question_but_no_sample(text_side: Any, around: Any) -> None:
    side = text_side("plain")
    assert plain_ids(side, "O") == (side.tokenizer("O")["input_ids"], 0)
    with pytest.raises(LeftOut, match="nothing follows"):
        plain_sample(around("$A <|im_end|>"), "O")


class Stripping:
    """A tokenizer with code of its own: beside its special tokens it strips the text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> Any:
        return self.tokenizer(text.strip() if add_special_tokens else text, add_special_tokens=False, **options)


def test_a_text_that_is_tokenized_otherwise_beside_the_tokenizers_own_tokens(opening: Any) -> None:
    side = dataclasses.replace(opening, tokenizer=Stripping(opening.tokenizer))
    assert plain_sample(side, "Hi").mask == [False, True]
    with pytest.raises(LeftOut) as caught:
        plain_sample(side, "Hi ")
    assert caught.value.reason == "text merges with the tokenizer's own tokens"


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
        ("\ufeff\u200b \0", "empty text"),
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
