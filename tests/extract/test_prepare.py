"""The whole command: counts add up, reruns change nothing, failures leave nothing."""

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dflash_offline import UserError
from dflash_offline.extract.config import PrepareConfig
from dflash_offline.extract.counts import PrepareReport
from dflash_offline.extract.data import read_data
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.rejected import read_rejected
from dflash_offline.store.samples import SampleTable

Run = Callable[..., PrepareReport]


def tokens(i: int, length: int = 12, answer: int = 6) -> dict[str, Any]:
    return {
        "input_ids": [6 + (i * 7 + j) % 200 for j in range(length)],
        "loss_mask": [0] * (length - answer) + [1] * answer,
    }


@pytest.fixture
def run(tmp_path: Path, case_target: Any, write_lines: Any) -> Run:
    """run(lines, **settings): prepare them into tmp_path/data, with the tied target by default."""

    def go(lines: list[Any] | None, *, out: str = "data", **settings: Any) -> PrepareReport:
        if lines is not None:
            write_lines(tmp_path / "in.jsonl", lines)
        settings = {"target": str(case_target()), "max_length": 512, "min_trained": 2} | settings
        return prepare(PrepareConfig(out=str(tmp_path / out), **settings), [str(tmp_path / "in.jsonl")])

    return go


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_lines_in_are_lines_used_and_lines_left_out(run: Run, chat: Any, tmp_path: Path) -> None:
    lines = [
        {"messages": chat("Hi?", "Yo, friend.")},
        {"messages": chat("Hi?")},
        {"messages": chat("Hi?", ""), "id": "empty"},
        ["not an object"],
        {**tokens(1), "task": "math", "split": "heldout"},
        {**tokens(2), "input_ids": [320] * 12},
    ]
    report = run(lines)
    c = report.counts
    assert (c["lines_in"], c["lines_used"], c["samples"], c["heldout"]) == (6, 2, 2, 1)
    assert c["left_out"] == {"no answer": 1, "empty answer": 1, "not an object": 1, "token id out of range": 1}
    named = read_rejected(tmp_path / "data")
    assert [(n["source"], n["line"], n["id"]) for n in named] == [
        ("in.jsonl", 2, None),
        ("in.jsonl", 3, "'empty'"),
        ("in.jsonl", 4, None),
        ("in.jsonl", 6, None),
    ]
    table = SampleTable(tmp_path / "data")
    assert [table.column(n).tolist() for n in ("source", "source_line", "task", "split")] == [
        ["in.jsonl", "in.jsonl"],
        [1, 5],
        ["", "math"],
        [table.column("split")[0], "heldout"],
    ]
    assert c["tokens"] == table.column("num_tokens").sum()
    assert "6 input lines = 2 used + 4 left out" in report.text()
    assert report.text().splitlines()[-1].startswith("next: dflash plan --data")


def test_data_json_is_what_extract_reads(run: Run, tmp_path: Path, case_target: Any) -> None:
    run([tokens(i) for i in range(5)])
    data = read_data(tmp_path / "data")
    assert data.facts["target"] == str(case_target())
    assert data.facts["responses"] == {"origin": "given", "unless_said": "elsewhere"}
    assert data.fingerprint == SampleTable(tmp_path / "data").fingerprint()
    assert data.report["samples"] == 5
    with pytest.raises(UserError, match=r"holds no data.json"):
        read_data(tmp_path)


