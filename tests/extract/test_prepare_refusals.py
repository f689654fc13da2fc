"""What `prepare` refuses or leaves out by name: ids that the target has not, unwanted rows, samples in their input."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def tokens(i: int) -> dict[str, Any]:
    return {"input_ids": [6 + (i * 7 + j) % 200 for j in range(12)], "loss_mask": [0] * 6 + [1] * 6}


@pytest.fixture
def run(tmp_path: Path, case_target: Any, write_lines: Any) -> Run:
    """run(lines, **settings): prepare them into tmp_path/data, with the tied target by default."""

    def go(lines: list[Any], *, out: str = "data", **settings: Any) -> PrepareReport:
        settings = {"target": str(case_target()), "max_length": 512, "min_trained": 2} | settings
        source = write_lines(tmp_path / "in.jsonl", lines)
        return prepare(PrepareConfig(out=str(tmp_path / out), **settings), [source])

    return go


def test_a_chat_with_an_id_that_the_target_has_not_is_left_out(
    run: Run, chat: Any, tmp_path: Path, case_target: Any, character_tokenizer: Any
) -> None:
    """A tokenizer that gained tokens, on a target whose embedding did not: 262 ids and 60 more, of 320 rows."""
    target = shutil.copytree(case_target(), tmp_path / "target")
    tokenizer = character_tokenizer("plain")
    assert tokenizer.add_tokens([f"<t{i}>" for i in range(60)]) == 60
    tokenizer.save_pretrained(target)
    lines = [
        {"messages": chat("Hi?", "<t57> is the last one")},
        {"messages": chat("Hi?", "<t58> has no row")},
        {"messages": chat("<t59>?", "no row for what is asked")},
        {"text": "a text about <t58> and others"},
        {"messages": chat("a", "bc", "d", "<t58>")},
    ]
    c = run(lines, target=str(target)).counts
    assert c["lines_used"] == 1
    assert c["left_out"] == {"token id out of range": 4}
    assert "ids 1..320, the target has 320" in read_rejected(tmp_path / "data")[0]["detail"]
    asked = run([lines[2], {"prompt": "ab"}], out="answered", target=str(target), responses="target", max_new_tokens=4)
    assert (asked.counts["lines_used"], asked.counts["left_out"]) == (1, {"token id out of range": 1})


def test_token_ids_that_are_not_wanted_are_left_out_as_chats_are(run: Run, chat: Any, tmp_path: Path) -> None:
    wanted = [{**tokens(1), "label": None}, {**tokens(2), "label": True}]
    unwanted = [{**tokens(3), "label": False}, {"messages": chat("q", "abcdef"), "label": False}]
    assert run([*wanted, *unwanted]).counts["left_out"] == {"weight 0": 2}
    assert [row["line"] for row in read_rejected(tmp_path / "data")] == [3, 4]
    pq.write_table(pa.Table.from_pylist([*wanted, unwanted[0]]), tmp_path / "in.parquet")
    config = PrepareConfig(target=read_data(tmp_path / "data").facts["target"], out=str(tmp_path / "t"), min_trained=2)
    assert prepare(config, [str(tmp_path / "in.parquet")]).counts["left_out"] == {"weight 0": 1}
    asked = run([{**tokens(3), "label": False}], out="answered", responses="target", max_new_tokens=4)
    assert asked.counts["lines_used"] == 1, "its question is one like any other"


def test_rows_of_token_ids_alone_are_told_of_ids(run: Run, chat: Any) -> None:
    bad = [{**tokens(1), "input_ids": [320] * 12}, {"input_ids": [5], "labels": [6]}, {"input_ids": ["x"]}]
    with pytest.raises(UserError, match="token ids that the target has[\\s\\S]*check --target"):
        run(bad)
    with pytest.raises(UserError, match="lines with an answer"):
        run([*bad, {"messages": chat("q")}])


def test_samples_below_their_own_input_are_refused(run: Run, tmp_path: Path, case_target: Any) -> None:
    """The second run would read what the first one wrote."""
    (tmp_path / "in").mkdir()
    run([tokens(i) for i in range(3)])
    shutil.copy(tmp_path / "in.jsonl", tmp_path / "in")
    (tmp_path / "link").symlink_to("in")
    for given, out in (("in", "in/out"), ("in", "in"), ("in", "link/out"), ("link", "in/deep/out")):
        with pytest.raises(UserError, match="all files below that are input") as caught:
            prepare(PrepareConfig(target=str(case_target()), out=str(tmp_path / out)), [str(tmp_path / given)])
        assert len(str(caught.value).splitlines()) == 3
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["in.jsonl"]
    for out in ("in/.hidden", "beside"):
        config = PrepareConfig(target=str(case_target()), out=str(tmp_path / out), min_trained=2)
        assert [prepare(config, [str(tmp_path / "in")]).is_new for _ in range(2)] == [True, False]


@pytest.mark.parametrize("what", ["names", "options"])
def test_long_facts_are_a_hash_in_the_token_files(
    tmp_path: Path, case_target: Any, write_lines: Any, what: str
) -> None:
    """Their schema takes 32 KiB; `data.json` has all."""
    num_inputs, deep = (32, Path(*(letter * 200 for letter in "abcdef"))) if what == "names" else (1, Path())
    inputs = []
    for i in range(num_inputs):
        folder = tmp_path / str(i) / deep
        folder.mkdir(parents=True)
        inputs.append(write_lines(folder / "s.jsonl", [tokens(i)]))
    template = {"system": "word " * 8000} if what == "options" else {}
    config = PrepareConfig(target=str(case_target()), out=str(tmp_path / "data"), min_trained=2, template=template)
    report = prepare(config, inputs)
    assert report.counts["samples"] == len(inputs)
    data = read_data(tmp_path / "data")
    assert len(data.facts["sources"]) == len(inputs)
    assert data.facts["template_options"] == template
    said = json.loads(SampleTable(tmp_path / "data").metadata["facts"])
    assert said["sources" if what == "names" else "template_options"]["count"] == num_inputs
    assert said["format"] == data.facts["format"]
