"""The user's files, read line by line: JSONL, JSON, Parquet, saved `datasets` folders.

Knows bytes and file formats, not what a line means. Every input line comes out once, either
with its value or with the reason why it cannot be read; a file that is broken as a whole is
the user's to mend.
"""

import glob
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .. import UserError
from .tables import dataset_files, is_dataset, read_arrow_streams, read_parquet

FORMATS = ".jsonl, .json, .parquet (.jsonl and .json also as .gz), or a folder written by datasets' save_to_disk"
BOM = b"\xef\xbb\xbf"
WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")
SURROGATE = re.compile(r"[\ud800-\udfff]")
REPLACEMENT = "\ufffd"
MAX_DEPTH = 100
"""Deepest nesting of a line's value: well within what parsers, printers and templates of Python follow."""


class LeftOut(Exception):
    """Why an input line gives no sample: a reason that is counted, and what was seen."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class InputLine:
    """One line or record. `number` counts from 1: the physical line, or the record's place."""

    source: Path
    number: int
    value: dict[str, Any] | None
    fault: LeftOut | None = None
    num_replaced: int = 0
    """Lone surrogates that became U+FFFD."""


def find_sources(inputs: Sequence[str]) -> list[Path]:
    """Files and folders in the order given, the matches of a glob sorted.

    Raises UserError for a path that is not there, a glob without a match, or a file named twice.
    """
    found: list[Path] = []
    for given in inputs:
        try:
            path = Path(given).expanduser()
            matches = [path] if path.exists() else [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
        except (OSError, RuntimeError, ValueError) as error:
            raise unreadable(given, error) from error
        if not matches:
            raise UserError(f"input {given!r} does not exist", FORMATS, "check the path")
        found += matches
    if not found:
        raise UserError("no input was given", FORMATS, "name at least one file")
    resolved = [os.path.realpath(path) for path in found]
    twice = [path for i, path in enumerate(found) if resolved[i] in resolved[:i]]
    if twice:
        raise UserError(f"input {str(twice[0])!r} is named twice", "each file once", "drop one of the two")
    return found


def short_names(sources: Sequence[Path]) -> list[str]:
    """The shortest endings of the paths that tell them apart; moving all of them changes none."""
    parts = [path.absolute().parts for path in sources]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in sources]


def unreadable(path: Path | str, error: Exception) -> UserError:
    """For a file that the system does not hand out: its rights, its name, its disk."""
    reason = getattr(error, "strerror", None) or error
    name = str(path) if len(str(path)) <= 200 else f"{str(path)[:197]}..."
    return UserError(
        f"input {name!r} cannot be read: {reason}", "a whole file that you may read", "check path and rights"
    )


def check_formats(sources: Sequence[Path]) -> None:
    """Raises UserError for a file or folder that `read_lines` cannot read."""
    for path in sources:
        try:
            is_known = is_readable(path)
        except OSError as error:
            raise unreadable(path, error) from error
        if not is_known:
            raise UserError(f"input {str(path)!r} has a format that is not read", FORMATS, "convert it to JSONL")


def is_readable(path: Path) -> bool:
    return is_dataset(path) if path.is_dir() else plain_suffix(path) in (".jsonl", ".ndjson", ".json", ".parquet")


def plain_suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def source_sha256(path: Path) -> str:
    """sha256 of the bytes of a file, or of all data files of a dataset folder in their order."""
    digest = hashlib.sha256()
    for part in dataset_files(path) if path.is_dir() else [path]:
        try:
            with part.open("rb") as file:
                while block := file.read(2**20):
                    digest.update(block)
        except OSError as error:
            raise unreadable(part, error) from error
    return digest.hexdigest()


