"""One Arrow file, entered at any of its record batches: a stream or an IPC file, as its content says.

Knows pyarrow's messages and maps; knows nothing of rows and columns.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pyarrow as pa

from ... import UserError

IPC_MAGIC = b"ARROW1"
IPC_STREAM_START = 8
"""Where the stream inside of an IPC file begins: its magic, padded."""
END = b"\xff\xff\xff\xff\0\0\0\0"
OLD_END = b"\0\0\0\0"
"""The end of a stream as it is written now, and before Arrow 0.15. A writer that was killed leaves none."""
FOOTER_END_BYTES = 4 + len(IPC_MAGIC)
"""What follows the footer of an IPC file: its length, int32, and the magic."""
PLACES = ("ffset", "ictionary indices")
"""How Arrow speaks of places in its errors: offsets into texts and lists, indices of dictionaries."""
EXPECTED = "a whole Arrow stream or file, and nothing behind it"


class ArrowFile:
    """A mapped Arrow file, for as long as the context lasts. Raises UserError where it is broken.

    The place of a record batch is its byte offset in a stream, its number in an IPC file; and its number too in a
    stream with dictionaries, which stand anywhere before the batches that use them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Self:
        try:
            self.mapped = pa.memory_map(os.fsencode(self.path))
            is_file = self.mapped.read(len(IPC_MAGIC)) == IPC_MAGIC
            self.mapped.seek(0)
            self.file = pa.ipc.open_file(self.mapped) if is_file else None
            self.schema = self.file.schema if self.file else pa.ipc.read_schema(self.mapped)
            self.whole: list[pa.RecordBatch] | None = None
            if not self.file and any(has_dictionary(field.type) for field in self.schema):
                self.mapped.seek(0)
                self.whole = list(pa.ipc.open_stream(self.mapped))
        except (pa.ArrowException, OSError) as error:
            raise broken(self.path, EXPECTED, error) from error
        check_names(self.path, self.schema)
        return self

    def __exit__(self, *_: object) -> None:
        self.mapped.close()

    def places(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The place of each record batch in order, and the batch. Raises UserError as `check_end` and `checked` do."""
        try:
            if self.file or self.whole is not None:
                self.check_end()
            if self.file:
                for number in range(self.file.num_record_batches):
                    yield number, checked(self.file.get_batch(number))
            elif self.whole is not None:
                yield from enumerate(map(checked, self.whole))
            else:
                for start, message in self.messages():
                    if message.type == "record batch":
                        yield start, checked(pa.ipc.read_record_batch(message, self.schema))
        except (pa.ArrowException, OSError) as error:
            raise broken(self.path, EXPECTED, error) from error

    def check_end(self) -> None:
        """Raises UserError for a file that breaks off between two batches, or that is several files put together."""
        try:
            if self.file:
                self.check_footer()
            else:
                for _ in self.messages():
                    pass
        except (pa.ArrowException, OSError) as error:
            raise broken(self.path, EXPECTED, error) from error

    def messages(self) -> Iterator[tuple[int, pa.Message]]:
        """Each message of a stream, and the byte it begins at. Raises ArrowInvalid where the stream's end is not the
        file's."""
        end = 0
        for start, after, message in self.messages_from(0):
            yield start, message
            end = after
        self.mapped.seek(end)
        rest = self.mapped.read(len(END) + 1)
        if rest not in (END, OLD_END):
            more = rest.startswith((END, OLD_END))
            raise pa.ArrowInvalid(f"{'more follows its end' if more else 'it breaks off'} at byte {end}")

    def messages_from(self, start: int) -> Iterator[tuple[int, int, pa.Message]]:
        """Each message from a byte on, where it begins and where it ends, up to the end of a stream or of the file."""
        self.mapped.seek(start)
        reader = pa.ipc.MessageReader.open_stream(self.mapped)
        while (message := next(reader, None)) is not None:
            end = self.mapped.tell()
            yield start, end, message
            start = end

    def check_footer(self) -> None:
        """Raises ArrowInvalid for an IPC file whose footer does not follow its stream: it is another file's footer."""
        end = IPC_STREAM_START
        try:
            for _, after, _ in self.messages_from(IPC_STREAM_START):
                end = after
        except (pa.ArrowException, OSError):
            pass  # no end mark is asked for where a footer says what the file holds
        self.mapped.seek(end)
        if self.mapped.read(len(END)) != END:
            return
        end_of_footer = self.mapped.size() - FOOTER_END_BYTES
        self.mapped.seek(end_of_footer)
        footer_bytes = int.from_bytes(self.mapped.read(4), "little")
        if end + len(END) + footer_bytes != end_of_footer:
            raise pa.ArrowInvalid(f"more than its footer follows its end at byte {end}")

    def batch(self, place: int) -> pa.RecordBatch:
        try:
            if self.file:
                return self.file.get_batch(place)
            if self.whole is not None:
                return self.whole[place]
            self.mapped.seek(place)
            return pa.ipc.read_record_batch(pa.ipc.read_message(self.mapped), self.schema)
        except (pa.ArrowException, OSError) as error:
            raise broken(self.path, EXPECTED, error) from error


def checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch itself. Raises ArrowInvalid where it names places that it does not have: reading those is a crash.

    A value that is none, as text that is not UTF-8, costs its own row alone. Reads all of the batch: 60 MB of text in
    11 ms (measured here, 2026-11-30).
    """
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if any(what in str(error) for what in PLACES):
            raise
    return batch


def has_dictionary(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return True
    return any(has_dictionary(kind.field(i).type) for i in range(kind.num_fields))


def check_names(path: Path, schema: pa.Schema) -> None:
    """Raises UserError where two columns have one name, as a row could hold only one of them, or one is not UTF-8."""
    try:
        names = schema.names
    except UnicodeDecodeError as error:
        raise odd_name(path, error) from error
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UserError(
            f"input {str(path)!r} has {names.count(twice[0])} columns named {twice[0]!r}",
            "each name once",
            "rename or drop all but one",
        )


def odd_name(path: Path, error: UnicodeDecodeError) -> UserError:
    return UserError(
        f"input {str(path)!r} has a column whose name is not UTF-8: {error.object!r:.80}",
        "names in UTF-8",
        "rename the column",
    )


def broken(path: Path, expected: str, error: Exception) -> UserError:
    return UserError(f"input {str(path)!r} cannot be read: {error}".splitlines()[0], expected, "copy it again")
