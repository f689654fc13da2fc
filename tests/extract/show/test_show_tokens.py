"""Tokens spelled as pieces: whole characters, the tokenizer's own text, nothing that acts on a terminal."""

import random
import re
import unicodedata
from typing import Any

import numpy as np
import pytest
from dflash_offline.extract.show.tokens import (
    Piece,
    Spelling,
    ends_of,
    one_line,
    runs_of,
    text_of,
    visible,
)
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

GRIN = "\U0001f600"
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
TEXTS = [
    f"plain, a{GRIN}b {FAMILY} a\u0301o\u0308",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd mixed",
    "a\ufffd<|im_end|>\ufffd<think>\n\n</think>",
    f"{GRIN * 3}<|im_start|>a{GRIN}<|mask|>",
    "\x1b[31mred\x00\x7f\x9b \u202eturned\u202c \u2028 \ufeff\r\n\t",
    "hihi h i \u00e9\u00e9 \u4f60\u597d\uff01",
]


@pytest.fixture(scope="module")
def halves(halves_target: Any) -> Any:
    return AutoTokenizer.from_pretrained(halves_target)


@pytest.fixture(scope="module")
def pieces_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece ones with byte fallback: a low line block for a space, <0xF0> for a byte."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "ab"]
    core = Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [("\u2581", "a"), ("a", "b")], byte_fallback=True)
    )
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def pieces_of(tokenizer: Any, ids: list[int], mask: list[bool]) -> list[Piece]:
    return Spelling(tokenizer).pieces(np.array(ids, dtype=np.uint32), np.array(mask))


def as_decoded(text: str) -> str:
    """With what is no whole character as one U+FFFD, however many bytes it is and however it is told."""
    return re.sub("(<0x[89A-F][0-9A-F]>|\ufffd)+", "\ufffd", text)


def check_against_decode(tokenizer: Any, ids: list[int], mask: list[bool]) -> None:
    """The slow reference: cut at marks and at borders of the mask, and let the tokenizer decode each stretch."""
    pieces = pieces_of(tokenizer, ids, mask)
    assert [i for piece in pieces for i in piece.ids] == ids
    assert [piece.first for piece in pieces] == np.cumsum([0, *(len(p.ids) for p in pieces)]).tolist()[:-1]
    assert [piece.is_trained for piece in pieces for _ in piece.ids] == mask
    marks = set(tokenizer.added_tokens_decoder)
    assert [piece.is_mark for piece in pieces for _ in piece.ids] == [i in marks for i in ids]
    stretches: list[list[int]] = []
    for place, token in enumerate(ids):
        borders = place == 0 or mask[place] != mask[place - 1] or token in marks or ids[place - 1] in marks
        stretches += [[token]] if borders else []
        if not borders:
            stretches[-1].append(token)
    expected = "".join(visible(tokenizer.decode(s, clean_up_tokenization_spaces=False)) for s in stretches)
    assert as_decoded("".join(piece.text for piece in pieces)) == as_decoded(expected)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["halves", "pieces_tokenizer"])
def test_the_pieces_are_the_tokenizers_own_text(request: Any, name: str, text: str) -> None:
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for mask in ([True] * len(ids), [False] * len(ids), [i % 2 == 0 for i in range(len(ids))]):
        check_against_decode(tokenizer, ids, mask)


def test_any_ids_under_any_mask_are_spelled(halves: Any) -> None:
    drawn = random.Random(5)
    for _ in range(300):
        ids = [drawn.randrange(len(halves)) for _ in range(drawn.randrange(1, 60))]
        share = drawn.random()
        check_against_decode(halves, ids, [drawn.random() < share for _ in ids])


def test_byte_fallback_spells_any_text(pieces_tokenizer: Any) -> None:
    drawn = random.Random(6)
    for _ in range(300):
        text = "".join(drawn.choice(["a", "b", " ", "</s>", GRIN, "\u00e9", "\u4f60"]) for _ in range(40))
        ids = pieces_tokenizer(text, add_special_tokens=False)["input_ids"]
        check_against_decode(pieces_tokenizer, ids, [True] * len(ids))


