"""Arrow and Parquet files as chunks of rows: found cheaply, read by whoever works on them.

Arrow files (streams as `datasets` writes them, or IPC files) are mapped anew for each chunk, so no more of them
is ever in memory than one chunk's pages, and a chunk only says where its rows lie. Parquet cannot be entered in
the middle: its rows travel inside the chunk. Of the columns only those asked for are read: an odd value in any
other column is nobody's concern.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .arrow_file import ArrowFile, broken, check_names, odd_name
from .dataset_folders import SavedDataset
from .json_lines import InputLine, LeftOut, as_input_line
from .table_rows import holds_json, rows_of, shared, slim

ROWS_AT_ONCE = 256
BYTES_AT_ONCE = 2**24
"""A chunk of long rows has fewer: 16 MiB of what the file holds."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows [start, start + count) of one record batch of an Arrow file, where `place` says which one."""

    path: Path
    place: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class ArrowRows:
    """Where rows lie in Arrow files."""

    runs: tuple[Run, ...]

    def lines(self, source: Path, first: int, keys: Collection[str] | None) -> Iterator[InputLine]:
        number = first
        for path, runs in groupby(self.runs, key=lambda run: run.path):
            with ArrowFile(path) as file:
                for run in runs:
                    batch = file.batch(run.place).slice(run.start, run.count)
                    yield from as_lines(source, number, batch, keys)
                    number += run.count


@dataclass(frozen=True, slots=True)
class CarriedRows:
    """Rows themselves, as the bytes of an Arrow stream with one batch; and the names of columns left behind."""

    stream: bytes
    unread: tuple[str, ...]

    def lines(self, source: Path, first: int, keys: Collection[str] | None) -> Iterator[InputLine]:
        with pa.ipc.open_stream(self.stream) as stream:
            yield from as_lines(source, first, stream.read_next_batch(), keys, self.unread)


def as_lines(
    source: Path, first: int, batch: pa.RecordBatch, keys: Collection[str] | None, left_behind: Sequence[str] = ()
) -> Iterator[InputLine]:
    read, unread = shared(batch.schema.names, keys)
    is_clean = not any(map(holds_json, batch.schema.types))  # Arrow's own text is UTF-8, which holds no surrogate
    for number, row in enumerate(rows_of(batch, read, [*left_behind, *unread]), start=first):
        if isinstance(row, Exception):
            fault = row if isinstance(row, LeftOut) else LeftOut("unreadable value", str(row))
            yield InputLine(source, number, None, fault)
        else:
            yield as_input_line(source, number, row, is_clean=is_clean)


def arrow_chunks(paths: Iterable[Path]) -> Iterator[tuple[int, int, ArrowRows]]:
    """All rows of Arrow files in order: the number of the first row, how many, and where they lie."""
    return packed(chain.from_iterable(map(runs_of, paths)))


def runs_of(path: Path) -> Iterator[tuple[Run, float]]:
    """The rows of an Arrow file in order, and the share of a chunk that each run fills."""
    with ArrowFile(path) as file:
        for place, batch in file.places():
            step = step_of(batch)
            for start in range(0, batch.num_rows, step):
                count = min(step, batch.num_rows - start)
                yield Run(path, place, start, count), count / step


def step_of(batch: pa.RecordBatch) -> int:
    return rows_at_once(batch.get_total_buffer_size(), batch.num_rows)


def packed(runs: Iterable[tuple[Run, float]]) -> Iterator[tuple[int, int, ArrowRows]]:
    """Runs put together to whole chunks: the number of the first row, how many rows, and where they lie."""
    held: list[Run] = []
    filled, first = 0.0, 1
    for run, share in runs:
        if held and filled + share > 1:
            num_held = sum(run.count for run in held)
            yield first, num_held, ArrowRows(tuple(held))
            first, held, filled = first + num_held, [], 0.0
        held.append(run)
        filled += share
    if held:
        yield first, sum(run.count for run in held), ArrowRows(tuple(held))


def dataset_chunks(saved: SavedDataset) -> Iterator[tuple[int, int, ArrowRows]]:
    """All rows of a saved dataset, of one with an index over its rows in the index's order."""
    return packed(indexed_runs(saved)) if saved.indices else arrow_chunks(saved.data)


