"""One Arrow file, entered at any of its record batches: a stream or an IPC file, as its content says.

Knows pyarrow's messages and maps; knows nothing of rows and columns.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pyarrow as pa

from ... import UserError

IPC_MAGIC = b"ARROW1"


class ArrowFile:
    """A mapped Arrow file, for as long as the context lasts. Raises UserError where it is broken.

    The place of a record batch is its byte offset in a stream, its number in an IPC file; and its number too in a
    stream with dictionaries, which stand anywhere before the batches that use them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Self:
        try:
            self.mapped = pa.memory_map(str(self.path))
            is_file = self.mapped.read(len(IPC_MAGIC)) == IPC_MAGIC
            self.mapped.seek(0)
            self.file = pa.ipc.open_file(self.mapped) if is_file else None
            self.schema = self.file.schema if self.file else pa.ipc.read_schema(self.mapped)
            self.whole: list[pa.RecordBatch] | None = None
            if not self.file and any(has_dictionary(field.type) for field in self.schema):
                self.mapped.seek(0)
                self.whole = list(pa.ipc.open_stream(self.mapped))
        except (pa.ArrowException, OSError) as error:
            raise broken(self.path, "an Arrow stream or file", error) from error
        return self

    def __exit__(self, *_: object) -> None:
        self.mapped.close()

    def places(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The place of each record batch in order, and the batch."""
        try:
            if self.file:
                for number in range(self.file.num_record_batches):
                    yield number, self.file.get_batch(number)
            elif self.whole is not None:
                yield from enumerate(self.whole)
            else:
                self.mapped.seek(0)
                reader = pa.ipc.MessageReader.open_stream(self.mapped)
                start = 0
                while (message := next(reader, None)) is not None:
                    end = self.mapped.tell()
                    if message.type == "record batch":
                        yield start, pa.ipc.read_record_batch(message, self.schema)
                    start = end
        except (pa.ArrowException, OSError) as error:
            raise broken(self.path, "an Arrow stream or file", error) from error

    def batch(self, place: int) -> pa.RecordBatch:
        try:
            if self.file:
                return self.file.get_batch(place)
            if self.whole is not None:
                return self.whole[place]
            self.mapped.seek(place)
            return pa.ipc.read_record_batch(pa.ipc.read_message(self.mapped), self.schema)
        except (pa.ArrowException, OSError) as error:
            raise broken(self.path, "an Arrow stream or file", error) from error


def has_dictionary(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return True
    return any(has_dictionary(kind.field(i).type) for i in range(kind.num_fields))


def broken(path: Path, expected: str, error: Exception) -> UserError:
    return UserError(f"input {str(path)!r} cannot be read: {error}".splitlines()[0], expected, "copy it again")
