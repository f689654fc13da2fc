"""The same lines out of every file format, and a countable fault for every line that is none."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dflash_offline import UserError
from dflash_offline.extract.inputs import (
    InputLine,
    check_formats,
    find_sources,
    read_lines,
    short_names,
    source_sha256,
)

LINES = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "id": "1"},
    {"messages": [{"role": "user", "content": "\u4f60"}, {"role": "assistant", "content": "d", "name": "x"}]},
]


def save_dataset(folder: Path, rows: list[dict[str, Any]], shards: int = 2) -> Path:
    """What `datasets.Dataset.save_to_disk` writes: Arrow streams and a state.json that names them."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    schema = pa.Table.from_pylist(rows).schema
    size = -(-len(rows) // shards)
    for i, name in enumerate(names):
        table = pa.Table.from_pylist(rows[i * size : (i + 1) * size], schema=schema)
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            stream.write_table(table, max_chunksize=1)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train", "_format_type": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def write_format(folder: Path, name: str) -> Path:
    path = folder / f"chats{name}"
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in LINES).encode()
    if name in (".jsonl", ".json"):
        path.write_bytes(text)
    elif name == ".jsonl.gz":
        path.write_bytes(gzip.compress(text))
    elif name == "-array.json":
        path.write_text(json.dumps(LINES, indent=1))
    elif name == ".parquet":
        pq.write_table(pa.Table.from_pylist(LINES), path)
    elif name == "-dataset":
        save_dataset(path, LINES)
    else:
        (path).mkdir()
        save_dataset(path / "train", LINES[:1], 1)
        save_dataset(path / "test", LINES[1:], 1)
        (path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    return path


@pytest.mark.parametrize("name", [".jsonl", ".jsonl.gz", ".json", "-array.json", ".parquet", "-dataset", "-dictionary"])
def test_every_format_gives_the_same_lines(tmp_path: Path, name: str) -> None:
    (path,) = find_sources([str(write_format(tmp_path, name))])
    check_formats([path])
    lines = list(read_lines(path))
    assert [line.value for line in lines] == LINES
    assert [line.number for line in lines] == [1, 2]


def read(tmp_path: Path, raw: bytes, name: str = "x.jsonl") -> list[InputLine]:
    path = tmp_path / name
    path.write_bytes(raw)
    return list(read_lines(path))


def test_lines_end_at_lf_alone(tmp_path: Path) -> None:
    inside = "a\u2028b\u0085c\x0bd".encode()
    raw = b'\xef\xbb\xbf{"a": "' + inside.replace(b"\x0b", b"\\u000b") + b'"}\r\n\r\n  \n{"a": 2}'
    first, second = read(tmp_path, raw)
    assert first.value == {"a": "a\u2028b\u0085c\x0bd"}
    assert (second.value, second.number) == ({"a": 2}, 4)


def test_unreadable_lines_are_named_and_do_not_end_the_run(tmp_path: Path) -> None:
    raw = b'{"a": 1}\n{"a": \n"text"\n[1]\n{"a": "\xff"}\n{"a": "\xed\xa0\xbd"}\n' + b"[" * 100_000 + b'\n{"a": 2}\n'
    lines = read(tmp_path, raw)
    reasons = [line.fault.reason if line.fault else None for line in lines]
    assert reasons == [None, "not JSON", "not an object", "not an object", "not UTF-8", "not UTF-8", "not JSON", None]
    assert [line.number for line in lines] == list(range(1, 9))


def test_lines_nested_too_deeply_are_named(tmp_path: Path) -> None:
    raw = b"".join(b'{"a": ' + b"[" * n + b"{}" + b"]" * n + b"}\n" for n in (90, 900, 300, 0))
    for name in ("x.jsonl", "x.json"):
        reasons = [line.fault and line.fault.reason for line in read(tmp_path, raw, name)]
        assert reasons == [None, "nested too deeply", "nested too deeply", None]


def odd_table() -> pa.Table:
    """Three rows: the second has a name that is not UTF-8; no time fits into a datetime."""
    names = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(np.array([0, 1, 2, 3], np.int32)), pa.py_buffer(b"a\xffc")]
    )
    times = [
        pa.array([value] * 3, pa.int64()).view(pa.timestamp(unit))
        for unit, value in (("ns", 1_700_000_000_123_456_789), ("us", 2**62))
    ]
    return pa.table({"prompt": names, "ns": times[0], "us": times[1]})


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_values_without_a_form_in_python(tmp_path: Path, kind: str) -> None:
    """In a column that nobody asked for they are not looked at; in another they cost their own row."""
    if kind == "parquet":
        path = tmp_path / "x.parquet"
        pq.write_table(odd_table(), path)
    else:
        path = save_dataset(tmp_path / "d", [{"a": 1}], 1)
        name = str(path / "data-00000-of-00001.arrow")
        with pa.OSFile(name, "wb") as file, pa.ipc.new_stream(file, odd_table().schema) as stream:
            stream.write_table(odd_table())
    asked = list(read_lines(path, {"prompt", "completion"}))
    unread = {"ns": "(not read)", "us": "(not read)"}
    assert [line.value for line in asked] == [{"prompt": "a", **unread}, None, {"prompt": "c", **unread}]
    assert [line.fault and line.fault.reason for line in asked] == [None, "unreadable value", None]
    assert [line.number for line in asked] == [1, 2, 3]
    assert [line.fault and line.fault.reason for line in read_lines(path)] == ["unreadable value"] * 3


