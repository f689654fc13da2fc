"""rejected.parquet: what of the input is in no sample stands there by file and line, lines and parts of lines alike."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from dflash_offline import UserError
from dflash_offline.extract.config import PrepareConfig
from dflash_offline.extract.counts import PrepareReport
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.rejected import read_rejected

Run = Callable[..., PrepareReport]
ANSWER = "an answer of some length"


@pytest.fixture
def run(tmp_path: Path, case_target: Any, write_lines: Any) -> Run:
    """run(lines, **settings): prepare them into tmp_path/data, with a template that rewrites history by default."""

    def go(lines: list[Any] | None, **settings: Any) -> PrepareReport:
        if lines is not None:
            write_lines(tmp_path / "in.jsonl", lines)
        target = str(case_target("drops-old-thoughts"))
        settings = {"target": target, "max_length": 512, "min_trained": 2, "out": str(tmp_path / "data")} | settings
        return prepare(PrepareConfig(**settings), [str(tmp_path / "in.jsonl")])

    return go


def rows(folder: Path) -> list[tuple[Any, ...]]:
    return [(row["line"], row["id"], row["what"], row["reason"], row["detail"]) for row in read_rejected(folder)]


def test_every_part_of_a_used_line_that_is_left_out_stands_there(run: Run, chat: Any, tmp_path: Path) -> None:
    two_samples = chat("q", f"<think>a</think>{ANSWER}", "r", f"<think>b</think>{ANSWER}")
    lines = [
        {"messages": chat("q", "", "r", ANSWER, "s", ""), "id": "empty"},
        {"messages": two_samples, "id": 7},
        {"messages": [*two_samples[:2], *chat("other", f"<think>c</think>{ANSWER}")]},
        {"messages": chat("long", ANSWER * 20), "id": "long"},
        {"messages": chat("lone \ud800 surrogate \udc00", ANSWER)},
        {"messages": chat("idle", ANSWER), "chat_template_kwargs": {"mood": 1, "tone": 2}},
        {"messages": chat("\ud800", "")},
        {"messages": chat("late", f"<think>a</think>{ANSWER}", "long " * 60, f"<think>b</think>{ANSWER}")},
    ]
    report = run(lines, max_length=256)
    digits = "{} of {} tokens are kept"
    found = rows(tmp_path / "data")
    kept = next(detail for *_, reason, detail in found if reason == "cut at the longest length")
    assert found == [
        (1, "'empty'", "turn", "empty answer", "answer 1: content is ''"),
        (1, "'empty'", "turn", "empty answer", "answer 3: content is ''"),
        (3, None, "sample", "duplicate", "sample 1: the same ids and mask as line 2 of in.jsonl"),
        (4, "'long'", "note", "cut at the longest length", kept),
        (5, None, "note", "lone surrogates replaced by U+FFFD", "2 in the line"),
        (6, None, "note", "template options that the template does not read", "mood, tone"),
        (7, None, "line", "empty answer", "content is ''"),
        (7, None, "note", "lone surrogates replaced by U+FFFD", "1 in the line"),
        (8, None, "sample", "too few tokens to train on after the cut", found[-1][-1]),
    ]
    total = int(kept.split()[4])
    assert kept == f"sample 1: {digits.format(256, total)}"
    assert total > 20 * len(ANSWER)
    assert found[-1][-1].startswith("sample 2: 0 in the first 256 of ")
    counts = report.counts
    assert counts["lines_in"] == counts["lines_used"] + sum(what == "line" for _, _, what, _, _ in found)
    for what, name in (("line", "left_out"), ("turn", "turns_left_out"), ("sample", "samples_left_out")):
        assert counts[name] == Counter(reason for _, _, kind, reason, _ in found if kind == what)
    assert {row["source"] for row in read_rejected(tmp_path / "data")} == {"in.jsonl"}
    assert "rejected.parquet names them" in report.text()


def test_the_parts_of_a_line_that_is_left_out_are_not_named_beside_it(run: Run, chat: Any, tmp_path: Path) -> None:
    messages = chat("q", "", "r", f"<think>b</think>{ANSWER}")
    run([{"messages": messages}, {"messages": messages}])
    assert [row[:4] for row in rows(tmp_path / "data")] == [
        (1, None, "turn", "empty answer"),
        (2, None, "line", "duplicate"),
    ]


def test_without_anything_left_out_it_is_not_spoken_of(run: Run, chat: Any, tmp_path: Path) -> None:
    assert "rejected.parquet" not in run([{"messages": chat("q", ANSWER)}]).text()
    assert rows(tmp_path / "data") == []


def test_strict_asks_for_lines_alone(run: Run, chat: Any, tmp_path: Path) -> None:
    lines = [{"messages": chat("q", "", "r", ANSWER), "chat_template_kwargs": {"mood": 1}}]
    assert run(lines, strict=True).is_new
    assert not run(None, strict=True).is_new
    run([*lines, {"messages": chat("q", "")}], out=str(tmp_path / "more"))
    with pytest.raises(UserError, match="line 2 of in.jsonl cannot be used: empty answer"):
        run(None, out=str(tmp_path / "more"), strict=True)


def test_a_list_that_lost_rows_is_seen(run: Run, chat: Any, tmp_path: Path) -> None:
    run([{"messages": chat("q", "", "r", ANSWER)}, {"messages": chat("q", "")}])
    path = tmp_path / "data" / "rejected.parquet"
    table = pq.read_table(path)
    for kept in (table.slice(1), table.slice(0, 1), table.drop_columns(["what"])):
        pq.write_table(kept, path)
        with pytest.raises(UserError, match="is complete no more: rejected.parquet") as caught:
            run(None)
        assert len(str(caught.value).splitlines()) == 3
    pq.write_table(table, path)
    assert not run(None).is_new


def test_samples_that_are_gone_or_others_are_seen(run: Run, chat: Any, tmp_path: Path) -> None:
    run([{"messages": chat("q", ANSWER)}])
    run([{"messages": chat("q", ANSWER[::-1])}], out=str(tmp_path / "other"))
    run([{"messages": chat("q", ANSWER)}], out=str(tmp_path / "third"))
    path = tmp_path / "third" / "tokens-00000.arrow"
    path.write_bytes((tmp_path / "other" / "tokens-00000.arrow").read_bytes())
    with pytest.raises(UserError, match="its samples are not those"):
        run(None, out=str(tmp_path / "third"))
    path.unlink()
    with pytest.raises(UserError, match=r"tokens-00000.arrow' does not exist"):
        run(None, out=str(tmp_path / "third"))
