"""The user's files, read line by line: JSONL, JSON, Parquet, Arrow, saved `datasets` folders, standard input.

Knows which file is read how, not what a line means. Every input line comes out once, either with its value or
with the reason why it cannot be read; a file that is broken as a whole is the user's to mend. Reading has two
halves: `chunks` cuts a source cheaply in one process, `lines_in` parses a chunk in any other.
"""

import glob
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

from ... import UserError
from .byte_streams import COMPRESSIONS, SNIFFED_BYTES, format_of_bytes, opened, unreadable
from .dataset_folders import dataset_files, is_dataset, saved_datasets
from .json_lines import InputLine
from .json_lines import LeftOut as LeftOut
from .line_files import json_document, raw_lines
from .standard_input import STDIN_NAME, spooled_stdin
from .tables import arrow_chunks, check_arrow, check_parquet, dataset_chunks, parquet_chunks

FORMATS = (
    ".jsonl or .json (also as .gz or .zst), .parquet, .arrow, .feather, a folder with such files, "
    "or one written by datasets' save_to_disk"
)
KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
STDIN = "-"


class Piece(Protocol):
    def lines(self, source: Path, first: int, keys: Collection[str] | None) -> Iterator[InputLine]: ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of one source's lines, to be parsed wherever it is sent: it can be pickled."""

    source: Path
    first: int
    """The number of its first physical line, or record."""
    num_lines: int
    """Blank lines are none."""
    piece: Piece

    def head(self, num_lines: int) -> "Chunk":
        """Its first lines."""
        return replace(self, num_lines=min(num_lines, self.num_lines))


@contextmanager
def opened_sources(inputs: Sequence[str]) -> Iterator[list[Path]]:
    """The sources of `find_sources`, where `-` is standard input: plain or compressed, lines or JSON or a table.

    It lies in a temporary file while the context lasts. Raises UserError as `find_sources` and `spooled_stdin` do.
    """
    if STDIN not in inputs:
        yield find_sources(inputs)
        return
    with spooled_stdin() as path:
        yield find_sources([str(path) if given == STDIN else given for given in inputs])


def find_sources(inputs: Sequence[str]) -> list[Path]:
    """Files and dataset folders in the order given; those that a pattern or a folder stands for sorted.

    A folder that is no saved dataset, like a glob (`**` reaches any depth), stands for all files below it that
    are of a format that is read, and for saved datasets as a whole; hidden files and folders are passed over.
    A file that is named must be there, of whatever format. Raises UserError for a path that is not there, a folder
    or glob that finds nothing, a pipe, or a file named twice.
    """
    found = [path for given in inputs for path in sources_of(given)]
    if not found:
        raise UserError("no input was given", FORMATS, "name at least one file")
    seen: set[str] = set()
    for path in found:
        if (real := os.path.realpath(path)) in seen:
            raise UserError(f"input {str(path)!r} is named twice", "each file once", "drop one of the two")
        seen.add(real)
    return found


def sources_of(given: str) -> list[Path]:
    try:
        path = Path(given).expanduser()
        if path.is_dir() and not is_dataset(path):
            matches = readable_among(sorted(path.rglob("*")), below=path)
        elif path.exists():
            if not (path.is_file() or path.is_dir()):
                raise UserError(f"input {given!r} is a pipe or a device", FORMATS, "pipe it in, with - as input")
            return [path]
        else:
            found = sorted(glob.glob(str(path), recursive=True))
            matches = readable_among(map(Path, found), below=None)
            if not found:
                raise UserError(f"input {given!r} does not exist", FORMATS, "check the path")
    except (OSError, RuntimeError, ValueError) as error:
        raise unreadable(given, error) from error
    if not matches:
        raise UserError(f"input {given!r} holds no file of a format that is read", FORMATS, "convert to JSONL")
    return matches


def readable_among(paths: Iterable[Path], below: Path | None) -> list[Path]:
    """Dataset folders and files of known formats, without what lies inside those folders or is hidden."""
    kept: list[Path] = []
    folders: set[Path] = set()
    for path in paths:
        inner = path.relative_to(below).parts if below else ()
        if any(part.startswith(".") for part in inner) or not folders.isdisjoint(path.parents):
            continue
        if path.is_dir() and is_dataset(path):
            folders.add(path)
            kept.append(path)
        elif path.is_file() and kind_of(path):
            kept.append(path)
    return kept


