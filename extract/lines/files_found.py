"""Which files a command line names: by name, by folder, by glob; and which of those found there are passed over.

Knows names and formats, not what a file holds: only standard input's format is told by its first bytes.
"""

import glob
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ... import UserError
from .byte_streams import COMPRESSIONS, SNIFFED_BYTES, format_of_bytes, unreadable
from .dataset_folders import is_dataset, parts_of
from .standard_input import STDIN_NAME

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


def find_sources(inputs: Sequence[str]) -> list[Path]:
    """Files and dataset folders in the order given; those that a pattern or a folder stands for sorted.

    A saved dictionary of datasets stands for its parts, each a source of its own.
    A folder that is no saved dataset, like a glob (`**` reaches any depth), stands for all files below it that
    are of a format that is read, and for saved datasets as a whole; hidden files and folders are passed over.
    A file that is named must be there, of whatever format. Raises UserError for a path that is not there, a link
    to nothing, a folder or glob that finds nothing, a pipe, a broken dictionary, or a file named twice.
    """
    found = [part for given in inputs for path in found_under(given)[0] for part in parts_of(path)]
    if not found:
        raise UserError("no input was given", FORMATS, "name at least one file")
    seen: set[str] = set()
    for path in found:
        if (real := os.path.realpath(path)) in seen:
            raise UserError(f"input {str(path)!r} is named twice", "each file once", "drop one of the two")
        seen.add(real)
    return found


def files_passed_over(inputs: Sequence[str]) -> Counter[str]:
    """How many files the folders and globs hold that are not read, by the end of their names.

    A folder that a glob names and does not enter, or that a link stands for, is one 'folder'. Hidden files and the
    other files of a saved dataset do not count.
    """
    return sum((found_under(given)[1] for given in inputs if given != STDIN), Counter[str]())


def found_under(given: str) -> tuple[list[Path], Counter[str]]:
    """The sources that one argument names, and what it passes over, as `files_passed_over` counts it."""
    if not given:
        raise UserError(f"input {given!r} is an empty name", FORMATS, "name a file or a folder, `.` for this one")
    try:
        path = Path(given).expanduser()
        if path.is_dir() and not is_dataset(path):
            matches, others = sorted_out(sorted(path.rglob("*")), below=path)
        elif path.exists():
            if not (path.is_file() or path.is_dir()):
                raise UserError(f"input {given!r} is a pipe or a device", FORMATS, "pipe it in, with - as input")
            return [path], Counter()
        else:
            found = sorted(glob.glob(str(path), recursive=True))
            matches, others = sorted_out(list(map(Path, found)), below=None)
            if not found:
                raise UserError(f"input {given!r} does not exist", FORMATS, "check the path")
    except (OSError, RuntimeError, ValueError) as error:
        raise unreadable(getattr(error, "filename", None) or given, error) from error
    if not matches:
        raise UserError(f"input {given!r} holds no file of a format that is read", FORMATS, "convert to JSONL")
    return matches, others


def sorted_out(paths: Sequence[Path], below: Path | None) -> tuple[list[Path], Counter[str]]:
    """Dataset folders and files of known formats, and the kinds of all others.

    What lies inside those folders or is hidden is neither. Raises UserError for a link to nothing by such a name,
    OSError for a folder that cannot be entered.
    """
    kept: list[Path] = []
    others: Counter[str] = Counter()
    datasets: set[Path] = set()
    entered = {parent for path in paths for parent in path.parents}
    for path in paths:
        inner = path.relative_to(below).parts if below else ()
        if any(part.startswith(".") for part in inner) or not datasets.isdisjoint(path.parents):
            continue
        if path.is_dir():
            if is_dataset(path):
                datasets.add(path)
                kept.append(path)
            elif path not in entered and any(not inside.name.startswith(".") for inside in path.iterdir()):
                others["folder"] += 1
        elif kind_of_name(path) and not path.exists():
            raise UserError(f"input {str(path)!r} is a link to nothing", "a file", "mend the link, or remove it")
        elif path.is_file() and kind_of(path):
            kept.append(path)
        else:
            is_special = path.exists() and not path.is_file()
            others["pipe or device" if is_special else spelled(path.suffix.lower() or path.name)] += 1
    return kept, others


def kind_of(path: Path) -> tuple[str, str] | None:
    """How a source is read, and its compression; None for what is not read. Raises OSError."""
    if path.is_dir():
        return ("dataset", "") if is_dataset(path) else None
    if path.name == STDIN_NAME:
        with path.open("rb") as file:
            found = format_of_bytes(file.read(SNIFFED_BYTES))
        kinds = {"Parquet": "parquet", "Arrow": "arrow"}
        return kinds.get(found, "json"), found if found in COMPRESSIONS.values() else ""
    return kind_of_name(path)


def kind_of_name(path: Path) -> tuple[str, str] | None:
    """How a file of this name is read, and its compression; None for a name that is not known."""
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


def short_names(sources: Sequence[Path]) -> list[str]:
    """The shortest endings of the paths that tell them apart, `spelled`; moving all of them changes none."""
    parts = [path.absolute().parts for path in sources]
    for depth in range(1, max(map(len, parts)) + 1):
        names = [spelled("/".join(part[-depth:])) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [repr(str(path)) for path in sources]


def spelled(name: str) -> str:
    r"""A name as text that can be stored and printed: a byte that is not UTF-8 as \xff."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
