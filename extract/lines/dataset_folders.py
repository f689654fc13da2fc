"""The layout of folders written by datasets' `save_to_disk`; needs no `datasets` package.

Knows state.json (the Arrow files of one dataset, and of the index over its rows where it was saved with one) and
dataset_dict.json (several datasets in one folder, its parts); knows nothing of Arrow.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import UserError

STATE = "state.json"
PARTS = "dataset_dict.json"
HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval", "heldout", "holdout")
"""How the names of parts begin that others examine with: `test`, and `test_sft` too."""


@dataclass(frozen=True, slots=True)
class SavedDataset:
    """The Arrow files of one dataset; with `indices`, its rows are those that these name, in their order."""

    data: tuple[Path, ...]
    indices: tuple[Path, ...]


def is_dataset(folder: Path) -> bool:
    return (folder / STATE).is_file() or (folder / PARTS).is_file()


def parts_of(folder: Path) -> list[Path]:
    """The folder of each part of a saved dictionary, in its order; the folder itself where it is no dictionary.

    Raises UserError for a dictionary that is not as `datasets` writes it, names no part, or lacks one.
    """
    if not (folder / PARTS).is_file():
        return [folder]
    names = names_in(folder / PARTS, read_json_file(folder / PARTS).get("splits"))
    parts = [folder / name for name in names]
    missing = [part.name for part in parts if not (part / STATE).is_file()]
    if missing or not parts:
        raise UserError(
            f"{str(folder / PARTS)!r} names " + (f"{missing[0]!r}, which holds no {STATE}" if missing else "no part"),
            "one part or more, each a folder written by `datasets`",
            "save the dataset again, or copy all of it",
        )
    return parts


def is_held_out(path: Path) -> bool:
    """True for a part of a saved dictionary whose name says that it is not for training."""
    if not (path.parent / PARTS).is_file():
        return False
    first = re.match("[a-z]*", path.name.lower())
    return first is not None and first[0] in HELD_OUT


def saved_dataset(folder: Path) -> SavedDataset:
    """Raises UserError for a folder whose state.json is not as `datasets` writes it, or that lacks a file."""
    state = read_json_file(folder / STATE)
    data = arrow_files(folder, state.get("_data_files"))
    if not data:
        raise UserError(f"{str(folder / STATE)!r} names no data file", "at least one Arrow file", "save it again")
    return SavedDataset(data, arrow_files(folder, state.get("_indices_data_files") or []))


def dataset_files(folder: Path) -> list[Path]:
    """All Arrow files of a saved dataset, in order."""
    saved = saved_dataset(folder)
    return [*saved.data, *saved.indices]


def arrow_files(folder: Path, entries: Any) -> tuple[Path, ...]:
    if isinstance(entries, list):
        entries = [entry.get("filename") if isinstance(entry, dict) else entry for entry in entries]
    files = tuple(folder / name for name in names_in(folder / STATE, entries))
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise UserError(f"dataset file {str(missing[0])!r} is missing", f"{len(files)} Arrow files", "copy it again")
    return files


def read_json_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {error}", "a JSON object", "save the dataset again") from error
    if not isinstance(content, dict):
        raise UserError(
            f"{str(path)!r} holds a JSON {type(content).__name__}", "a JSON object", "save the dataset again"
        )
    return content


def names_in(path: Path, names: Any) -> list[str]:
    """The list of names that a dataset's JSON file holds. Raises UserError for anything else."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(
            f"{str(path)!r} names its parts as {names!r:.80}",
            "what `datasets` writes: a list of splits, or _data_files with a filename each",
            "save the dataset again",
        )
    return names