def indexed_runs(saved: SavedDataset) -> Iterator[tuple[Run, float]]:
    """The rows that the index names, in its order; neighbours in one batch stay one run.

    Raises UserError for an index that is no single column of row numbers, or that names a row that is not there.
    """
    batches: list[tuple[Path, int, int]] = []
    starts = [0]
    for path in saved.data:
        with ArrowFile(path) as file:
            for place, batch in file.places():
                batches.append((path, place, step_of(batch)))
                starts.append(starts[-1] + batch.num_rows)
    bounds = np.array(starts)  # [number of batches + 1]
    for path in saved.indices:
        for rows in index_rows(path):
            if not rows.size:
                continue
            if not 0 <= rows.min() <= rows.max() < bounds[-1]:
                outside = rows.min() if rows.min() < 0 else rows.max()
                raise broken(path, f"rows 0..{bounds[-1] - 1}", ValueError(f"it names row {outside}"))
            owners = np.searchsorted(bounds, rows, side="right") - 1
            breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(owners) != 0)) + 1
            for begin, end in pairwise([0, *breaks.tolist(), len(rows)]):
                data, place, step = batches[owners[begin]]
                for start in range(begin, end, step):
                    count = min(step, end - start)
                    yield Run(data, place, int(rows[start] - bounds[owners[begin]]), count), count / step


def index_rows(path: Path) -> Iterator[np.ndarray]:
    with ArrowFile(path) as file:
        for _, batch in file.places():
            if batch.num_columns != 1 or not pa.types.is_integer(batch.schema.types[0]) or batch[0].null_count:
                raise broken(path, "one column of row numbers", ValueError(f"its columns are {batch.schema.names}"))
            yield batch[0].to_numpy(zero_copy_only=False).astype(np.int64)


def parquet_chunks(path: Path, keys: Collection[str] | None) -> Iterator[tuple[int, int, CarriedRows]]:
    """All rows of a Parquet file in order, of the columns `keys` (None: all), a chunk at a time."""
    first = 1
    with parquet_file(path, buffer_size=2**20, pre_buffer=False) as file:  # which would keep the whole file
        read, unread = shared(file.schema_arrow.names, keys)
        step = rows_at_once(parquet_bytes(file.metadata), file.metadata.num_rows)
        for batch in file.iter_batches(batch_size=step, columns=read):
            sink = pa.BufferOutputStream()
            slimmed = slim(batch)
            with pa.ipc.new_stream(sink, slimmed.schema) as stream:
                stream.write_batch(slimmed)
            yield first, batch.num_rows, CarriedRows(sink.getvalue().to_pybytes(), tuple(unread))
            first += batch.num_rows


def parquet_bytes(metadata: pq.FileMetaData) -> int:
    """About what all rows take in memory: equal and small numbers are packed tightly in the file."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    return sum(max(column.total_uncompressed_size, 8 * column.num_values) for column in columns)


@contextmanager
def parquet_file(path: Path, **options: Any) -> Iterator[pq.ParquetFile]:
    """Raises UserError for a file without a Parquet file's end, and as `check_names` does."""
    try:
        with pa.OSFile(os.fsencode(path)) as source, named_in_utf8(path, source, **options) as file:
            check_names(path, file.schema_arrow)
            yield file
    except (pa.ArrowException, OSError) as error:
        raise broken(path, "a whole Parquet file", error) from error


def named_in_utf8(path: Path, source: pa.NativeFile, **options: Any) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(source, **options)
    except UnicodeDecodeError as error:
        raise odd_name(path, error) from error


def check_arrow(path: Path) -> None:
    """Raises UserError for a file that is not Arrow from its beginning to its end."""
    with ArrowFile(path) as file:
        file.check_end()


def check_parquet(path: Path) -> None:
    """Raises UserError as `parquet_file` does."""
    with parquet_file(path):
        pass


def rows_at_once(num_bytes: int, num_rows: int) -> int:
    return max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE * num_rows // max(num_bytes, 1)))
