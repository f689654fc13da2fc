"""The same lines out of every file format, and a countable fault for every line that is none."""

import gzip
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from dflash_offline import UserError
from dflash_offline.extract.lines.inputs import (
    InputLine,
    check_formats,
    chunks,
    find_sources,
    lines_in,
    read_lines,
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


def zstd(raw: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    return sink.getvalue().to_pybytes()


def arrow_stream(rows: list[dict[str, Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=1)
    return sink.getvalue().to_pybytes()


def write_format(folder: Path, name: str) -> Path:
    path = folder / f"chats{name}"
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in LINES).encode()
    if name in (".jsonl", ".json"):
        path.write_bytes(text)
    elif name == ".jsonl.gz":
        path.write_bytes(gzip.compress(text))
    elif name == ".jsonl.zst":
        path.write_bytes(zstd(text))
    elif name == "-array.json":
        path.write_text(json.dumps(LINES, indent=1))
    elif name == "-array.json.gz":
        path.write_bytes(gzip.compress(json.dumps(LINES).encode()))
    elif name == "-array.json.zst":
        path.write_bytes(zstd(json.dumps(LINES).encode()))
    elif name == ".parquet":
        pq.write_table(pa.Table.from_pylist(LINES), path)
    elif name == ".arrow":
        path.write_bytes(arrow_stream(LINES))
    elif name == "-ipc.arrow":
        table = pa.Table.from_pylist(LINES)
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table, max_chunksize=1)
    elif name == ".feather":
        feather.write_feather(pa.Table.from_pylist(LINES), str(path), compression="lz4")
    else:
        save_dataset(path, LINES)
    return path


FORMAT_NAMES = (
    ".jsonl .jsonl.gz .jsonl.zst .json -array.json -array.json.gz -array.json.zst "
    ".parquet .arrow -ipc.arrow .feather -dataset"
).split()


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_every_format_gives_the_same_lines(tmp_path: Path, name: str) -> None:
    (path,) = find_sources([str(write_format(tmp_path, name))])
    check_formats([path])
    lines = list(read_lines(path))
    assert [line.value for line in lines] == LINES
    assert [line.number for line in lines] == [1, 2]


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_chunks_travel_and_are_cut(tmp_path: Path, name: str) -> None:
    """A chunk's lines are parsed from its pickled form alone, the head's as the whole's."""
    path = write_format(tmp_path, name)
    cut = list(chunks(path, {"messages"}))
    assert sum(chunk.num_lines for chunk in cut) == 2
    assert [chunk.head(10**9) for chunk in cut] == cut
    lines = [line for chunk in cut for line in lines_in(pickle.loads(pickle.dumps(chunk)), {"messages"})]
    assert [line.value and line.value["messages"] for line in lines] == [line["messages"] for line in LINES]
    heads = [pickle.loads(pickle.dumps(chunk.head(1))) for chunk in cut]
    assert [chunk.num_lines for chunk in heads] == [1] * len(cut)
    assert [line.value for line in lines_in(heads[0], {"messages"})] == [lines[0].value]


def test_all_members_and_frames_of_a_compressed_file_are_read(tmp_path: Path) -> None:
    parts = [b'{"a": 1}\n{"a"', b": 2}\n", b"", b'{"a": 3}\n' * 40_000]
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    for name, raw in (
        ("x.jsonl.gz", b"".join(map(gzip.compress, parts))),
        ("x.jsonl.zst", skippable + skippable.join(map(zstd, parts)) + skippable),
    ):
        lines = read(tmp_path, raw, name)
        assert [line.value for line in lines] == [{"a": 1}, {"a": 2}] + [{"a": 3}] * 40_000


def test_a_cut_compressed_file_is_never_a_short_one(tmp_path: Path) -> None:
    text = b"".join(b'{"a": "%d"}\n' % i for i in range(5000))
    for name, whole in (
        ("x.jsonl.gz", gzip.compress(text, mtime=0) + gzip.compress(text, mtime=0)),
        ("x.jsonl.zst", zstd(text) + zstd(text)),
    ):
        half = len(whole) // 2
        for end in (0, 3, 20, half - 1, half + 1, half + 9, len(whole) - 1):
            with pytest.raises(UserError) as caught:
                read(tmp_path, whole[:end], name)
            assert len(str(caught.value).splitlines()) == 3
        for junk in (b"junk", b"\x1f\x8bjunk"):
            with pytest.raises(UserError, match="cannot be read"):
                read(tmp_path, whole + junk, name)


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("a.jsonl", gzip.compress(b"{}", mtime=0), "is gzip, not text"),
        ("a.json", zstd(b"[]"), "is zstd, not text"),
        ("a.jsonl.gz", zstd(b"{}"), "is not gzip, it is zstd"),
        ("a.jsonl.zst", gzip.compress(b"{}", mtime=0), "is not zstd, it is gzip"),
        ("a.jsonl.zst", b'{"a": 1}\n', "is not zstd"),
        ("a.jsonl.gz", b"", "is not gzip, it is empty"),
        ("a.jsonl.gz", gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), "is gzip, not text"),
        ("a.jsonl.gz", gzip.compress('{"a": 1}'.encode("utf-16"), mtime=0), "UTF-16"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16-le"), "UTF-16"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16-be"), "UTF-16"),
        ("a.jsonl", '{"a": 1}'.encode("utf-32"), "UTF-32"),
        ("a.jsonl", '{"a": 1}'.encode("utf-32-be"), "UTF-32"),
        ("a.jsonl", b"PAR1\x15\x04", "is Parquet, not text"),
        ("a.json", arrow_stream(LINES), "is Arrow, not text"),
        ("a.jsonl", b"PK\x03\x04\x14", "is zip, not text"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer"),
        ("a.parquet", b'{"a": 1}\n', "cannot be read"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "cannot be read"),
        ("a.arrow", b'{"a": 1}\n', "cannot be read"),
        ("a.arrow", b"", "cannot be read"),
        ("a.arrow", arrow_stream(LINES)[:40], "cannot be read"),
    ],
)
def test_a_name_that_lies_is_refused_before_the_run(tmp_path: Path, name: str, raw: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(raw)
    for refuse in (lambda: check_formats([tmp_path / name]), lambda: list(read_lines(tmp_path / name))):
        with pytest.raises(UserError, match=says) as caught:
            refuse()
        assert len(str(caught.value).splitlines()) == 3


STDIN_SCRIPT = """\
import sys
from dflash_offline.extract.lines.inputs import check_formats, opened_sources, read_lines, short_names, source_sha256
with opened_sources(sys.argv[1:]) as sources:
    check_formats(sources)
    print(short_names(sources), len(source_sha256(sources[0])))
    for line in (line for path in sources for line in read_lines(path)):
        print(line.number, line.value)
print([path.exists() for path in sources])
"""


@pytest.mark.parametrize("name", [name for name in FORMAT_NAMES if name not in ("-dataset", "-dictionary")])
def test_standard_input_of_any_format(tmp_path: Path, name: str) -> None:
    raw = write_format(tmp_path, name).read_bytes()
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n')
    said = run_with_stdin(raw, "-", str(tmp_path / "b.jsonl"))
    lines = [f"{number} {line}" for number, line in enumerate(LINES, start=1)]
    assert said.stdout.splitlines() == ["['stdin', 'b.jsonl'] 64", *lines, "1 {'a': 1}", "[False, True]"]


def test_standard_input_that_gives_nothing_or_is_named_twice() -> None:
    assert run_with_stdin(b"", "-").stdout.splitlines() == ["['stdin'] 64", "[False]"]
    assert "named twice" in run_with_stdin(b"{}", "-", "-").stderr


@pytest.mark.parametrize(
    "raw",
    [b'{"a": 1}'.ljust(40).decode().encode("utf-16"), arrow_stream(LINES)[:-8], b'[{"a": 1}, {"a":', b"PAR1 no more"],
)
def test_a_fault_of_standard_input_is_said_of_its_name(raw: bytes) -> None:
    last = run_with_stdin(raw, "-").stderr.splitlines()[-3:]
    assert "input '-' " in last[0]
    assert "dflash-" not in "".join(last)


def run_with_stdin(raw: bytes, *given: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", STDIN_SCRIPT, *given], input=raw, capture_output=True, timeout=120)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


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
    folder = save_dataset(tmp_path / "indexed", LINES)
    state = json.loads((folder / "state.json").read_text()) | {"_indices_data_files": [{"filename": "i.arrow"}]}
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="i.arrow' is missing"):
        list(read_lines(folder))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", "[1]"),
        ("state.json", "[" * 100_000),
        ("state.json", "{}"),
        ("state.json", '{"_data_files": [{"x": 1}]}'),
        ("state.json", '{"_data_files": [1]}'),
        ("state.json", '{"_data_files": []}'),
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