def test_a_character_over_several_tokens_is_one_piece(halves: Any) -> None:
    ids = halves(f"a{GRIN}b")["input_ids"]
    assert len(ids) == 4  # a F0 | 9F 98 | 80 | b
    pieces = pieces_of(halves, ids, [True] * 4)
    assert [(piece.text, piece.first, len(piece.ids)) for piece in pieces] == [(f"a{GRIN}", 0, 3), ("b", 3, 1)]


def test_half_a_character_is_shown_by_its_bytes(halves: Any) -> None:
    ids = halves(f"a{GRIN}b")["input_ids"]
    at_a_border = pieces_of(halves, ids, [False, True, True, True])
    assert [piece.text for piece in at_a_border] == ["a<0xF0>", "<0x9F><0x98>", "<0x80>", "b"]
    cut = pieces_of(halves, ids[:2], [True, True])
    assert [piece.text for piece in cut] == ["a<0xF0><0x9F><0x98>"]
    mark = halves.convert_tokens_to_ids("<|im_end|>")
    before_a_mark = pieces_of(halves, [*ids[:1], mark], [True, True])
    assert [(piece.text, piece.is_mark) for piece in before_a_mark] == [("a<0xF0>", False), ("<|im_end|>", True)]


def test_a_replacement_character_of_the_text_is_no_half_one(halves: Any) -> None:
    ids = halves("\ufffdx")["input_ids"]
    assert [piece.text for piece in pieces_of(halves, ids, [True] * len(ids))] == ["\ufffd", "x"]


def test_an_id_without_a_token_is_named(halves: Any) -> None:
    assert [piece.text for piece in pieces_of(halves, [9999], [True])] == ["<id 9999>"]


def test_nothing_shown_acts_on_a_terminal() -> None:
    hidden = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
    for code in range(0x110000):
        shown = visible(chr(code))
        left = shown.removesuffix("\n").removesuffix("\t")
        assert {char for char in left if unicodedata.category(char) in hidden} <= {"\u200c", "\u200d"}, hex(code)
        assert len(left) == len(shown) or left in ("\u21b5", "\u2192")
    assert visible("\x1b[2J\r\x9b") == "<U+001B>[2J<U+000D><U+009B>"
    assert visible("\u202ea\u2028") == "<U+202E>a<U+2028>"
    assert visible(FAMILY) == FAMILY
    assert one_line(visible("a\n\tb")) == "a\u21b5\u2192b"


def test_a_combining_mark_does_not_join_what_stands_before() -> None:
    accent = Piece("\u0301x", 0, (1,), True, False)
    assert text_of([accent]) == "\u25cc\u0301x"
    assert text_of([Piece("e", 0, (1,), True, False), accent]) == "e\u0301x"


@pytest.mark.parametrize("num_tokens", [1, 7, 9, 10, 11, 12, 100])
@pytest.mark.parametrize("width", [1, 3])
def test_what_is_left_out_of_a_long_run_is_counted(num_tokens: int, width: int) -> None:
    places = range(50, 50 + num_tokens * width, width)
    before = Piece("y", 0, (0,) * 50, False, False)
    _, run = runs_of([before, *(Piece("x", first, (0,) * width, True, False) for first in places)])
    head, left_out, tail = ends_of(run, 8)
    kept = sum(len(piece.ids) for piece in (*head, *tail))
    assert kept + left_out == run.num_tokens == num_tokens * width
    if run.num_tokens <= 10:
        assert head == run.pieces
    else:
        assert head == run.pieces[: len(head)]
        assert tail == run.pieces[-len(tail) :]
        assert 4 <= sum(len(piece.ids) for piece in head) <= 4 + width
        assert 4 - width <= sum(len(piece.ids) for piece in tail) <= 4
