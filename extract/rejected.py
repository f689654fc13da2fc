"""rejected.parquet: every input line that gave no sample, with its place and why."""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .lines.inputs import LeftOut

REJECTED_NAME = "rejected.parquet"
ROWS_AT_ONCE = 10_000
DETAIL_CHARACTERS = 300
SCHEMA = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
        pa.field("id", pa.string()),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)


class RejectedWriter:
    """Streams lines into the file; an empty list is a file without rows."""

    def __init__(self, folder: Path) -> None:
        self.writer = pq.ParquetWriter(folder / REJECTED_NAME, SCHEMA, compression="zstd")
        self.rows: list[dict[str, object]] = []

    def add(self, source: str, line: int, name: str | None, fault: LeftOut) -> None:
        """`name` is the line's own id as text, for the user's eyes only: it identifies nothing."""
        detail = fault.detail[:DETAIL_CHARACTERS]
        self.rows.append({"source": source, "line": line, "id": name, "reason": fault.reason, "detail": detail})
        if len(self.rows) == ROWS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        if self.rows:
            self.writer.write_table(pa.Table.from_pylist(self.rows, schema=SCHEMA))
            self.rows = []

    def __enter__(self) -> "RejectedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.flush()
        self.writer.close()


def rejected_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of a DATA folder's list, in the order of the input. Raises OSError or ValueError where it is broken."""
    with pq.ParquetFile(folder / REJECTED_NAME) as file:
        for batch in file.iter_batches(ROWS_AT_ONCE):
            yield from batch.to_pylist()


def read_rejected(folder: Path) -> list[dict[str, Any]]:
    """All of those rows at once."""
    return list(rejected_rows(folder))
