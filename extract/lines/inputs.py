"""The user's files, read line by line: JSONL, JSON, Parquet, Arrow, saved `datasets` folders, standard input.

Knows how each is read, neither which files a command line names nor what a line means. Every input line comes out
once, either with its value or with the reason why it cannot be read; a file that is broken as a whole is the user's to
mend. Reading has two halves: `chunks` cuts a source cheaply in one process, `lines_in` parses a chunk in any other.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

from ... import UserError
from .byte_streams import opened, unreadable
from .dataset_folders import dataset_files, is_held_out, saved_dataset
from .files_found import STDIN, find_sources, known_kind, short_names
from .json_lines import InputLine
from .json_lines import LeftOut as LeftOut
from .line_files import json_document, raw_lines
from .standard_input import spooled_stdin
from .tables import arrow_chunks, check_arrow, check_parquet, dataset_chunks, parquet_chunks


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
    split: str | None = None
    """What a line without a split of its own is given: its source says so."""

    def head(self, num_lines: int) -> "Chunk":
        """Its first lines."""
        return replace(self, num_lines=min(num_lines, self.num_lines))


@contextmanager
def opened_sources(inputs: Sequence[str]) -> Iterator[list[Path]]:
    """The sources of `find_sources`, where `-` is standard input: plain or compressed, lines or JSON or a table.

    It lies in a temporary file while the context lasts. Raises UserError as `find_sources` and `spooled_stdin` do;
    one that the context raises names standard input `-`.
    """
    if STDIN not in inputs:
        yield find_sources(inputs)
        return
    with spooled_stdin() as path:
        try:
            yield find_sources([str(path) if given == STDIN else given for given in inputs])
        except UserError as error:
            for name in ("happened", "expected", "advice"):
                setattr(error, name, getattr(error, name).replace(str(path), STDIN))
            raise


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
    """What tells the inputs of a run from any others: short names, contents and a `split`, in their order."""
    facts = [{"name": name, "sha256": source_sha256(path)} for name, path in zip(short_names(sources), sources)]
    splits = map(split_of_source, sources)
    return [fact | ({} if split is None else {"split": split}) for fact, split in zip(facts, splits)]


def chunks(path: Path, keys: Collection[str] | None = None) -> Iterator[Chunk]:
    """One source in chunks of about 1 MiB of text or at most 256 rows; of Parquet only the columns `keys`.

    Raises UserError when the file as a whole is broken (a cut .gz, a JSON array that does not parse, a Parquet file
    without its end), at the chunk where that shows.
    """
    kind, compression = known_kind(path)
    if kind == "dataset":
        found = dataset_chunks(saved_dataset(path))
    elif kind == "parquet":
        found = parquet_chunks(path, keys)
    elif kind == "arrow":
        found = arrow_chunks([path])
    else:
        found = text_chunks(path, kind, compression)
    split = split_of_source(path)
    return (Chunk(path, first, num_lines, piece, split) for first, num_lines, piece in found)


def split_of_source(path: Path) -> str | None:
    """The `split` of its lines that have none of their own: the test part of a saved dictionary is held out."""
    return "heldout" if is_held_out(path) else None


def text_chunks(path: Path, kind: str, compression: str) -> Iterator[tuple[int, int, Piece]]:
    with opened(path, compression) as file:
        yield from json_document(path, file) if kind == "json" else raw_lines(file)


def lines_in(chunk: Chunk, keys: Collection[str] | None = None) -> list[InputLine]:
    """The parsed lines of a chunk; of tables only the columns `keys` are read (None: all)."""
    lines = list(islice(chunk.piece.lines(chunk.source, chunk.first, keys), chunk.num_lines))
    for line in lines if chunk.split else ():
        if line.value is not None and line.value.get("split") is None:
            line.value["split"] = chunk.split
    return lines


def read_lines(path: Path, keys: Collection[str] | None = None) -> Iterator[InputLine]:
    """Every input line of one source; blank lines are none. Of tables only the columns `keys` are read.

    Raises UserError when the file as a whole is broken.
    """
    for chunk in chunks(path, keys):
        yield from lines_in(chunk, keys)
