"""Arrow files that are whole, and those that were cut, put together, or hold a column twice."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dflash_offline import UserError
from dflash_offline.extract.lines.inputs import check_formats, read_lines

TABLE = pa.table({"prompt": [f"p{i}" for i in range(7)], "n": range(7)})
ENCODED = TABLE.set_column(0, "prompt", TABLE["prompt"].dictionary_encode())
KINDS = pytest.mark.parametrize("kind", ["stream", "dictionaries", "old stream", "zstd", "file", "file, zstd"])


def arrow_bytes(kind: str, given: pa.Table | None = None) -> bytes:
    """The rows in batches of two, and an empty batch."""
    table = given if given is not None else ENCODED if kind == "dictionaries" else TABLE
    options = pa.ipc.IpcWriteOptions(
        use_legacy_format=kind == "old stream",
        compression="zstd" if "zstd" in kind else None,
        metadata_version=pa.ipc.MetadataVersion.V4 if kind == "old stream" else pa.ipc.MetadataVersion.V5,
    )
    sink = pa.BufferOutputStream()
    make = pa.ipc.new_file if "file" in kind else pa.ipc.new_stream
    with make(sink, table.schema, options=options) as writer:
        writer.write_table(table.slice(0, 0))
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue().to_pybytes()


def refused(path: Path) -> str:
    """What both the check before a run and reading say of a file."""
    said: list[str] = []
    for read_it in (lambda: check_formats([path]), lambda: list(read_lines(path))):
        with pytest.raises(UserError) as caught:
            read_it()
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert len(said[0].splitlines()) == 3
    return said[0]


@KINDS
def test_a_whole_file_is_read(tmp_path: Path, kind: str) -> None:
    full = ENCODED if kind == "dictionaries" else TABLE
    for table in (full, full.slice(0, 0), full.slice(0, 1)):
        (tmp_path / "x.arrow").write_bytes(arrow_bytes(kind, table))
        check_formats([tmp_path / "x.arrow"])
        assert [line.value for line in read_lines(tmp_path / "x.arrow")] == table.to_pylist()


@KINDS
def test_a_file_cut_anywhere_is_refused_before_the_run(tmp_path: Path, kind: str) -> None:
    """Also where one batch ends and the next begins: there is nothing torn that would tell."""
    whole = arrow_bytes(kind)
    for end in range(len(whole) - 4, -1, -4):
        (tmp_path / "x.arrow").write_bytes(whole[:end])
        assert "cannot be read" in refused(tmp_path / "x.arrow")


def test_the_cut_between_two_batches_is_named(tmp_path: Path) -> None:
    whole = arrow_bytes("stream")
    (tmp_path / "x.arrow").write_bytes(whole[:-8])
    assert f"it breaks off at byte {len(whole) - 8}" in refused(tmp_path / "x.arrow")


@KINDS
@pytest.mark.parametrize("more", ["itself", "another", "a byte", "zeros"])
def test_files_put_together_are_refused(tmp_path: Path, kind: str, more: str) -> None:
    """A reader of streams would end after the first; a reader of files would follow the last footer into the first."""
    whole = arrow_bytes(kind)
    behind = {"itself": whole, "another": arrow_bytes(kind, TABLE.slice(5)), "a byte": b"x", "zeros": b"\0" * 8}[more]
    (tmp_path / "x.arrow").write_bytes(whole + behind)
    assert "cannot be read" in refused(tmp_path / "x.arrow")


def save_shards(folder: Path, shards: list[bytes], info: dict[str, Any]) -> Path:
    folder.mkdir()
    names = [f"data-{i}.arrow" for i in range(len(shards))]
    for name, raw in zip(names, shards):
        (folder / name).write_bytes(raw)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


@pytest.mark.parametrize("torn", [0, 1])
def test_a_saved_dataset_with_a_cut_shard_is_refused(tmp_path: Path, torn: int) -> None:
    shards = [arrow_bytes("stream"), arrow_bytes("stream", TABLE.slice(3))]
    shards[torn] = shards[torn][:-8]
    said = refused(save_shards(tmp_path / "d", shards, {}))
    assert f"data-{torn}.arrow" in said


def test_the_number_of_rows_that_a_saved_dataset_was_made_of_is_not_its_own(tmp_path: Path) -> None:
    """`datasets` keeps the num_examples of what it once loaded: `select`, `filter` and `concatenate_datasets` followed
    by `save_to_disk` write it unchanged (seen with 5.2.0)."""
    info = {"splits": {"train": {"name": "train", "num_examples": 2500, "dataset_name": "generator"}}}
    folder = save_shards(tmp_path / "d", [arrow_bytes("stream")], info)
    check_formats([folder])
    assert len(list(read_lines(folder))) == 7


@pytest.mark.parametrize("name", ["x.arrow", "x.parquet", "d"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, name: str) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], names=["prompt", "n", "prompt"])
    path = tmp_path / name
    if name == "d":
        save_shards(path, [arrow_bytes("stream", table)], {})
    elif name == "x.arrow":
        path.write_bytes(arrow_bytes("stream", table))
    else:
        pq.write_table(table, path)
    assert "has 2 columns named 'prompt'" in refused(path)


def of_offsets(kind: pa.DataType, offsets: list[int], *more: Any) -> pa.Array:
    """Two values of a kind with offsets, whatever these are."""
    children = [one for one in more if isinstance(one, pa.Array)]
    buffers = [one for one in more if not isinstance(one, pa.Array)]
    places = pa.py_buffer(np.array(offsets, np.int32))
    return pa.Array.from_buffers(kind, 2, [None, places, *buffers], children=children)


@pytest.mark.parametrize(
    "column",
    [
        of_offsets(pa.string(), [0, 1_000_000_000, 3], pa.py_buffer(b"abc")),
        of_offsets(pa.list_(pa.int64()), [0, -5, 3], pa.array([1, 2, 3])),
        pa.DictionaryArray.from_arrays(pa.array([0, 7]), pa.array(["a"]), safe=False),
    ],
    ids=["text", "list", "dictionary"],
)
@pytest.mark.parametrize("kind", ["stream", "file"])
def test_a_batch_that_leads_out_of_its_buffers_is_refused(tmp_path: Path, kind: str, column: pa.Array) -> None:
    """Reading such rows took the process down."""
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"prompt": column})
    with (pa.ipc.new_file if kind == "file" else pa.ipc.new_stream)(sink, batch.schema) as writer:
        writer.write_batch(batch)
    path = tmp_path / "x.arrow"
    path.write_bytes(sink.getvalue().to_pybytes())
    with pytest.raises(UserError, match="cannot be read: In column 0") as caught:
        list(read_lines(path))
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("kind", ["stream", "dictionaries", "file", "parquet"])
def test_a_column_whose_name_is_not_utf8_is_refused(tmp_path: Path, kind: str) -> None:
    named = (ENCODED if kind == "dictionaries" else TABLE).rename_columns(["prompt", "zzzz"])
    path = tmp_path / ("x.parquet" if kind == "parquet" else "x.arrow")
    if kind == "parquet":
        pq.write_table(named, path)
    else:
        path.write_bytes(arrow_bytes(kind, named))
    path.write_bytes(path.read_bytes().replace(b"zzzz", b"\xff\xfezz"))
    assert "a column whose name is not UTF-8: b'\\xff\\xfezz'" in refused(path)
