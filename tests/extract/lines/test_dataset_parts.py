"""Saved dictionaries of datasets: each part a source of its own, those that others examine with held out."""

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dflash_offline import UserError
from dflash_offline.extract.config import PrepareConfig
from dflash_offline.extract.lines.dataset_folders import is_held_out
from dflash_offline.extract.lines.inputs import chunks, find_sources, lines_in, sources_facts
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.rejected import read_rejected
from dflash_offline.store.samples import SampleTable


def save_part(folder: Path, rows: list[dict[str, Any]]) -> None:
    """As datasets' save_to_disk lays one out."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(folder / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))


def save_dictionary(folder: Path, parts: dict[str, list[dict[str, Any]]]) -> Path:
    for name, rows in parts.items():
        save_part(folder / name, rows)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(parts)}))
    return folder


def row(number: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": [6 + (number * 7 + j) % 200 for j in range(12)], "prompt_length": 6} | more


def test_the_parts_of_a_dictionary_are_sources_in_its_order(tmp_path: Path) -> None:
    folder = save_dictionary(tmp_path / "in" / "saved", {"train": [row(1)], "dev": [row(2)], "more": [row(3)]})
    expected = [folder / name for name in ("train", "dev", "more")]
    for given in (folder, tmp_path / "in", tmp_path / "in" / "*"):
        assert find_sources([str(given)]) == expected
    facts = sources_facts(expected)
    assert [(fact["name"], fact.get("split")) for fact in facts] == [
        ("train", None),
        ("dev", "heldout"),
        ("more", None),
    ]
    with pytest.raises(UserError, match="named twice"):
        find_sources([str(folder), str(folder / "dev")])


@pytest.mark.parametrize("name", "test validation valid val dev eval heldout holdout Test test_sft dev-2 test2".split())
def test_names_that_are_held_out(tmp_path: Path, name: str) -> None:
    folder = save_dictionary(tmp_path / "d", {name: [row(1)]})
    assert is_held_out(folder / name)
    (folder / "dataset_dict.json").unlink()
    assert not is_held_out(folder / name), "no part of anything"


@pytest.mark.parametrize(
    "name", ["train", "train_sft", "train_test", "default", "testimonials", "evaluations", "2024", "_"]
)
def test_names_that_are_not(tmp_path: Path, name: str) -> None:
    assert not is_held_out(save_dictionary(tmp_path / "d", {name: [row(1)]}) / name)


def test_rows_of_a_test_part_are_held_out_and_told(tmp_path: Path, case_target: Any) -> None:
    """A row's own split wins, and a faulty one is a fault there too; the hash would hold out one of fifty."""
    parts = {
        "train": [row(i, split=None) for i in range(20)],
        "test": [
            row(20, split=None),
            row(21, split="train"),
            row(22, split="odd"),
            row(1),
            *(row(i) for i in range(23, 30)),
        ],
    }
    folder = save_dictionary(tmp_path / "saved", parts)
    config = PrepareConfig(target=str(case_target()), out=str(tmp_path / "data"), min_trained=2, split=1.0)
    report = prepare(config, [str(folder)])
    table = SampleTable(tmp_path / "data")
    found = list(zip(*(table.column(name).tolist() for name in ("source", "source_line", "split"))))
    assert found == [("train", i, "train") for i in range(1, 21)] + [
        ("test", i, "train" if i == 2 else "heldout") for i in (1, 2, *range(5, 12))
    ]
    assert report.counts["sources"] == {"train": 20, "test": 11}
    assert "11 lines of test held out" in report.text()
    named = [(row["source"], row["line"], row["reason"]) for row in read_rejected(tmp_path / "data")]
    assert named == [("test", 3, "unknown split"), ("test", 4, "duplicate")]
    again = prepare(config, [str(folder / "train"), str(folder / "test")])
    assert (again.is_new, again.text().count("held out")) == (False, report.text().count("held out"))


def test_the_split_travels_with_the_chunk(tmp_path: Path) -> None:
    folder = save_dictionary(tmp_path / "d", {"val": [row(1), row(2)]})
    sent = [pickle.loads(pickle.dumps(chunk.head(1))) for chunk in chunks(folder / "val")]
    assert [(line.value or {}).get("split") for chunk in sent for line in lines_in(chunk)] == ["heldout"]


@pytest.mark.parametrize(
    "content, told",
    [
        ("{}", "names its parts as None"),
        ('{"splits": null}', "names its parts as None"),
        ('{"splits": [1]}', "names its parts as"),
        ('{"splits": []}', "names no part"),
        ('{"splits": ["train", "gone"]}', "names 'gone', which holds no state.json"),
        ("[", "cannot be read"),
    ],
)
def test_a_broken_dictionary_is_refused(tmp_path: Path, content: str, told: str) -> None:
    folder = save_dictionary(tmp_path / "d", {"train": [row(1)]})
    (folder / "dataset_dict.json").write_text(content)
    with pytest.raises(UserError, match=told) as caught:
        find_sources([str(folder)])
    assert len(str(caught.value).splitlines()) == 3
