"""Small Arrow files with a checksum over every byte of the file, carried in the file itself.

Arrow IPC has no checksum of its own: a flipped bit is read as data (measured, `docs/store-format.md`).
The schema metadata holds `checksum = crc32c:XXXXXXXX`; the digits are the crc32c of the whole file
with those eight digits (they occur twice, in schema and footer) taken as zeros.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa

from .. import UserError
from .files import publish

CHECKSUM_KEY = "checksum"
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
        buffer = pa.memory_map(str(path)).read_buffer()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{str(path)!r} does not exist", "a complete store", "run the same extract again") from error
    data = memoryview(buffer)
    if not is_intact(data, [(match[1], match.start(1)) for match in PATTERN.finditer(data)]):
        raise damaged(path, f"its {len(buffer)} bytes do not match their checksum")
    reader = pa.ipc.open_file(buffer)
    metadata = {key.decode(): value.decode() for key, value in (reader.schema.metadata or {}).items()}
    if not reader.schema.remove_metadata().equals(schema.remove_metadata()):
        raise damaged(path, f"its columns are {', '.join(reader.schema.names)}, not {', '.join(schema.names)}")
    return reader.read_all().replace_schema_metadata(None), metadata


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
        crc = google_crc32c.extend(google_crc32c.extend(crc, array[start : max(start, offset)]), filling)
        start = offset + size
    return google_crc32c.extend(crc, array[start:])


def damaged(path: Path, reason: str) -> UserError:
    return UserError(
        f"{str(path)!r} is damaged: {reason}",
        "the bytes that were written",
        "copy the file again, or delete it and give the same extract again, which redoes what it stood for",
    )
