"""The bytes of a text file, decompressed on the way, and refused where they are not what its name says.

Knows .gz (all members) and .zst (all frames), the first bytes of formats, and text that is not UTF-8. A file
whose end is missing is never a short one.
"""

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from ... import UserError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\xff\xff\xff\xff": "Arrow",
    b"FEA1": "Feather of the first version",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"version https://git-lfs": "a Git LFS pointer",
}
SKIPPABLE_FRAME = b"\x2a\x4d\x18"
"""Bytes 2-4 of a zstd frame without content, with which parallel compressors begin (RFC 8878, 3.1.2)."""
WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")
WIDE_ZEROS = ("0101", "1010", "0111", "1110")
"""Where zeros stand (1) among the first four bytes of ASCII text in UTF-16 and UTF-32, either end first."""
SNIFFED_BYTES = 32
TO_DO = {
    "gzip": "add .gz to its name",
    "zstd": "add .zst to its name",
    "Parquet": "name it .parquet",
    "Arrow": "name it .arrow",
    "a Git LFS pointer": "fetch the file itself, as with `git lfs pull`",
}


class Bytes(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


def format_of_bytes(head: bytes) -> str:
    """The name of the format whose first bytes these are, or an empty text."""
    if head[1:4] == SKIPPABLE_FRAME and head[0] >> 4 == 5:
        return "zstd"
    return next((name for magic, name in MAGIC.items() if head.startswith(magic)), "")


@contextmanager
def opened(path: Path, compression: str) -> Iterator[Bytes]:
    """The text of a file, with `compression` of COMPRESSIONS or none.

    Raises UserError, on entering or while it is read, for a file that cannot be read, is cut, or holds another
    format than UTF-8 text.
    """
    try:
        with path.open("rb") as file:
            check_head(path, file.read(SNIFFED_BYTES), compression)
        with decompressed(path, compression) as stream:
            if compression:
                check_head(path, stream.read(SNIFFED_BYTES), "")
        with decompressed(path, compression) as stream:
            yield stream
    except PermissionError as error:
        raise unreadable(path, error) from error
    except (EOFError, zlib.error, OSError, pa.ArrowException) as error:
        raise UserError(f"input {str(path)!r} cannot be read: {error}", "a whole file", "copy it again") from error


def decompressed(path: Path, compression: str) -> Any:
    if compression == "gzip":
        return gzip.open(path)
    if compression == "zstd":
        return pa.CompressedInputStream(pa.OSFile(os.fsencode(path)), "zstd")
    return path.open("rb")


def check_head(path: Path, head: bytes, compression: str) -> None:
    """Raises UserError where a file's first bytes are not those of the format that is expected there."""
    name, found = repr(str(path)), format_of_bytes(head)
    if compression and found != compression:
        seen = found or ("empty" if not head else "something else")
        raise UserError(f"input {name} is not {compression}, it is {seen}", "contents as the name says", "rename it")
    if found and not compression:
        raise UserError(f"input {name} is {found}, not text", "lines of JSON", TO_DO.get(found, "unpack it"))
    if not compression and is_wide(head):
        raise UserError(f"input {name} is UTF-16 or UTF-32", "UTF-8", "convert it, as with `iconv -f utf-16 -t utf-8`")


def is_wide(head: bytes) -> bool:
    """True for text of two or four bytes a character: its mark, or zeros around the first character."""
    zeros = "".join("01"[byte == 0] for byte in head[:4])
    return head.startswith(WIDE_MARKS) or zeros in WIDE_ZEROS


def unreadable(path: Path | str, error: Exception) -> UserError:
    """For a file that the system does not hand out: its rights, its name, its disk."""
    reason = getattr(error, "strerror", None) or error
    name = str(path) if len(str(path)) <= 200 else f"{str(path)[:197]}..."
    return UserError(
        f"input {name!r} cannot be read: {reason}", "a whole file that you may read", "check path and rights"
    )
