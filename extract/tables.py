"""Input lines from Arrow: Parquet files and folders written by datasets' `save_to_disk`.

Knows pyarrow and the folder layout (state.json, dataset_dict.json, data-*.arrow in stream
format); needs no `datasets` package. Rows are read a small batch at a time, and of their columns
only those asked for: an odd value in any other column is nobody's concern.
"""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .. import UserError

ROWS_AT_ONCE = 256
UNREAD = "(not read)"
Row = dict[str, Any] | Exception
"""A row, or why one of its values has no form in Python."""


def is_dataset(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a saved dataset, or of all splits of a saved dictionary, in order."""
    if (folder / "dataset_dict.json").is_file():
        splits = names_in(folder / "dataset_dict.json", read_json_file(folder / "dataset_dict.json").get("splits"))
        return [path for split in splits for path in dataset_files(folder / split)]
    state = read_json_file(folder / "state.json")
    if state.get("_indices_data_files"):
        raise UserError(
            f"dataset {str(folder)!r} was saved with an index over its rows",
            "rows stored in their order",
            "call `dataset.flatten_indices()` before `save_to_disk`",
        )
    entries = state.get("_data_files")
    if isinstance(entries, list):
        entries = [entry.get("filename") if isinstance(entry, dict) else entry for entry in entries]
    files = [folder / name for name in names_in(folder / "state.json", entries)]
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise UserError(f"dataset file {str(missing[0])!r} is missing", f"{len(files)} Arrow files", "copy it again")
    return files


def read_json_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {error}", "a JSON object", "save the dataset again") from error
    if not isinstance(content, dict):
        raise UserError(
            f"{str(path)!r} holds a JSON {type(content).__name__}", "a JSON object", "save the dataset again"
        )
    return content


def names_in(path: Path, names: Any) -> list[str]:
    """The list of names that a dataset's JSON file holds. Raises UserError for anything else."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(
            f"{str(path)!r} names its parts as {names!r:.80}",
            "what `datasets` writes: a list of splits, or _data_files with a filename each",
            "save the dataset again",
        )
    return names


def read_arrow_streams(folder: Path, columns: Collection[str] | None = None) -> Iterator[Row]:
    """The rows of a saved dataset; the files are memory-mapped. `columns` None reads all."""
    for path in dataset_files(folder):
        try:
            with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as stream:
                for batch in stream:
                    read, unread = shared(batch.schema.names, columns)
                    yield from rows_of(batch, read, unread)
        except (pa.ArrowException, OSError) as error:
            raise broken(path, "an Arrow IPC stream", error) from error


def read_parquet(path: Path, columns: Collection[str] | None = None) -> Iterator[Row]:
    """The rows of a Parquet file. `columns` None reads all."""
    try:
        with pq.ParquetFile(path) as file:
            read, unread = shared(file.schema_arrow.names, columns)
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=read):
                yield from rows_of(batch, read, unread)
    except (pa.ArrowException, OSError) as error:
        raise broken(path, "a whole Parquet file", error) from error


def broken(path: Path, expected: str, error: Exception) -> UserError:
    return UserError(f"input {str(path)!r} cannot be read: {error}".splitlines()[0], expected, "copy it again")


def shared(names: list[str], columns: Collection[str] | None) -> tuple[list[str], list[str]]:
    """The columns to read, and those that are there only by name; without a known one all are read."""
    read = [name for name in names if columns is None or name in columns]
    return (read, [name for name in names if name not in read]) if read else (names, [])


def rows_of(batch: pa.RecordBatch, read: list[str], unread: list[str]) -> Iterator[Row]:
    """Each row; a column that is not read keeps its name, with `UNREAD` as value."""
    batch = batch.select([i for i, name in enumerate(batch.schema.names) if name in read])
    for start in range(0, batch.num_rows, ROWS_AT_ONCE):
        for row in python_rows(batch.slice(start, ROWS_AT_ONCE)):
            yield row if isinstance(row, Exception) else dict.fromkeys(unread, UNREAD) | without_nulls(row)


def python_rows(batch: pa.RecordBatch) -> list[Row]:
    """All rows at once; one by one where a value cannot be converted, to find whose it is.

    Such values are text that is not UTF-8, and times outside of what `datetime` holds.
    """
    try:
        return list(batch.to_pylist())
    except (ValueError, OverflowError, pa.ArrowException) as error:
        if batch.num_rows == 1:
            return [error]
        return [row for i in range(batch.num_rows) for row in python_rows(batch.slice(i, 1))]


def without_nulls(value: Any) -> Any:
    """Arrow structs hold every field of any row: a null one was absent where it was written."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and not isinstance(value[0], (int, float)):
        return [without_nulls(item) for item in value]
    return value