def test_a_rerun_says_it_is_there_and_changes_nothing(run: Run, tmp_path: Path) -> None:
    lines = [tokens(i) for i in range(5)]
    first = run(lines)
    before = contents(tmp_path / "data")
    os.utime(tmp_path / "in.jsonl", (1, 1))
    again = run(None)
    assert (first.is_new, again.is_new) == (True, False)
    assert contents(tmp_path / "data") == before
    assert "complete already" in again.text()
    assert again.counts == first.counts


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_length": 1024}, "max_length = 512, this run has 1024"),
        ({"split": 0.5}, "split = 0.98, this run has 0.5"),
        ({"limit": 3}, "limit = null, this run has 3"),
        ({"sample": 0.5}, "sample = null, this run has 0.5"),
        ({"min_trained": 3}, "min_trained = 2, this run has 3"),
        ({"turns": "each"}, 'turns = "auto", this run has "each"'),
        ({"long": "drop"}, 'long = "end", this run has "drop"'),
        ({"duplicates": "keep"}, 'duplicates = "drop", this run has "keep"'),
        ({"origin": "target greedy"}, 'responses.unless_said = "elsewhere", this run has "target greedy"'),
        ({"responses": "target"}, 'responses.origin = "given", this run has "target"'),
    ],
)
def test_other_settings_are_refused_by_name_and_value(
    run: Run, tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    """c26, the part that prepare owns."""
    run([tokens(i) for i in range(5)])
    before = contents(tmp_path / "data")
    with pytest.raises(UserError) as caught:
        run(None, **changes)
    assert field in caught.value.happened
    assert contents(tmp_path / "data") == before


def test_other_template_options_are_refused(
    run: Run, tmp_path: Path, case_target: Any, character_tokenizer: Any
) -> None:
    target = shutil.copytree(case_target(), tmp_path / "target")
    character_tokenizer(character_tokenizer("plain").chat_template + "{{ mood }}").save_pretrained(target)
    run([tokens(1)], target=str(target))
    with pytest.raises(UserError, match='template_options.mood = null, this run has "glad"'):
        run(None, target=str(target), template={"mood": "glad"})


def test_other_lines_are_refused(run: Run) -> None:
    lines = [tokens(i) for i in range(5)]
    run(lines)
    for changed in ([*lines[:4], tokens(9)], [lines[1], lines[0], *lines[2:]]):
        with pytest.raises(UserError, match=r"sources\[0\].sha256 = .*, this run has"):
            run(changed)


def test_other_template_tokenizer_and_target_are_refused(
    run: Run, tmp_path: Path, case_target: Any, character_tokenizer: Any
) -> None:
    target = shutil.copytree(case_target(), tmp_path / "target")
    run([tokens(i) for i in range(5)], target=str(target))
    character_tokenizer(character_tokenizer("plain").chat_template + " ").save_pretrained(target)
    with pytest.raises(UserError, match="template_sha256"):
        run(None, target=str(target))
    tokenizer = character_tokenizer("plain")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    tokenizer.save_pretrained(target)
    with pytest.raises(UserError, match="tokenizer_sha256"):
        run(None, target=str(target))
    with pytest.raises(UserError, match="prepared with target"):
        run(None)


def test_moved_folders_are_the_same_data(run: Run, tmp_path: Path, case_target: Any) -> None:
    run([tokens(i) for i in range(5)])
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "data", tmp_path / "elsewhere" / "data")
    shutil.move(tmp_path / "in.jsonl", tmp_path / "elsewhere" / "in.jsonl")
    config = PrepareConfig(
        target=str(case_target()), out=str(tmp_path / "elsewhere" / "data"), max_length=512, min_trained=2
    )
    assert not prepare(config, [str(tmp_path / "elsewhere" / "in.jsonl")]).is_new


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "holds no input line"),
        ([{"q": "x"}, {"q": "y"}], "none of 2 input lines gives a sample: 2 unknown shape; the first: line 1 of"),
        ([{"input_ids": [7], "loss_mask": [1]}], "1 too few tokens to train on"),
    ],
)
def test_nothing_usable_leaves_nothing(run: Run, tmp_path: Path, lines: list[Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        run(lines, out="new/deep/data")
    assert len(str(caught.value).splitlines()) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_failure_in_the_middle_leaves_nothing(run: Run, tmp_path: Path, chat: Any, character_tokenizer: Any) -> None:
    """A chat line with a tokenizer that has no template ends the run after a good line."""
    target = shutil.copytree(run([tokens(1)]).facts["target"], tmp_path / "target")
    (target / "chat_template.jinja").unlink()
    character_tokenizer(None).save_pretrained(target)
    with pytest.raises(UserError, match="no chat template"):
        run([tokens(1), {"messages": chat("a", "bcd")}], target=str(target), out="other")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "in.jsonl", "target"]


def test_missing_input_and_unknown_target(tmp_path: Path, case_target: Any) -> None:
    config = PrepareConfig(target=str(case_target()), out=str(tmp_path / "data"))
    with pytest.raises(UserError, match=r"nowhere.jsonl"):
        prepare(config, ["nowhere.jsonl"])
    with pytest.raises(UserError, match="unknown-target"):
        prepare(PrepareConfig(target="unknown-target", out=str(tmp_path / "data")), [__file__])
    assert not (tmp_path / "data").exists()


def test_a_name_for_the_data_that_cannot_be_made(run: Run, tmp_path: Path) -> None:
    (tmp_path / "f.txt").write_text("x")
    for out in ("f.txt/x", "/proc/x", "/proc/deep/x", "new/" + "x" * 300):
        with pytest.raises(UserError, match="writing .* failed") as caught:
            run([tokens(1)], out=out)
        assert len(str(caught.value).splitlines()) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f.txt", "in.jsonl"]


def test_a_disk_that_takes_no_more_leaves_nothing(run: Run, tmp_path: Path) -> None:
    """Here the limit of a file's size; the list of left-out lines outgrows it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"id": os.urandom(30).hex()}) + "\n" for _ in range(9000)))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
        with pytest.raises(UserError, match="EFBIG") as caught:
            run(None, out="new/data")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(str(caught.value).splitlines()) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_data_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "data.json").symlink_to("/proc/self/mem")
    for folder in (tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match="cannot be read") as caught:
            read_data(folder)
        assert len(str(caught.value).splitlines()) == 3


def test_deep_and_odd_lines_do_not_end_the_run(run: Run, chat: Any, case_target: Any) -> None:
    deep: Any = {}
    for _ in range(50):
        deep = {"a": deep}
    call = {"name": "f", "arguments": json.dumps(deep)}
    lines = [
        {"messages": [*chat("q"), {"role": "assistant", "content": "", "tool_calls": [call]}]},
        {"messages": [*chat("q"), {"role": "assistant", "tool_calls": [{**call, "arguments": '{"a":' * 900}]}]},
        {"messages": [{"role": "tool", "content": deep}, *chat("q", "abc")]},
        {"messages": chat("q", "abc"), "other": deep},
    ]
    assert run(lines, target=str(case_target("tools"))).counts["left_out"] == {"broken tool calls": 1}


def test_odd_values_of_a_table_cost_their_own_row_at_most(tmp_path: Path, case_target: Any) -> None:
    late = pa.array([2**62] * 3, pa.int64()).view(pa.timestamp("us"))
    ids = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(np.array([0, 1, 2, 3], np.int32)), pa.py_buffer(b"a\xffc")]
    )
    for columns, left_out in (({"id": late}, {}), ({"made": late, "system": ids}, {"unreadable value": 1})):
        path = tmp_path / f"{len(columns)}.parquet"
        pq.write_table(pa.table({"prompt": ["q"] * 3, "completion": ["abc"] * 3} | columns), path)
        out = str(tmp_path / f"{len(columns)}")
        config = PrepareConfig(target=str(case_target()), max_length=512, out=out, min_trained=2, duplicates="keep")
        counts = prepare(config, [str(path)]).counts
        assert (counts["lines_in"], counts["left_out"]) == (3, left_out)


def test_a_reason_of_several_lines_is_told_in_one(tmp_path: Path, case_target: Any, character_tokenizer: Any) -> None:
    """numpy prints an array over lines, and a template may say what it likes."""
    pq.write_table(pa.table({"input_ids": [[float(token) for token in range(40)]]}), tmp_path / "in.parquet")
    target = shutil.copytree(case_target(), tmp_path / "target")
    character_tokenizer("{{ raise_exception('two\nlines') }}").save_pretrained(target)
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "q", "completion": "a"}))
    for name, says in (("in.parquet", "array"), ("in.jsonl", "two lines")):
        for strict in (False, True):
            config = PrepareConfig(target=str(target), out=str(tmp_path / "data"), strict=strict)
            with pytest.raises(UserError, match=says) as caught:
                prepare(config, [str(tmp_path / name)])
            assert len(str(caught.value).splitlines()) == 3


def test_a_folder_with_other_things_is_left_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert run([tokens(1)]).is_new, "an empty folder is a free name"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"exists and holds no data.json"):
        run(None, out="mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_what_a_killed_run_left_is_removed(run: Run, tmp_path: Path) -> None:
    from dflash_offline.store.files import temporary_path

    own = temporary_path(tmp_path / "data")
    dead = own.with_name(own.name.rpartition(".")[0] + ".99999999")
    alive = own.with_name(own.name.rpartition(".")[0] + f".{os.getppid()}")
    for folder in (dead, alive):
        (folder / "x").mkdir(parents=True)
    run([tokens(1)])
    assert (dead.exists(), alive.exists(), own.exists()) == (False, True, False)


def test_held_out_share_follows_the_prompt(run: Run, tmp_path: Path) -> None:
    """Two lines with one prompt are on one side; the share is met within its spread."""
    lines = [tokens(i, length=12) for i in range(2000)]
    for i, line in enumerate(lines):
        line["input_ids"][:6] = [6 + i % 200, 6 + i // 200, 9, 9, 9, 9]
    twins = [{**line, "input_ids": [*line["input_ids"][:6], 50, 51, 52, 53, 54, 55]} for line in lines]
    run(lines + twins, split=0.8, duplicates="keep")
    split = SampleTable(tmp_path / "data").column("split")
    assert (split[:2000] == split[2000:]).all()
    assert abs((split == "heldout").mean() - 0.2) < 4 * (0.2 * 0.8 / 2000) ** 0.5
    run(lines, split=0.8, out="fewer", duplicates="keep")
    fewer = SampleTable(tmp_path / "fewer").column("split")
    assert (fewer == split[:2000]).all(), "the side of a line does not depend on the others"


def test_samples_without_a_prompt_are_split_by_all_ids(run: Run, tmp_path: Path) -> None:
    run([tokens(i, answer=12) for i in range(200)], split=0.5)
    assert set(SampleTable(tmp_path / "data").column("split")) == {"train", "heldout"}


def test_limit_counts_input_lines_over_all_files(tmp_path: Path, case_target: Any, write_lines: Any) -> None:
    names = [write_lines(tmp_path / f"{n}.jsonl", [tokens(i) for i in range(3)]) for n in ("a", "b")]
    config = PrepareConfig(
        target=str(case_target()), out=str(tmp_path / "data"), limit=4, min_trained=2, duplicates="keep"
    )
    counts = prepare(config, names).counts
    assert (counts["lines_in"], counts["sources"]) == (4, {"a.jsonl": 3, "b.jsonl": 1})


def test_the_target_positions_limit_the_length(run: Run) -> None:
    report = run([tokens(1, 600, 590)], max_length=2000)
    assert report.counts["longest"] == 512
    assert report.facts["longest"] == 512
    assert "512 tokens, the target's positions" in report.text()


def test_parquet_and_jsonl_give_the_same_samples(tmp_path: Path, case_target: Any, chat: Any, write_lines: Any) -> None:
    lines = [{"messages": chat(f"q{i}", f"answer {i}")} for i in range(300)]
    names = [write_lines(tmp_path / "a.jsonl", lines), str(tmp_path / "a.parquet")]
    pq.write_table(pa.Table.from_pylist(lines), names[1], row_group_size=70)
    prints = []
    for i, name in enumerate(names):
        prepare(PrepareConfig(target=str(case_target()), out=str(tmp_path / str(i)), min_trained=2), [name])
        prints.append(read_data(tmp_path / str(i)).fingerprint)
    assert prints[0] == prints[1]


def test_a_template_that_prints_the_date_gets_one_that_is_kept(
    run: Run, tmp_path: Path, character_tokenizer: Any, case_target: Any, chat: Any
) -> None:
    target = shutil.copytree(case_target(), tmp_path / "target")
    plain = character_tokenizer("plain").chat_template
    character_tokenizer("{{- strftime_now('%Y-%m-%d') -}}" + plain).save_pretrained(target)
    lines = [{"messages": chat(f"q{i}", "an answer")} for i in range(3)]
    made = run(lines, target=str(target), date="2024-02-29", processes=2)
    assert made.facts["date"] == "2024-02-29"
    ids = SampleTable(tmp_path / "data").tokens(0)[0]
    assert character_tokenizer("plain").decode(ids).startswith("2024-02-29<|im_start|>")
    assert not run(None, target=str(target)).is_new, "a day later the same command finds its folder"
    with pytest.raises(UserError, match='date = "2024-02-29", this run has "2024-03-01"'):
        run(None, target=str(target), date="2024-03-01")
    assert run(lines, out="undated").facts["date"] is None
    with pytest.raises(UserError, match="date"):
        PrepareConfig(date="29.2.2024")


def test_what_is_beside_the_files_that_are_read_is_told(case_target: Any, chat: Any, tmp_path: Path) -> None:
    """Names that are not UTF-8 are spelled out in all that is stored."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "b.jsonl.bz2").write_text("x")
    (folder / "c.csv").write_text("a,b")
    (folder / os.fsdecode(b"\xff\xfe.jsonl")).write_text(
        json.dumps({"messages": chat("Hi?", "Yo, friend.")}) + "\n" + json.dumps({"messages": chat("Hi?")})
    )
    config = PrepareConfig(target=str(case_target()), max_length=512, min_trained=2, out=str(tmp_path / "data"))
    for report in (prepare(config, [str(folder)]), prepare(config, [str(folder)])):
        assert report.counts["files_passed_over"] == {".bz2": 1, ".csv": 1}
        assert "2 files passed over, of formats that are not read: .bz2, .csv" in report.text()
        assert report.counts["sources"] == {r"\xff\xfe.jsonl": 2}
    assert SampleTable(tmp_path / "data").column("source").tolist() == [r"\xff\xfe.jsonl"]
    assert read_rejected(tmp_path / "data")[0]["source"] == r"\xff\xfe.jsonl"


@pytest.mark.parametrize("name", [b"o\xff", b"\xff/data"])
def test_a_folder_that_is_not_utf8_is_refused(run: Run, chat: Any, tmp_path: Path, name: bytes) -> None:
    with pytest.raises(UserError, match="is not UTF-8") as caught:
        run([{"messages": chat("Hi?", "Yo, friend.")}], out=os.fsdecode(name))
    assert len(str(caught.value).splitlines()) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_surrogates_inside_of_json_text_are_counted(run: Run, chat: Any) -> None:
    text = json.dumps(chat("half \ud83d", "Yo, friend."))
    report = run([{"messages": text}, {"messages": chat("half \ud83d", "Yo, pal.")}])
    assert report.counts["replaced_surrogates"] == 2
