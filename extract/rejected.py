"""rejected.parquet: what of the input lines is in no sample, with its place and why.

Each row says of `what` it speaks: a `line` that gave no sample; a `turn` (an answer) or a `sample` of a used line
that was left out; or a `note` of what was changed. So lines in = lines used + the rows of lines.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .lines.inputs import LeftOut

REJECTED_NAME = "rejected.parquet"
ROWS_AT_ONCE = 10_000
DETAIL_CHARACTERS = 300
LINE, TURN, SAMPLE, NOTE = "line", "turn", "sample", "note"
SCHEMA = pa.schema(
    [
        pa.field("source", pa.string(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
        pa.field("id", pa.string()),
        pa.field("what", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)


class RejectedWriter:
    """Streams rows into the file; an empty list is a file without rows."""

    def __init__(self, folder: Path) -> None:
        self.writer = pq.ParquetWriter(folder / REJECTED_NAME, SCHEMA, compression="zstd")
        self.rows: list[dict[str, object]] = []

    def add(self, source: str, line: int, name: str | None, what: str, fault: LeftOut) -> None:
        """`name` is the line's own id as text, for the user's eyes only: it identifies nothing."""
        detail = fault.detail[:DETAIL_CHARACTERS]
        values = (source, line, name, what, fault.reason, detail)
        self.rows.append(dict(zip(SCHEMA.names, values, strict=True)))
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
        else:
            with suppress(OSError):  # a disk that fails at the end of the list too hides nothing
                self.writer.close()


def rejected_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of a DATA folder's list, in the order of the input. Raises OSError or ValueError where it is broken."""
    with pq.ParquetFile(folder / REJECTED_NAME) as file:
        for batch in file.iter_batches(ROWS_AT_ONCE):
            yield from batch.to_pylist()


def read_rejected(folder: Path, what: str | None = None) -> list[dict[str, Any]]:
    """All of those rows at once, or those of one kind."""
    return [row for row in rejected_rows(folder) if what in (None, row["what"])]


def count_rejected(folder: Path) -> Counter[str]:
    """The number of rows of each kind. Raises OSError or ValueError where the list is broken."""
    counted: Counter[str] = Counter()
    with pq.ParquetFile(folder / REJECTED_NAME) as file:
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=["what"]):
            counted.update(batch.column("what").to_pylist())
    return counted
