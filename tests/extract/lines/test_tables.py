"""Arrow and Parquet of every column type against pyarrow's own rows; indices; and memory that does not grow."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dflash_offline import UserError
from dflash_offline.extract.lines.inputs import chunks, lines_in, read_lines, source_sha256
from dflash_offline.extract.lines.messages import MEDIA_KEYS
from dflash_offline.extract.lines.shapes import KEYS, Tokens, understand
from dflash_offline.extract.lines.token_lines import TOKEN_KEYS

LISTS = [[5, 6, 7], [], [1], None, [2, 3]]


def write(path: Path, table: pa.Table, kind: str, rows_a_batch: int = 3) -> Path:
    """The table as Arrow stream, IPC file, or Parquet; small batches, so that rows of one chunk lie in several."""
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=rows_a_batch)
        return path
    make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with make(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=rows_a_batch)
    return path


def name_of(kind: str) -> str:
    return "x.parquet" if kind == "parquet" else "x.arrow"


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


KINDS = pytest.mark.parametrize("kind", ["stream", "file", "parquet"])


@KINDS
@pytest.mark.parametrize(
    "column",
    [
        pa.array(LISTS, pa.list_(pa.int64())),
        pa.array(LISTS, pa.list_(pa.int32())),
        pa.array(LISTS, pa.list_(pa.uint16())),
        pa.array(LISTS, pa.list_(pa.uint64())),
        pa.array(LISTS, pa.large_list(pa.int32())),
        pa.array([[1, 2], [3, 4], None, [5, 6], [7, 8]], pa.list_(pa.int32(), 2)),
        pa.array([[True, False], None, [True], [], [False]], pa.list_(pa.bool_())),
        pa.array([[True], [False], [True], [True], None], pa.list_(pa.bool_(), 1)),
        pa.array([[0.0, 1.0], [1.0], None, [], [0.5]], pa.list_(pa.float32())),
    ],
    ids=lambda column: str(column.type),
)
def test_lists_of_numbers_come_as_arrays(tmp_path: Path, kind: str, column: pa.Array) -> None:
    """Each row equals what pyarrow gives as Python list; a null row has no such key."""
    table = pa.table({"input_ids": column, "n": range(len(column))})
    path = write(tmp_path / name_of(kind), table.slice(1), kind)
    expected = [{key: item for key, item in row.items() if item is not None} for row in table.slice(1).to_pylist()]
    lines = list(read_lines(path))
    for line, row in zip(lines, expected, strict=True):
        assert line.value is not None
        assert {key: plain(item) for key, item in line.value.items()} == row
        if "input_ids" in row:
            assert line.value["input_ids"].flags.owndata, "an array must not keep its file mapped"
            assert line.value["input_ids"].dtype == np.dtype(column.type.value_type.to_pandas_dtype())


@KINDS
def test_lists_that_are_no_numbers_stay_lists(tmp_path: Path, kind: str) -> None:
    """Nulls inside a list, texts, lists of lists: the line is then left out for what it holds."""
    table = pa.table(
        {
            "input_ids": pa.array([[1, None], [2]], pa.list_(pa.int32())),
            "loss_mask": pa.array([["1"], ["0"]], pa.list_(pa.string())),
            "labels": pa.array([[[1]], [[2]]], pa.list_(pa.list_(pa.int8()))),
        }
    )
    path = write(tmp_path / name_of(kind), table, kind)
    assert [line.value for line in read_lines(path)] == table.to_pylist()


@KINDS
def test_text_of_any_arrow_type(tmp_path: Path, kind: str) -> None:
    texts = ["a", None, "\u4f60", "a", "", "b", "a"]
    table = pa.table(
        {
            "prompt": pa.array(texts).dictionary_encode(),
            "completion": pa.array(texts, pa.large_string()),
            "text": pa.array(texts, pa.string_view()) if kind != "parquet" else pa.array(texts),
            "task": pa.array([[text] for text in texts], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
        }
    )
    if kind == "parquet":  # a list of dictionary values has a form there that pyarrow writes and does not read
        table = table.set_column(3, "task", table["task"].cast(pa.list_(pa.string())))
    path = write(tmp_path / name_of(kind), table, kind)
    expected = [{key: item for key, item in row.items() if item is not None} for row in table.to_pylist()]
    expected = [{**row, "task": [item for item in row["task"] if item is not None]} for row in expected]
    found = [line.value for line in read_lines(path, KEYS)]
    assert [{**row, "task": [t for t in row["task"] if t is not None]} for row in found if row] == expected


@KINDS
def test_chats_with_calls_are_those_of_json(tmp_path: Path, kind: str) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"a": null}'}}]
    rows = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a", "tool_calls": c}]}
        for i, c in enumerate([None, calls, [], calls])
    ]
    path = write(tmp_path / name_of(kind), pa.Table.from_pylist(rows), kind)
    assert [understand(line.value or {}) for line in read_lines(path, KEYS)] == [understand(row) for row in rows]


@KINDS
def test_json_columns_are_parsed(tmp_path: Path, kind: str) -> None:
    """`datasets` keeps values of mixed types as Arrow's JSON type, texts in quotes; a broken one costs its row."""
    contents = ['"say \\"x\\""', '{"found": null}', "{broken", None, '{"a": 1, "a": 2}']
    structs = pa.StructArray.from_arrays(
        [pa.array(["tool"] * 5), pa.array(contents, pa.string()).cast(pa.json_())], ["role", "content"]
    )
    messages = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3, 4, 5], pa.int32()), structs)
    path = write(tmp_path / name_of(kind), pa.table({"messages": messages}), kind)
    lines = list(read_lines(path, KEYS))
    found = [line.value and line.value["messages"][0].get("content") for line in lines]
    assert found == ['say "x"', {"found": None}, None, None, None]
    reasons = [line.fault and line.fault.reason for line in lines]
    assert reasons == [None, None, "unreadable value", None, "key given twice"]


