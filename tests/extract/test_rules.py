"""What is kept of the lines: length, fewest trained tokens, duplicates, the asked share, the strict rule."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.extract.chats.chat import Sample
from dflash_offline.extract.config import PrepareConfig
from dflash_offline.extract.counts import PrepareReport
from dflash_offline.extract.cutting import LengthRules, Uncut, cut
from dflash_offline.extract.lines.inputs import LeftOut
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.rejected import read_rejected
from dflash_offline.store.samples import SampleTable
from hypothesis import given
from hypothesis import strategies as st

Run = Callable[..., PrepareReport]


@pytest.fixture
def run(tmp_path: Path, case_target: Any, write_lines: Any) -> Run:
    """run(lines, **settings): prepare them into tmp_path/data."""

    def go(lines: list[Any], *, out: str = "data", **settings: Any) -> PrepareReport:
        settings = {"target": str(case_target()), "max_length": 512, "min_trained": 2} | settings
        names = [write_lines(tmp_path / "in.jsonl", lines)]
        return prepare(PrepareConfig(out=str(tmp_path / out), **settings), names)

    return go


def tokens(i: int, length: int, answer: int) -> dict[str, Any]:
    ids = [6 + i % 200, 6 + i // 200, *(6 + (i + j) % 200 for j in range(length - 2))]
    return {"input_ids": ids, "loss_mask": [0] * (length - answer) + [1] * answer}


def sample(*turns: tuple[int, int]) -> Sample:
    """A sample of (prompt tokens, answer tokens) turns."""
    mask = [trained for prompt, answer in turns for trained in [False] * prompt + [True] * answer]
    ends = np.cumsum([prompt + answer for prompt, answer in turns]).tolist()
    return Sample(list(range(len(mask))), mask, ends)


LONG = sample((5, 5), (5, 5), (5, 5))


@pytest.mark.parametrize(
    ("long", "longest", "kept"),
    [("end", 30, 30), ("end", 29, 29), ("end", 23, 23), ("turn", 30, 30), ("turn", 29, 20), ("turn", 20, 20)]
    + [("turn", 19, 10), ("drop", 30, 30)],
)
def test_a_long_sample_is_cut_where_the_rule_says(long: str, longest: int, kept: int) -> None:
    found = cut(LONG, LengthRules(longest, long, 2))
    assert found.made.ids.tolist() == LONG.ids[:kept]
    assert found.made.mask.tolist() == LONG.mask[:kept]
    assert found.is_cut == (kept < 30)


@pytest.mark.parametrize(
    ("long", "longest", "min_trained", "reason", "detail"),
    [
        ("drop", 29, 2, "too long", "30 tokens, at most 29"),
        ("turn", 9, 2, "no turn fits", "the first answer ends at token 10, the longest has 9"),
        ("end", 6, 2, "too few tokens to train on after the cut", "1 in the first 6 of 30"),
        ("end", 30, 16, "too few tokens to train on", "15 of 30, at least 16 (min_trained)"),
    ],
)
def test_what_breaks_a_rule_is_named(long: str, longest: int, min_trained: int, reason: str, detail: str) -> None:
    with pytest.raises(LeftOut) as caught:
        cut(LONG, LengthRules(longest, long, min_trained))
    assert caught.value.reason == reason
    assert detail in caught.value.detail


def test_trained_tokens_that_are_no_neighbours_hold_no_anchor() -> None:
    with pytest.raises(LeftOut) as caught:
        cut(Sample(list(range(6)), [True, False] * 3, []), LengthRules(64, "end", 2))
    assert caught.value.reason == "no anchor"


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), min_size=1, max_size=6), st.integers(1, 40))
def test_the_turn_rule_keeps_whole_answers_and_as_many_as_fit(turns: list[tuple[int, int]], longest: int) -> None:
    whole = sample(*turns)
    try:
        kept = cut(whole, LengthRules(longest, "turn", 1))
    except LeftOut:
        return
    assert len(kept.made.ids) <= longest
    assert len(kept.made.ids) in (*whole.ends, len(whole.ids))
    assert all(end <= len(kept.made.ids) or end > longest for end in whole.ends)


def test_the_turn_rule_ends_token_ids_where_a_run_of_the_mask_ends() -> None:
    """As the sample of a chat with the same answers; the ids of a text have one end, their own."""
    uncut = Uncut(np.array(LONG.ids), np.array(LONG.mask))
    assert uncut.ends == LONG.ends == [10, 20, 30]
    for longest in (9, 10, 19, 20, 29, 30):
        rules = LengthRules(longest, "turn", 2)
        if longest < 10:
            with pytest.raises(LeftOut, match="the first answer ends at token 10"):
                cut(uncut, rules)
            continue
        assert cut(uncut, rules).made.ids.tolist() == cut(LONG, rules).made.ids.tolist()
    assert Uncut([1, 2, 3, 4], [True, True, False, False]).ends == [2]
    assert Uncut([1, 2, 3, 4], [False, True, False, True]).ends == [2, 4]
    assert Uncut([1, 2], [False, False]).ends == []


def test_the_turn_rule_keeps_long_lines_of_token_ids(run: Run, tmp_path: Path) -> None:
    line = tokens(1, 40, 6) | {"loss_mask": [0] * 6 + [1] * 8 + [0] * 6 + [1] * 20}
    counts = run([line], long="turn", max_length=30).counts
    assert (counts["samples"], counts["cut"]) == (1, 1)
    assert SampleTable(tmp_path / "data").tokens(0)[0].tolist() == line["input_ids"][:14]


def test_cutting_is_counted_and_needs_an_anchor(run: Run, tmp_path: Path) -> None:
    counts = run([tokens(1, 40, 30), tokens(2, 40, 3), tokens(3, 20, 5)], max_length=20).counts
    assert (counts["cut"], counts["samples"], counts["longest"]) == (1, 2, 20)
    assert counts["left_out"] == {"too few tokens to train on after the cut": 1}
    ids, mask = SampleTable(tmp_path / "data").tokens(0)
    assert np.array_equal(ids, tokens(1, 40, 30)["input_ids"][:20])
    assert mask.sum() == 10


def test_two_blocks_of_16_are_the_fewest_by_default(run: Run) -> None:
    counts = run([tokens(1, 40, 31), tokens(2, 40, 32)], min_trained=PrepareConfig().min_trained).counts
    assert (counts["samples"], counts["left_out"]) == (1, {"too few tokens to train on": 1})


def test_a_used_line_may_lose_a_sample(run: Run, case_target: Any, chat: Any) -> None:
    """The second turn of a rewritten history begins beyond the window: counted, the first is used."""
    messages = chat("q", "<think>a</think>Yes.", "long " * 20, "<think>b</think>No.")
    counts = run([{"messages": messages}], target=str(case_target("drops-old-thoughts")), max_length=64).counts
    assert (counts["samples"], counts["lines_used"]) == (1, 1)
    assert counts["samples_left_out"] == {"too few tokens to train on after the cut": 1}


def test_turns_reach_the_template(run: Run, tmp_path: Path, chat: Any) -> None:
    lines = [{"messages": chat("q", "first answer", "r", "second answer")}]
    lengths = {}
    for turns in ("auto", "each", "last"):
        run(lines, turns=turns, out=turns)
        lengths[turns] = SampleTable(tmp_path / turns).column("num_tokens").tolist()
    assert len(lengths["auto"]) == len(lengths["last"]) == 1
    assert lengths["each"][1] == lengths["auto"][0] == lengths["last"][0]


def test_duplicates_are_told_by_content_alone(run: Run, tmp_path: Path) -> None:
    same, other = tokens(1, 12, 6), tokens(1, 12, 7)
    lines = [{**same, "id": 1}, {**other, "id": 1}, {**same, "id": 2}, {**same, "task": "t", "split": "heldout"}]
    counts = run(lines).counts
    assert (counts["lines_used"], counts["left_out"]) == (2, {"duplicate": 2})
    assert [(row["line"], row["detail"]) for row in read_rejected(tmp_path / "data")] == [
        (3, "the same ids and mask as line 1 of in.jsonl"),
        (4, "the same ids and mask as line 1 of in.jsonl"),
    ]
    assert run(lines, duplicates="keep", out="kept").counts["samples"] == 4


def test_a_turn_that_another_line_gave_is_counted(run: Run, case_target: Any, chat: Any) -> None:
    """History is rewritten, so each turn is a sample: the first one of both lines is the same."""
    first = chat("q", "<think>a</think>Yes.", "r", "<think>b</think>No.")
    second = [*first[:2], *chat("other", "<think>c</think>Perhaps.")]
    counts = run(
        [{"messages": first}, {"messages": second}], target=str(case_target("drops-old-thoughts")), max_length=256
    ).counts
    assert (counts["lines_used"], counts["samples"]) == (2, 3)
    assert counts["samples_left_out"] == {"duplicate": 1}


def test_the_asked_share_is_taken_by_content(run: Run, tmp_path: Path) -> None:
    lines = [tokens(i, 12, 6) for i in range(1000)]
    counts = run(lines, sample=0.3).counts
    assert counts["lines_in"] == 1000 == counts["samples"] + counts["left_out"]["not in the sample"]
    assert abs(counts["samples"] / 1000 - 0.3) < 4 * (0.3 * 0.7 / 1000) ** 0.5
    taken = {tuple(SampleTable(tmp_path / "data").tokens(i)[0].tolist()) for i in range(counts["samples"])}
    run(lines[::-1], sample=0.5, out="more")
    more = SampleTable(tmp_path / "more")
    assert taken < {tuple(more.tokens(i)[0].tolist()) for i in range(len(more))}, "a larger share holds the smaller one"


def test_share_and_split_are_independent(run: Run, tmp_path: Path) -> None:
    """Taken for the sample or not, a line is held out with the same chance."""
    run([tokens(i, 12, 6) for i in range(3000)], sample=0.5, split=0.5)
    split = SampleTable(tmp_path / "data").column("split")
    assert abs((split == "train").mean() - 0.5) < 4 * (0.25 / len(split)) ** 0.5


def test_strict_ends_at_the_first_bad_line_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    good = [tokens(i, 12, 6) for i in range(3)]
    with pytest.raises(UserError) as caught:
        run([*good, {"input_ids": [999] * 4, "loss_mask": [1] * 4}, {}], strict=True)
    assert "line 4 of in.jsonl cannot be used: token id out of range" in caught.value.happened
    assert len(str(caught.value).splitlines()) == 3
    assert not (tmp_path / "data").exists()


def test_strict_takes_what_was_asked_to_be_left_out(run: Run) -> None:
    lines = [tokens(i % 50, 12, 6) for i in range(100)]
    left_out = run(lines, strict=True, sample=0.5).counts["left_out"]
    assert set(left_out) == {"not in the sample", "duplicate"}


def test_origins_come_from_the_line_or_the_setting(run: Run, tmp_path: Path) -> None:
    said = ["target greedy", "target T=0.7", "elsewhere", None]
    lines = [{**tokens(i, 12, 6), "response_origin": origin} for i, origin in enumerate(said)]
    counts = run([*lines, {**tokens(9, 12, 6), "response_origin": "me"}], origin="target T=1").counts
    expected = ["target greedy", "target T=0.7", "elsewhere", "target T=1"]
    assert SampleTable(tmp_path / "data").column("origin").tolist() == expected
    assert counts["origins"] == dict.fromkeys(expected, 1)
    assert counts["left_out"] == {"unknown response_origin": 1}


def test_what_the_template_leaves_unsaid_is_told_and_named(run: Run, tmp_path: Path, chat: Any) -> None:
    thoughtful = chat("q", "an answer", "r", "another")
    thoughtful[1]["reasoning_content"] = "hm"
    tools = [{"type": "function", "function": {"name": "add"}}]
    report = run([{"messages": thoughtful}, {"messages": chat("s", "an answer"), "tools": tools}])
    counts = report.counts
    assert (counts["tools_unread"], counts["thoughts_unwritten"], counts["answers_without_end"]) == (1, 1, 0)
    assert "  1 lines with tools that the template does not read" in report.text().splitlines()
    assert "  1 answers whose thought the template does not write" in report.text().splitlines()
    notes = [(row["line"], row["what"], row["reason"]) for row in read_rejected(tmp_path / "data")]
    assert notes == [
        (1, "note", "thought that the template does not write"),
        (2, "note", "tools that the template does not read"),
    ]


def test_answers_without_an_end_mark_are_told(tmp_path: Path, case_target: Any, write_lines: Any, chat: Any) -> None:
    target = tmp_path / "target"
    shutil.copytree(case_target(), target)
    template = (target / "chat_template.jinja").read_text(encoding="utf-8")
    assert "<|im_end|>" in template
    (target / "chat_template.jinja").write_text(template.replace("<|im_end|>", ""), encoding="utf-8")
    config = PrepareConfig(target=str(target), out=str(tmp_path / "data"), max_length=512, min_trained=2)
    report = prepare(config, [write_lines(tmp_path / "in.jsonl", [{"messages": chat("q", "one", "r", "two")}])])
    assert report.counts["answers_without_end"] == 2
    assert "  2 answers without an end mark" in report.text().splitlines()