def read_lines(path: Path, keys: Collection[str] | None = None) -> Iterator[InputLine]:
    """Every input line of one source; blank lines are none. Of tables only the columns `keys` are read.

    Raises UserError when the file as a whole is broken (a cut gzip, a JSON array that does not
    parse, a Parquet file without its end).
    """
    if path.is_dir():
        records = read_arrow_streams(path, keys)
    elif plain_suffix(path) == ".parquet":
        records = read_parquet(path, keys)
    else:
        yield from read_json(path)
        return
    for number, value in enumerate(records, start=1):
        if isinstance(value, Exception):
            yield InputLine(path, number, None, LeftOut("unreadable value", str(value)))
        else:
            yield InputLine(path, number, value)


def read_json(path: Path) -> Iterator[InputLine]:
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            if plain_suffix(path) == ".json":
                yield from read_json_document(path, file.read())
            else:
                yield from read_jsonl(path, file)
    except PermissionError as error:
        raise unreadable(path, error) from error
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(f"input {str(path)!r} cannot be read: {error}", "a whole file", "copy it again") from error


def read_jsonl(path: Path, file: BinaryIO | gzip.GzipFile) -> Iterator[InputLine]:
    """Lines end at LF alone, so that U+2028 and others inside a string do not cut it; CR is space."""
    for number, raw in enumerate(file, start=1):
        if number == 1:
            refuse_utf16(path, raw)
        raw = raw.removeprefix(BOM).strip()
        if raw:
            yield parse_line(path, number, raw)


def refuse_utf16(path: Path, raw: bytes) -> None:
    if raw.startswith(WIDE_BOMS):
        raise UserError(f"input {str(path)!r} is UTF-16", "UTF-8", "convert it, as with `iconv -f utf-16 -t utf-8`")


def read_json_document(path: Path, raw: bytes) -> Iterator[InputLine]:
    """A file named .json: an array of lines, one object, or JSONL under the wrong name."""
    refuse_utf16(path, raw)
    raw = raw.removeprefix(BOM).strip()
    if not raw:
        return
    try:
        document = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        if raw.startswith(b"[") or b"\n" not in raw:
            raise UserError(
                f"input {str(path)!r} is not JSON: {error}", "a JSON array of lines, or JSONL", "mend the file"
            ) from error
        for number, line in enumerate(raw.split(b"\n"), start=1):
            if line.strip():
                yield parse_line(path, number, line.strip())
        return
    for number, value in enumerate(document if isinstance(document, list) else [document], start=1):
        yield as_input_line(path, number, value)


def parse_line(path: Path, number: int, raw: bytes) -> InputLine:
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return InputLine(path, number, None, LeftOut("not UTF-8", str(error)))
    except (ValueError, RecursionError) as error:
        return InputLine(path, number, None, LeftOut("not JSON", str(error)))
    return as_input_line(path, number, value)


def as_input_line(path: Path, number: int, value: Any) -> InputLine:
    """Lone surrogates, which are no text and no tokenizer takes, become U+FFFD and are counted."""
    if not isinstance(value, dict):
        return InputLine(path, number, None, LeftOut("not an object", f"a JSON {type(value).__name__}"))
    try:
        value, num_replaced = without_surrogates(value)
    except LeftOut as fault:
        return InputLine(path, number, None, fault)
    return InputLine(path, number, value, None, num_replaced)


def without_surrogates(value: Any, depth: int = 0) -> tuple[Any, int]:
    """The same JSON value with every lone surrogate as U+FFFD, and how many there were.

    Raises LeftOut for a value nested deeper than MAX_DEPTH.
    """
    if isinstance(value, str):
        return SURROGATE.subn(REPLACEMENT, value) if SURROGATE.search(value) else (value, 0)
    if depth > MAX_DEPTH:
        raise LeftOut("nested too deeply", f"lists and objects may lie {MAX_DEPTH} deep")
    if isinstance(value, list):
        if all(isinstance(item, int) for item in value):
            return value, 0
        items = [without_surrogates(item, depth + 1) for item in value]
        return [item for item, _ in items], sum(count for _, count in items)
    if isinstance(value, dict):
        pairs = [(without_surrogates(key), without_surrogates(item, depth + 1)) for key, item in value.items()]
        return {key: item for (key, _), (item, _) in pairs}, sum(a + b for (_, a), (_, b) in pairs)
    return value, 0