@KINDS
def test_surrogates_of_json_columns_are_counted(tmp_path: Path, kind: str) -> None:
    column = pa.array([r'"half \ud83d"', '"whole"', r'{"a": ["\udc00\udc00"]}', None]).cast(pa.json_())
    path = write(tmp_path / name_of(kind), pa.table({"prompt": column, "id": range(4)}), kind)
    lines = list(read_lines(path, KEYS))
    assert [line.num_replaced for line in lines] == [1, 0, 2, 0]
    assert [(line.value or {}).get("prompt") for line in lines] == [
        "half \ufffd",
        "whole",
        {"a": ["\ufffd\ufffd"]},
        None,
    ]


@KINDS
def test_an_odd_id_or_task_does_not_cost_its_row(tmp_path: Path, kind: str) -> None:
    """Times beyond year 9999, of nanoseconds, and text that is not UTF-8 have no form in Python."""
    text = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(np.array([0, 1, 2, 3], np.int32)), pa.py_buffer(b"a\xffc")]
    )
    far = pa.array([0, 2**58, None], pa.int64()).view(pa.timestamp("us", "UTC"))
    fine = pa.array([1_700_000_000_123_456_789] * 3, pa.int64()).view(pa.timestamp("ns"))
    for labels, expected in (
        ({"id": far, "task": fine}, ["2023-11-14 22:13:20.123456789"] * 3),
        ({"id": pa.array([{"at": one} for one in fine]), "task": text}, ["a", "(not read)", "c"]),
    ):
        path = write(
            tmp_path / name_of(kind), pa.table({"prompt": ["q", None, "q"], "text": ["t"] * 3, **labels}), kind
        )
        lines = list(read_lines(path, KEYS))
        assert [line.fault for line in lines] == [None] * 3
        assert [understand(line.value or {}).task for line in lines] == expected
        assert [(line.value or {}).get("prompt") for line in lines] == ["q", None, "q"]
    bad = pa.table({"prompt": ["q"] * 3, "id": far, "text": text})
    lines = list(read_lines(write(tmp_path / name_of(kind), bad, kind), KEYS))
    assert [line.fault and line.fault.reason for line in lines] == [None, "unreadable value", None]


