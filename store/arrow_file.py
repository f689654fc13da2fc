"""Small Arrow files with a checksum over every byte of the file, carried in the file itself.

Arrow IPC has no checksum of its own: a flipped bit is read as data (measured, `docs/store-format.md`).
The schema metadata holds `checksum = crc32c:XXXXXXXX`; the digits are the crc32c of the whole file
with those eight digits (they occur twice, in schema and footer) taken as zeros.
"""

import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from .. import UserError
from .checksum import crc32c
from .files import publish, unreadable

CHECKSUM_KEY = "checksum"
PREFIX = b"crc32c:"
DIGITS = re.compile(rb"[0-9a-f]{8}")
PATTERN = re.compile(rb"crc32c:([0-9a-f]{8})")
UNKNOWN = "crc32c:00000000"
OCCURRENCES = 2


def write_table(
    path: Path,
    table: pa.Table,
    metadata: Mapping[str, str],
    *,
    explain: Callable[[OSError, Path], UserError] | None = None,
) -> None:
    """Publishes a table with text metadata and its checksum; the same input gives the same bytes."""
    if any(PATTERN.search(f"{key}\0{value}".encode()) for key, value in metadata.items()):
        raise ValueError(f"metadata {metadata} holds text that looks like the checksum")
    sink = pa.BufferOutputStream()
    schema = table.schema.with_metadata({**metadata, CHECKSUM_KEY: UNKNOWN})
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(table.replace_schema_metadata(schema.metadata).combine_chunks())
    data = sink.getvalue().to_pybytes()
    places = [match.start(1) for match in PATTERN.finditer(data)]
    digits = f"crc32c:{checksum(memoryview(data), places):08x}".encode()
    publish(path, PATTERN.sub(digits, data), explain=explain)


def read_table(path: Path, schema: pa.Schema) -> tuple[pa.Table, dict[str, str]]:
    """The checked table and its metadata; UserError names the file where a bit of it changed."""
    try:
        data = map_file(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{str(path)!r} does not exist", "a complete store", "run the same extract again") from error
    except OSError as error:
        raise unreadable(error, path) from error
    if not is_intact(memoryview(data), list(written_checksums(data))):
        raise damaged(path, f"its {len(data)} bytes do not match their checksum")
    reader = pa.ipc.open_file(pa.py_buffer(data))
    metadata = {key.decode(): value.decode() for key, value in (reader.schema.metadata or {}).items()}
    if not reader.schema.remove_metadata().equals(schema.remove_metadata()):
        raise damaged(path, f"its columns are {', '.join(reader.schema.names)}, not {', '.join(schema.names)}")
    return reader.read_all().replace_schema_metadata(None), metadata


def map_file(path: Path) -> mmap.mmap | bytes:
    """The bytes of a file, mapped: nothing is copied, and pages in the cache cost no fault each."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if os.fstat(fd).st_size == 0:
            return b""
        return mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def written_checksums(data: mmap.mmap | bytes) -> Iterator[tuple[bytes, int]]:
    """The checksums in schema and footer, with the places of their digits; the columns are not searched.

    Arrow writes: magic (8 bytes), marker (4), schema length (4), schema, ..., footer, footer length (4), magic (6).
    """
    size = len(data)
    head, foot = int.from_bytes(data[12:16], "little"), int.from_bytes(data[-10:-6], "little")
    for first, last in ((0, min(size, 16 + head)), (max(0, size - 10 - foot), size)):
        while (first := data.find(PREFIX, first, last)) >= 0:
            first += len(PREFIX)
            if DIGITS.fullmatch(data[first : first + 8]):
                yield data[first : first + 8], first


def is_intact(data: memoryview, found: Sequence[tuple[bytes, int]], left_out: Sequence[tuple[int, int]] = ()) -> bool:
    """True where the digits found (with their offsets) occur as often as they should and are right."""
    digits = {digit for digit, _ in found}
    return (
        len(found) == OCCURRENCES
        and len(digits) == 1
        and checksum(data, [place for _, place in found], left_out) == int(digits.pop(), 16)
    )


def checksum(data: memoryview, places: Sequence[int], left_out: Sequence[tuple[int, int]] = ()) -> int:
    """crc32c of a file with the eight digits at `places` taken as zeros, ranges (offset, bytes) left out."""
    array = np.frombuffer(data, dtype=np.uint8)
    holes = [(place, 8, b"0" * 8) for place in places] + [(offset, size, b"") for offset, size in left_out]
    crc, start = 0, 0
    for offset, size, filling in sorted(holes):
        crc = crc32c(filling, crc32c(array[start : max(start, offset)], crc))
        start = offset + size
    return crc32c(array[start:], crc)


def damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"{str(path)!r} is damaged: {reason}",
        "the bytes that were written",
        "copy the file again; `dflash verify STORE --repair` says what the same extract can redo",
    )