def test_lone_surrogates_become_u_fffd(tmp_path: Path) -> None:
    raw = rb'{"k\ud800": ["x\ud83dy", "\ud83d\ude00", {"z": "\ude00\ud83d"}]}'
    (line,) = read(tmp_path, raw)
    assert line.value == {"k\ufffd": ["x\ufffdy", "\U0001f600", {"z": "\ufffd\ufffd"}]}
    assert line.num_replaced == 4


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("a.jsonl", '{"a": 1}\n'.encode("utf-16"), "UTF-16"),
        ("a.json", '[{"a": 1}]'.encode("utf-16"), "UTF-16"),
        ("a.json", b'[{"a": 1}, {"a":', "not JSON"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-12], "cannot be read"),
        ("a.jsonl.gz", b'{"a": 1}\n', "cannot be read"),
        ("a.parquet", b"PAR1 and no more", "cannot be read"),
    ],
)
def test_a_file_broken_as_a_whole(tmp_path: Path, name: str, raw: bytes, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        read(tmp_path, raw, name)
    assert len(str(caught.value).splitlines()) == 3


def test_broken_dataset_folders(tmp_path: Path) -> None:
    folder = save_dataset(tmp_path / "d", LINES)
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match="00001-of-00002"):
        list(read_lines(folder))
    (folder / "data-00000-of-00002.arrow").write_bytes(b"x" * 100)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00002.arrow"}]}')
    with pytest.raises(UserError, match="cannot be read"):
        list(read_lines(folder))
    (folder / "state.json").write_text('{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}')
    with pytest.raises(UserError, match="index over its rows"):
        list(read_lines(folder))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", "[1]"),
        ("state.json", "[" * 100_000),
        ("state.json", "{}"),
        ("state.json", '{"_data_files": [{"x": 1}]}'),
        ("state.json", '{"_data_files": [1]}'),
        ("dataset_dict.json", '{"splits": null}'),
        ("dataset_dict.json", '{"splits": [1]}'),
        ("dataset_dict.json", "{}"),
    ],
)
def test_broken_metadata_of_a_dataset(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    for read_it in (lambda: list(read_lines(tmp_path)), lambda: source_sha256(tmp_path)):
        with pytest.raises(UserError, match=name) as caught:
            read_it()
        assert len(str(caught.value).splitlines()) == 3


def test_null_members_of_arrow_structs_are_absent(tmp_path: Path) -> None:
    """Arrow gives every struct the fields of all rows; the arguments of a call must not grow."""
    rows = [{"m": [{"arguments": {"a": 1}}]}, {"m": [{"arguments": {"q": "x"}}], "extra": 5}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    assert [line.value for line in read_lines(tmp_path / "x.parquet")] == [rows[0], {"m": [{"arguments": {"q": "x"}}]}]


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
        with pytest.raises(UserError, match="format that is not read"):
            check_formats([tmp_path / name])


def test_short_names_tell_sources_apart() -> None:
    assert short_names([Path("/x/a/t.jsonl"), Path("/x/b/u.jsonl")]) == ["t.jsonl", "u.jsonl"]
    assert short_names([Path("/x/a/t.jsonl"), Path("/x/b/t.jsonl")]) == ["a/t.jsonl", "b/t.jsonl"]


def test_source_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    first, again = save_dataset(tmp_path / "a", LINES), save_dataset(tmp_path / "b", LINES)
    swapped = save_dataset(tmp_path / "c", LINES[::-1])
    assert source_sha256(first) == source_sha256(again) != source_sha256(swapped)