@KINDS
def test_of_pictures_only_their_presence_is_read(tmp_path: Path, kind: str) -> None:
    picture = {"bytes": b"\x89PNG", "path": None}
    table = pa.table(
        {
            "prompt": ["a", "b", "c", "d"],
            "image": pa.array([picture, None, None, picture]),
            "images": pa.array([[], [picture], None, [picture, picture]]),
            "other": pa.array([picture] * 4),
        }
    )
    path = write(tmp_path / name_of(kind), table, kind)
    assert [line.value for line in read_lines(path, KEYS)] == [
        {"prompt": "a", "other": "(not read)", "image": True},
        {"prompt": "b", "other": "(not read)", "images": True},
        {"prompt": "c", "other": "(not read)"},
        {"prompt": "d", "other": "(not read)", "image": True, "images": True},
    ]


def test_the_names_of_special_columns_are_keys_that_are_read() -> None:
    assert set(MEDIA_KEYS) | TOKEN_KEYS <= KEYS


@KINDS
@pytest.mark.parametrize("rows_a_batch", [1, 7, 300, 2000])
def test_chunks_cover_every_row_once(tmp_path: Path, kind: str, rows_a_batch: int) -> None:
    table = pa.table({"prompt": [f"p{i}" for i in range(1100)], "id": range(1100)})
    path = write(tmp_path / name_of(kind), table, kind, rows_a_batch)
    cut = list(chunks(path, KEYS))
    assert max(chunk.num_lines for chunk in cut) <= 256
    assert len(cut) <= 4 * 1100 // min(256, rows_a_batch * 256)
    lines = [line for chunk in cut for line in lines_in(pickle.loads(pickle.dumps(chunk)), KEYS)]
    assert [(line.number, line.value) for line in lines] == list(enumerate(table.to_pylist(), start=1))
    assert [line.value for chunk in cut for line in lines_in(chunk.head(2), KEYS)] == [
        row for chunk in cut for row in table.to_pylist()[chunk.first - 1 :][: min(2, chunk.num_lines)]
    ]


def test_long_rows_come_a_few_at_a_time(tmp_path: Path) -> None:
    """Equal numbers are a few bytes of a Parquet file, and all of them in memory."""
    table = pa.table({"loss_mask": [np.ones(2**19, np.int64)] * 12})
    for kind in ("stream", "parquet"):
        cut = list(chunks(write(tmp_path / name_of(kind), table, kind, 12)))
        assert max(chunk.num_lines for chunk in cut) <= 4
        assert sum(chunk.num_lines for chunk in cut) == 12


def save_indexed(folder: Path, tables: list[pa.Table], indices: list[list[int]]) -> Path:
    """What `save_to_disk` of the first releases of `datasets` wrote for a shuffled or selected dataset."""
    folder.mkdir()
    state: dict[str, Any] = {"_data_files": [], "_indices_data_files": []}
    for i, table in enumerate(tables):
        write(folder / f"data-{i}.arrow", table, "stream", 4)
        state["_data_files"].append({"filename": f"data-{i}.arrow"})
    for i, numbers in enumerate(indices):
        index = pa.table({"indices": pa.array(numbers, pa.uint64())})
        write(folder / f"indices-{i}.arrow", index, "stream", 5)
        state["_indices_data_files"].append({"filename": f"indices-{i}.arrow"})
    (folder / "state.json").write_text(json.dumps(state))
    return folder


