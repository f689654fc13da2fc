"""Which files and folders a command line names, and standard input as one of them."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dflash_offline import UserError
from dflash_offline.extract.lines.inputs import check_formats, chunks, find_sources, short_names, source_sha256


def save_dataset(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(folder / "data.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    return folder


def test_folders_and_deep_globs_stand_for_the_files_below_them(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json.gz", "sub/c.parquet", "README.md", ".cache/d.jsonl", "sub/.hidden.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    save_dataset(tmp_path / "sub" / "saved", [{"a": 1}])
    expected = ["a.json.gz", "b.jsonl", "sub/c.parquet", "sub/saved"]
    for given in (str(tmp_path), str(tmp_path / "**"), f"{tmp_path}/"):
        assert [str(path.relative_to(tmp_path)) for path in find_sources([given])] == expected
    assert find_sources([str(tmp_path / "**" / "*.parquet")]) == [tmp_path / "sub" / "c.parquet"]
    with pytest.raises(UserError, match="named twice"):
        find_sources([str(tmp_path), str(tmp_path / "b.jsonl")])
    (tmp_path / "none").mkdir()
    for given in ("none", "*.md"):
        with pytest.raises(UserError, match="no file of a format that is read"):
            find_sources([str(tmp_path / given)])


def test_a_pipe_is_refused_since_it_is_read_twice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.jsonl")
    with pytest.raises(UserError, match="pipe or a device"):
        find_sources([str(tmp_path / "x.jsonl")])


def test_globs_are_sorted_and_files_are_named_once(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "odd[1].jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    found = find_sources([str(tmp_path / "?.jsonl"), str(tmp_path / "**" / "c.jsonl"), str(tmp_path / "odd[1].jsonl")])
    assert [path.name for path in found] == ["a.jsonl", "b.jsonl", "c.jsonl", "odd[1].jsonl"]
    with pytest.raises(UserError, match="named twice"):
        find_sources([str(tmp_path / "*.jsonl"), str(tmp_path / "sub" / ".." / "a.jsonl")])


@pytest.mark.parametrize("given", ["missing.jsonl", "*.nothing"])
def test_missing_input(tmp_path: Path, given: str) -> None:
    with pytest.raises(UserError, match="does not exist"):
        find_sources([str(tmp_path / given)])


@pytest.mark.parametrize("given", ["~no-such-user/x.jsonl", "x" * 300 + ".jsonl", "a/" * 3000 + "x.jsonl"])
def test_names_that_the_system_refuses(given: str) -> None:
    with pytest.raises(UserError, match="cannot be read") as caught:
        find_sources([given])
    assert len(str(caught.value).splitlines()) == 3


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A process's own memory exists and opens, and reading its first bytes is an input/output error."""
    (tmp_path / "x.jsonl").symlink_to("/proc/self/mem")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    for name in ("x.jsonl", "gone.jsonl"):
        with pytest.raises(UserError, match=f"{name}' cannot be read") as caught:
            source_sha256(tmp_path / name)
        assert len(str(caught.value).splitlines()) == 3


def test_unknown_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b")
    (tmp_path / "plain").mkdir()
    for name in ("a.csv", "plain"):
        for refuse in (lambda path: check_formats([path]), chunks):
            with pytest.raises(UserError, match="format that is not read"):
                refuse(tmp_path / name)


def test_short_names_tell_sources_apart() -> None:
    assert short_names([Path("/x/a/t.jsonl"), Path("/x/b/u.jsonl")]) == ["t.jsonl", "u.jsonl"]
    assert short_names([Path("/x/a/t.jsonl"), Path("/x/b/t.jsonl")]) == ["a/t.jsonl", "b/t.jsonl"]


def test_source_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    rows = [{"a": 1}, {"a": 2}]
    first, again = save_dataset(tmp_path / "a", rows), save_dataset(tmp_path / "b", rows)
    swapped = save_dataset(tmp_path / "c", rows[::-1])
    assert source_sha256(first) == source_sha256(again) != source_sha256(swapped)