def short_names(sources: Sequence[Path]) -> list[str]:
    """The shortest endings of the paths that tell them apart; moving all of them changes none."""
    parts = [path.absolute().parts for path in sources]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in sources]


def kind_of(path: Path) -> tuple[str, str] | None:
    """How a source is read, and its compression; None for what is not read. Raises OSError."""
    if path.is_dir():
        return ("dataset", "") if is_dataset(path) else None
    if path.name == STDIN_NAME:
        with path.open("rb") as file:
            found = format_of_bytes(file.read(SNIFFED_BYTES))
        kinds = {"Parquet": "parquet", "Arrow": "arrow"}
        return kinds.get(found, "json"), found if found in COMPRESSIONS.values() else ""
    compression = COMPRESSIONS.get(path.suffix.lower(), "")
    kind = KINDS.get((Path(path.stem) if compression else path).suffix.lower())
    if kind is None or (compression and kind in ("parquet", "arrow")):
        return None
    return kind, compression


def known_kind(path: Path) -> tuple[str, str]:
    """`kind_of` a source that is read. Raises UserError for any other."""
    try:
        found = kind_of(path)
    except OSError as error:
        raise unreadable(path, error) from error
    if found is None:
        raise UserError(f"input {str(path)!r} has a format that is not read", FORMATS, "convert it to JSONL")
    return found


def check_formats(sources: Sequence[Path]) -> None:
    """Raises UserError for a source that `chunks` cannot read, as far as its beginning (or index) tells."""
    for path in sources:
        kind, compression = known_kind(path)
        if kind == "dataset":
            for part in dataset_files(path):
                check_arrow(part)
        elif kind == "parquet":
            check_parquet(path)
        elif kind == "arrow":
            check_arrow(path)
        else:
            with opened(path, compression):
                pass


def source_files(path: Path) -> list[Path]:
    """The file itself, or all data files of a dataset folder in their order."""
    return dataset_files(path) if path.is_dir() else [path]


def source_sha256(path: Path) -> str:
    """sha256 of the bytes of all `source_files`."""
    digest = hashlib.sha256()
    for part in source_files(path):
        try:
            with part.open("rb") as file:
                while block := file.read(2**20):
                    digest.update(block)
        except OSError as error:
            raise unreadable(part, error) from error
    return digest.hexdigest()


def sources_facts(sources: Sequence[Path]) -> list[dict[str, str]]:
    """What tells the inputs of a run from any others: short names and contents, in their order."""
    return [{"name": name, "sha256": source_sha256(path)} for name, path in zip(short_names(sources), sources)]


def chunks(path: Path, keys: Collection[str] | None = None) -> Iterator[Chunk]:
    """One source in chunks of about 1 MiB of text or at most 256 rows; of Parquet only the columns `keys`.

    Raises UserError when the file as a whole is broken (a cut .gz, a JSON array that does not parse, a Parquet file
    without its end), at the chunk where that shows.
    """
    kind, compression = known_kind(path)
    if kind == "dataset":
        found = dataset_chunks(saved_datasets(path))
    elif kind == "parquet":
        found = parquet_chunks(path, keys)
    elif kind == "arrow":
        found = arrow_chunks([path])
    else:
        found = text_chunks(path, kind, compression)
    return (Chunk(path, first, num_lines, piece) for first, num_lines, piece in found)


def text_chunks(path: Path, kind: str, compression: str) -> Iterator[tuple[int, int, Piece]]:
    with opened(path, compression) as file:
        yield from json_document(path, file) if kind == "json" else raw_lines(file)


def lines_in(chunk: Chunk, keys: Collection[str] | None = None) -> list[InputLine]:
    """The parsed lines of a chunk; of tables only the columns `keys` are read (None: all)."""
    return list(islice(chunk.piece.lines(chunk.source, chunk.first, keys), chunk.num_lines))


def read_lines(path: Path, keys: Collection[str] | None = None) -> Iterator[InputLine]:
    """Every input line of one source; blank lines are none. Of tables only the columns `keys` are read.

    Raises UserError when the file as a whole is broken.
    """
    for chunk in chunks(path, keys):
        yield from lines_in(chunk, keys)