@pytest.mark.parametrize("with_dictionary", [False, True])
def test_the_index_of_a_shuffled_dataset_is_followed(tmp_path: Path, with_dictionary: bool) -> None:
    rng = np.random.default_rng(0)
    texts = pa.array([f"p{i % 7}" for i in range(90)])
    table = pa.table(
        {
            "prompt": texts.dictionary_encode() if with_dictionary else texts,
            "id": range(90),
            "input_ids": [[i] * (i % 5) for i in range(90)],
            "loss_mask": pa.array([[i, -i] for i in range(90)], pa.list_(pa.int16(), 2)),
        }
    )
    tables = [table.slice(0, 33).combine_chunks(), table.slice(33, 1), table.slice(34).combine_chunks()]
    orders = [rng.permutation(90).tolist(), [0, 1, 2, 3, 4, 5, 32, 33, 34, 89], [7, 7, 7], []]
    for i, order in enumerate(orders):
        folder = save_indexed(tmp_path / str(i), tables, [order[:8], order[8:]])
        lines = list(read_lines(folder, KEYS))
        found = [{key: plain(item) for key, item in (line.value or {}).items()} for line in lines]
        assert found == table.take(pa.array(order, pa.int64())).to_pylist()
        assert [line.number for line in lines] == list(range(1, len(order) + 1))
    assert source_sha256(tmp_path / "0") != source_sha256(tmp_path / "1")


@pytest.mark.parametrize("order", [[0, 90], [2**40], [2**63 + 5]])
def test_an_index_beyond_the_data_is_refused(tmp_path: Path, order: list[int]) -> None:
    folder = save_indexed(tmp_path / "d", [pa.table({"prompt": ["a"] * 90})], [order])
    with pytest.raises(UserError, match="it names row"):
        list(read_lines(folder))


def test_an_index_before_the_data_is_refused_by_the_row_at_fault(tmp_path: Path) -> None:
    folder = save_indexed(tmp_path / "d", [pa.table({"prompt": ["a"] * 5})], [[0]])
    write(folder / "indices-0.arrow", pa.table({"indices": [3, -1]}), "stream")
    with pytest.raises(UserError, match=r"it names row -1\nexpected: rows 0\.\.4"):
        list(read_lines(folder))


def test_an_index_that_is_none_is_refused(tmp_path: Path) -> None:
    folder = save_indexed(tmp_path / "d", [pa.table({"prompt": ["a"]})], [[0]])
    write(folder / "indices-0.arrow", pa.table({"prompt": ["a"]}), "stream")
    with pytest.raises(UserError, match="one column of row numbers"):
        list(read_lines(folder))


MEMORY_SCRIPT = """\
import sys
from pathlib import Path
from dflash_offline.extract.lines.inputs import chunks, lines_in
from dflash_offline.extract.lines.shapes import KEYS, understand
def peak_kib():  # not by getrusage: that begins with what the parent has taken
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
num_rows, before = 0, peak_kib()
for chunk in chunks(Path(sys.argv[1]), KEYS):
    num_rows += sum(understand(line.value).content.ids.size == 3000 for line in lines_in(chunk, KEYS))
print(num_rows, peak_kib() - before)
"""


@KINDS
def test_memory_stays_flat_over_a_large_file(tmp_path: Path, kind: str) -> None:
    """8,000 rows of 3,000 ids are 190 MiB; the process may grow by a chunk's pages, not by the file."""
    ids = np.random.default_rng(0).integers(0, 150_000, (8000, 3000))
    table = pa.table({"input_ids": pa.FixedSizeListArray.from_arrays(ids.ravel(), 3000).cast(pa.list_(pa.int64()))})
    path = write(tmp_path / name_of(kind), table, kind, 1000)
    done = subprocess.run([sys.executable, "-c", MEMORY_SCRIPT, str(path)], capture_output=True, text=True, timeout=300)
    num_rows, grown_kib = map(int, done.stdout.split())
    assert num_rows == 8000
    assert grown_kib < 110 * 1024


def test_tokens_of_a_table_are_those_of_json(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [8], "labels": [8]}]
    schema = pa.schema([(key, pa.list_(pa.int32())) for key in ("input_ids", "loss_mask", "labels")])
    path = write(tmp_path / "x.arrow", pa.Table.from_pylist(rows, schema), "stream")
    for line, row in zip(read_lines(path, KEYS), rows, strict=True):
        table, given = understand(line.value or {}).content, understand(row).content
        assert isinstance(table, Tokens)
        assert isinstance(given, Tokens)
        assert (table.ids.tolist(), table.mask.tolist()) == (given.ids.tolist(), given.mask.tolist())
