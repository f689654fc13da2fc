"""Which files and folders a command line names, and standard input as one of them."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dflash_offline import UserError
from dflash_offline.extract.lines.files_found import files_passed_over, find_sources, short_names
from dflash_offline.extract.lines.inputs import check_formats, chunks, read_lines, source_sha256


def save_dataset(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    with (folder / "data.arrow").open("wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
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


def test_what_a_folder_or_glob_passes_over_is_counted(tmp_path: Path) -> None:
    names = "a.jsonl b.jsonl.bz2 c.CSV sub/d.csv sub/LICENSE sub/deep/e.xz .hidden.csv sub/.git/f.csv x.parquet.gz"
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    save_dataset(tmp_path / "saved", [{"a": 1}])
    (tmp_path / "saved" / "notes.txt").write_text("x")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "gone.csv").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    below = {".csv": 3, ".xz": 1, "LICENSE": 1, ".bz2": 1, ".gz": 1, "pipe or device": 1}
    assert files_passed_over([str(tmp_path)]) == files_passed_over(["-", str(tmp_path / "**")]) == below
    flat = {".csv": 2, ".bz2": 1, ".gz": 1, "pipe or device": 1, "folder": 1}
    assert files_passed_over([str(tmp_path / "*")]) == flat
    assert files_passed_over([str(tmp_path / "a.jsonl"), str(tmp_path / "*.jsonl")]) == {"pipe or device": 1}
    assert files_passed_over([str(tmp_path / "saved"), str(tmp_path / "c.CSV"), str(tmp_path / "a.*")]) == {}


def test_a_folder_behind_a_link_is_not_entered_and_counted(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.jsonl").write_text("{}")
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "other")
    assert [path.name for path in find_sources([str(tmp_path / "in")])] == ["a.jsonl"]
    assert files_passed_over([str(tmp_path / "in")]) == {"folder": 1}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter every folder")
def test_a_folder_that_may_not_be_entered_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "locked").mkdir(mode=0)
    for given in (tmp_path, tmp_path / "**"):
        with pytest.raises(UserError, match=r"locked.*cannot be read"):
            find_sources([str(given)])


@pytest.mark.parametrize("given", [".", "*.jsonl", "gone.jsonl", "**"])
def test_a_link_to_nothing_is_an_error(tmp_path: Path, given: str) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"gone.jsonl' is a link to nothing") as caught:
        find_sources([str(tmp_path / given)])
    assert len(str(caught.value).splitlines()) == 3


def test_an_empty_name_is_not_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert find_sources(["."]) == [Path("a.jsonl")]
    with pytest.raises(UserError, match="'' is an empty name") as caught:
        find_sources([""])
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    "name", [b"\xff.jsonl", b"\xff.jsonl.zst", b"\xff.arrow", b"\xff.parquet", b"\xff/x.arrow", b"\xff"]
)
def test_names_that_are_not_utf8(tmp_path: Path, name: bytes) -> None:
    """They are read, and stored with the bytes spelled out."""
    path = tmp_path / os.fsdecode(name)
    path.parent.mkdir(exist_ok=True)
    table = pa.table({"prompt": ["q"]})
    if name == b"\xff":
        save_dataset(path, table.to_pylist())
    elif name.endswith(b"parquet"):
        with path.open("wb") as file:
            pq.write_table(table, file)
    elif name.endswith(b"arrow"):
        with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    else:
        raw = b'{"prompt": "q"}'
        path.write_bytes(pa.compress(raw, "zstd", asbytes=True) if name.endswith(b"zst") else raw)
    (found,) = find_sources([str(tmp_path) if name != b"\xff" else str(path)])
    check_formats([found])
    assert [line.value for line in read_lines(found)] == [{"prompt": "q"}]
    assert len(source_sha256(found)) == 64
    (short,) = short_names([found])
    assert short == Path(os.fsdecode(name)).name.replace("\udcff", r"\xff")
    short.encode()


def test_names_stay_apart_when_they_are_spelled_out() -> None:
    odd = [Path(os.fsdecode(b"/a/\xff.jsonl")), Path(r"/b/\xff.jsonl")]
    assert short_names(odd) == [r"a/\xff.jsonl", r"b/\xff.jsonl"]


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
