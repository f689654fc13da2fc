"""Input lines from Arrow: Parquet files and folders written by datasets' `save_to_disk`.

Knows pyarrow and the folder layout (state.json, dataset_dict.json, data-*.arrow in stream
format); needs no `datasets` package. Rows are read a small batch at a time.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .. import UserError

ROWS_AT_ONCE = 256


def is_dataset(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def dataset_files(folder: Path) -> list[Path]:
    """The Arrow files of a saved dataset, or of all splits of a saved dictionary, in order."""
    if (folder / "dataset_dict.json").is_file():
        splits = read_json_file(folder / "dataset_dict.json").get("splits", [])
        return [path for split in splits for path in dataset_files(folder / split)]
    state = read_json_file(folder / "state.json")
    if state.get("_indices_data_files"):
        raise UserError(
            f"dataset {str(folder)!r} was saved with an index over its rows",
            "rows stored in their order",
            "call `dataset.flatten_indices()` before `save_to_disk`",
        )
    files = [folder / entry["filename"] for entry in state.get("_data_files", [])]
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise UserError(f"dataset file {str(missing[0])!r} is missing", f"{len(files)} Arrow files", "copy it again")
    return files


def read_json_file(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {error}", "a JSON object", "save the dataset again") from error


def read_arrow_streams(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of a saved dataset; the files are memory-mapped."""
    for path in dataset_files(folder):
        try:
            with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as stream:
                for batch in stream:
                    yield from rows_of(batch)
        except (pa.ArrowInvalid, OSError) as error:
            raise broken(path, "an Arrow IPC stream", error) from error


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                yield from rows_of(batch)
    except (pa.ArrowInvalid, OSError) as error:
        raise broken(path, "a whole Parquet file", error) from error


def broken(path: Path, expected: str, error: Exception) -> UserError:
    return UserError(f"input {str(path)!r} cannot be read: {error}".splitlines()[0], expected, "copy it again")


def rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    for start in range(0, batch.num_rows, ROWS_AT_ONCE):
        for row in batch.slice(start, ROWS_AT_ONCE).to_pylist():
            yield without_nulls(row)


def without_nulls(value: Any) -> Any:
    """Arrow structs hold every field of any row: a null one was absent where it was written."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and not isinstance(value[0], (int, float)):
        return [without_nulls(item) for item in value]
    return value
