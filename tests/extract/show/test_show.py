"""Samples as text: chosen, described, and marked so that what is trained on can be read back."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.extract.data import DATA_NAME
from dflash_offline.extract.show.samples import chosen_rows
from dflash_offline.extract.show.show import show
from dflash_offline.extract.show.tokens import visible
from dflash_offline.extract.targets.facts import load_tokenizer

GREEN, CYAN_MARK, GREEN_MARK, RESET = "\x1b[30;42m", "\x1b[4;36m", "\x1b[4;30;42m", "\x1b[0m"
GRIN = "\U0001f600"
HOSTILE = "\x1b[2J\x1b]0;title\x07\r\x9b31m\u202eevil\u202c\u2028\x00"


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_tokenizer("tiny")


def bodies(text: str) -> list[str]:
    """The text of each sample, without title and facts."""
    return [part.split("\n\n", 1)[1] for part in re.split(r"\nsample \d+ of \d+: row [^\n]*\n", "\n" + text)[1:]]


def facts_of(text: str, number: int = 0) -> dict[str, str]:
    part = re.split(r"\nsample \d+ of \d+: row [^\n]*\n", text)[1:][number].split("\n\n")[0]
    return {name.strip(): value for name, value in (re.split(r"  +", line, maxsplit=1) for line in part.split("\n"))}


def between(body: str, opening: str, closing: str) -> list[str]:
    """What stands between the marks, line ends put back inside."""
    found = re.findall(f"{re.escape(opening)}(.*?){re.escape(closing)}", body, re.DOTALL)
    return [text + "\n" if text.endswith("\u21b5") else text for text in found]


def trained_texts(tokenizer: Any, ids: list[int], mask: list[bool]) -> list[str]:
    """The slow reference: each stretch that is trained on, decoded."""
    stretches: list[list[int]] = []
    for place, token in enumerate(ids):
        if mask[place]:
            if not place or not mask[place - 1]:
                stretches.append([])
            stretches[-1].append(token)
    return [visible(tokenizer.decode(stretch)) for stretch in stretches]


def test_answers_stand_between_brackets(tiny: Any, spelled: Any, make_data: Any) -> None:
    sample = spelled(
        tiny,
        ("<|user|>What is 2 and 2?\nThink.<|end|><|assistant|>", False),
        (f"Four {GRIN}\n\nfor sure<|end|>", True),
        ("<|user|>And 3?<|end|><|assistant|>", False),
        ("Six\n", True),
        ("<|end|>", False),
    )
    text = show(make_data([sample]), 3)
    (body,) = bodies(text)
    assert body == (
        "<|user|>What is 2 and 2?\u21b5\nThink.<|end|><|assistant|>[[Four \U0001f600\u21b5\n\u21b5\nfor sure<|end|>]]"
        "<|user|>And 3?<|end|><|assistant|>[[Six\u21b5]]\n<|end|>"
    )
    assert between(body, "[[", "]]") == trained_texts(tiny, sample["ids"], sample["mask"])
    assert "\x1b" not in text


def test_the_facts_of_a_sample(tiny: Any, spelled: Any, make_data: Any) -> None:
    sample = spelled(
        tiny,
        ("<|user|>Q<|end|><|assistant|>", False),
        ("yes<|end|>", True),
        ("<|user|>R<|end|><|assistant|>", False),
        ("no", True),
        ("<|end|>", False),
        split="heldout",
        task="sums",
        source="more.jsonl.gz",
        source_line=1234,
        origin="target T=0.7",
    )
    facts = facts_of(show(make_data([sample]), 1))
    assert facts == {
        "from": "line 1,234 of more.jsonl.gz; split heldout, task sums, answers from target T=0.7",
        "tokens": "15, 6 trained on (40%) in 2 answers, 4 anchors",
        "recorded": 'the first 13, up to the last anchor; not the last 2: "o<|end|>"',
        "answer 1": 'tokens 4-7 (4), after "<|user|>Q<|end|><|assistant|>", ends with "<|end|>", an end mark',
        "answer 2": 'tokens 12-13 (2), after "yes<|end|><|user|>R<|end|><|assistant|>", ends with "o"; '
        'the end mark "<|end|>" that follows is NOT trained on',
    }


def test_a_mark_that_ends_no_answer_is_no_end_mark(tiny: Any, spelled: Any, make_data: Any) -> None:
    sample = spelled(tiny, ("<|user|>", False), ("yes<|mask|>", True), ("more", False))
    facts = facts_of(show(make_data([sample]), 1))
    assert facts["answer 1"].endswith('ends with "<|mask|>", no end mark; "m" follows')


def test_an_answer_cut_at_the_longest_length_is_told(tiny: Any, spelled: Any, make_data: Any) -> None:
    sample = spelled(tiny, ("<|user|>Q<|end|><|assistant|>", False), ("yes and", True))
    facts = facts_of(show(make_data([sample], longest=len(sample["ids"])), 1))
    assert facts["tokens"].endswith("anchors; the longest length allowed, so it may have been cut there")
    assert facts["answer 1"].endswith("the sample's last token and no end mark")
    whole = facts_of(show(make_data([sample]), 1))
    assert "may have been cut" not in whole["tokens"]


def test_an_empty_thought_is_seen_not_to_be_trained_on(
    halves_target: Path, spelled: Any, make_data: Any, character_tokenizer: Callable[..., Any]
) -> None:
    tokenizer = load_tokenizer(str(halves_target))
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    untrained = spelled(tokenizer, (prompt + "<think>\n\n</think>\n\n", False), ("yes<|im_end|>", True), ("\n", False))
    trained = spelled(tokenizer, (prompt, False), ("<think>\nhm\n</think>\n\nyes<|im_end|>", True), ("\n", False))
    text = show(make_data([untrained, trained], halves_target), 2)
    first, second = bodies(text)
    assert "assistant\u21b5\n<think>\u21b5\n\u21b5\n</think>\u21b5\n\u21b5\n[[yes<|im_end|>]]\u21b5" in first
    assert "assistant\u21b5\n[[<think>\u21b5\nhm\u21b5\n</think>\u21b5\n\u21b5\nyes<|im_end|>]]\u21b5" in second
    assert '<think>\u21b5\u21b5</think>\u21b5\u21b5", ends with "<|im_end|>", an end mark' in facts_of(text)["answer 1"]


@pytest.mark.parametrize("in_colour", [False, True])
def test_nothing_of_a_sample_acts_on_the_terminal(tiny: Any, spelled: Any, make_data: Any, in_colour: bool) -> None:
    sample = spelled(
        tiny,
        (f"<|user|>{HOSTILE}<|end|>", False),
        (f"{HOSTILE}<|end|>", True),
        task=HOSTILE,
        source=f"a{HOSTILE}.jsonl",
    )
    text = show(make_data([sample]), 1, colour=in_colour)
    ours = [GREEN, CYAN_MARK, GREEN_MARK, RESET] if in_colour else []
    for code in ours:
        assert code in text
        text = text.replace(code, "")
    assert set(re.findall(r"[^\n\t -~\u21b5\u2192]", text)) == set()
    assert "<U+001B>[2J<U+001B>]0;title<U+0007><U+000D><U+009B>31m<U+202E>evil<U+202C><U+2028><U+0000>" in text


def test_colours_mark_exactly_what_is_trained_on(tiny: Any, spelled: Any, make_data: Any) -> None:
    sample = spelled(
        tiny, ("<|user|>Q\n<|end|><|assistant|>", False), (f" a\n\n {GRIN} b <|end|>", True), ("<|user|>", False)
    )
    (body,) = bodies(show(make_data([sample]), 1, colour=True))
    assert body == (
        f"{CYAN_MARK}<|user|>{RESET}Q\u21b5\n{CYAN_MARK}<|end|><|assistant|>{RESET}"
        f"{GREEN} a\u21b5{RESET}\n{GREEN}\u21b5{RESET}\n{GREEN} {GRIN} b {RESET}{GREEN_MARK}<|end|>{RESET}"
        f"{CYAN_MARK}<|user|>{RESET}"
    )


def test_colours_are_for_terminals(tiny: Any, spelled: Any, make_data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_data([spelled(tiny, ("<|user|>", False), ("yes", True))])
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in show(folder, 1)
    main, side = os.openpty()
    with open(main, "rb"), open(side, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert GREEN in show(folder, 1)
        monkeypatch.setenv("NO_COLOR", "1")
        assert "\x1b" not in show(folder, 1)


@pytest.mark.parametrize(
    "parts, marks",
    [
        ([("x = a[[0]]", False), ("fine", True)], ("{{", "}}")),
        ([("see", False), ("[1, 2]", True), (".", False)], ("{{", "}}")),
        ([("a[", False), ("1", True), ("]", False)], ("{{", "}}")),
        ([("[[ {{ ", False), ("x", True), (" end", False)], ("<<", ">>")),
        ([("[[ {{ << ", False), ("x", True), ("y", False)], ("\u27e6", "\u27e7")),
        ([("[[ {{ << \u27e6 \u27e7\u27e7 ", False), ("x", True), (" y", False)], ("\u27e6" * 3, "\u27e7" * 3)),
    ],
)
def test_marks_are_not_taken_for_the_text(
    tiny: Any, spelled: Any, make_data: Any, parts: list[tuple[str, bool]], marks: tuple[str, str]
) -> None:
    text = show(make_data([spelled(tiny, *parts)]), 1)
    assert facts_of(text)["marked"].startswith(f"between {marks[0]} and {marks[1]}: ")
    assert between(bodies(text)[0], *marks) == [visible(part) for part, is_trained in parts if is_trained]


@pytest.mark.parametrize(
    "pattern",
    ["1", "0", "11110000", "00001111", "10101010", "01010101", "00111100", "11000011", "11111111", "00000000"],
)
def test_any_mask_can_be_read_back(halves_target: Path, make_data: Any, pattern: str) -> None:
    """a F0 | 9F 98 | 80, so most masks cut a character."""
    tokenizer = load_tokenizer(str(halves_target))
    ids = tokenizer(f"a{GRIN}ma{GRIN}n")["input_ids"][: len(pattern)]
    mask = [bit == "1" for bit in pattern]
    text = show(make_data([{"ids": ids, "mask": mask}], halves_target), 1)
    told = [re.sub("(<0x..>)+", "\ufffd", part) for part in between(bodies(text)[0], "[[", "]]")]
    assert told == [re.sub("\ufffd+", "\ufffd", part) for part in trained_texts(tokenizer, ids, mask)]
    facts = facts_of(text)
    num_answers = len([run for run in pattern.split("0") if run])
    assert facts["tokens"].startswith(f"{len(ids)}, {sum(mask)} trained on ({sum(mask) / len(mask):.0%}) in ")
    assert f"in {num_answers} answer" in facts["tokens"]
    if pattern[0] == "1":
        assert "from the first token on" in facts["answer 1"]
    if "11" not in pattern:
        assert facts["recorded"].startswith("nothing: ")


def test_many_answers_are_counted_and_long_ones_shortened(tiny: Any, spelled: Any, make_data: Any) -> None:
    many = spelled(tiny, *[part for _ in range(30) for part in (("<|user|>q<|end|><|assistant|>", False), ("a", True))])
    long = spelled(tiny, ("<|user|>", False), ("begin" + "x" * 3000 + "ending", True))
    text = show(make_data([many, long]), 2)
    assert facts_of(text)["answers"] == "and 22 more"
    body = bodies(text)[1]
    (count,) = re.findall(r"\n\.\.\. ([\d,]+) tokens, all trained on, are not shown \.\.\.\n", body)
    assert body.startswith("<|user|>[[begin")
    assert body.endswith("ending]]")
    kept = len(tiny(re.sub(r"\n\.\.\..*\n", "", body.removeprefix("<|user|>[[").removesuffix("]]")))["input_ids"])
    assert int(count.replace(",", "")) + kept == pytest.approx(len(long["ids"]) - 1, abs=2)
    assert len(body) < 3000


def test_a_small_folder_is_shown_whole_and_in_order(tiny: Any, spelled: Any, make_data: Any) -> None:
    samples = [spelled(tiny, ("<|user|>", False), (f"answer {i}", True)) for i in range(3)]
    folder = make_data(samples)
    text = show(folder, 20)
    assert text.startswith(f"3 of the 3 samples of {folder}; what is trained on stands between [[ and ]]")
    assert [re.findall(r"\[\[(.*)\]\]", body) for body in bodies(text)] == [["answer 0"], ["answer 1"], ["answer 2"]]
    assert show(folder, 20) == text


def test_rows_are_spread_over_the_folder_and_its_splits() -> None:
    drawn = np.random.default_rng(3)
    for _ in range(200):
        num_rows, num_splits = int(drawn.integers(1, 300)), int(drawn.integers(1, 4))
        splits = drawn.integers(0, num_splits, num_rows).astype(np.int32)
        splits = np.unique(splits, return_inverse=True)[1]
        count = int(drawn.integers(1, 40))
        rows = chosen_rows(splits, count)
        assert rows == chosen_rows(splits, count) == sorted(set(rows))
        assert len(rows) == min(count, num_rows)
        sizes, taken = np.bincount(splits), np.bincount(splits[rows], minlength=splits.max() + 1)
        if count >= len(sizes):
            assert (taken >= 1).all()
        assert (np.abs(taken - sizes * len(rows) / num_rows) <= len(sizes)).all()
        for split in range(len(sizes)):
            places = np.searchsorted(np.flatnonzero(splits == split), np.array(rows)[splits[rows] == split])
            gaps = np.diff([0, *places, sizes[split]])
            assert gaps.max(initial=0) <= -(-sizes[split] // max(1, taken[split])) + 1
    assert chosen_rows(np.array([], dtype=np.int32), 4) == []
    assert chosen_rows(np.array([0] * 98 + [1] * 2), 1)[0] < 98
    assert chosen_rows(np.array([0] * 9_999 + [1]), 10)[-1] == 9_999


def test_an_unfinished_folder_and_another_tokenizer_are_refused(tiny: Any, spelled: Any, make_data: Any) -> None:
    samples = [spelled(tiny, ("<|user|>", False), ("yes", True))]
    changed = make_data(samples, tokenizer_sha256="0" * 64)
    with pytest.raises(UserError, match="was prepared with the tokenizer 000000000000"):
        show(changed, 1)
    (changed / DATA_NAME).unlink()
    with pytest.raises(UserError, match=f"holds no {DATA_NAME}"):
        show(changed, 1)
