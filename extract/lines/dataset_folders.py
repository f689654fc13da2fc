"""The layout of folders written by datasets' `save_to_disk`; needs no `datasets` package.

Knows state.json (the Arrow files of one dataset, and of the index over its rows where it was saved with one) and
dataset_dict.json (several datasets in one folder); knows nothing of Arrow.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import UserError


@dataclass(frozen=True, slots=True)
class SavedDataset:
    """The Arrow files of one dataset; with `indices`, its rows are those that these name, in their order."""

    data: tuple[Path, ...]
    indices: tuple[Path, ...]


def is_dataset(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def saved_datasets(folder: Path) -> list[SavedDataset]:
    """The one dataset of a folder, or those of all splits of a saved dictionary, in order.

    Raises UserError for a folder whose JSON files are not as `datasets` writes them, or that lacks a file.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = names_in(folder / "dataset_dict.json", read_json_file(folder / "dataset_dict.json").get("splits"))
        return [saved for split in splits for saved in saved_datasets(folder / split)]
    state = read_json_file(folder / "state.json")
    data = arrow_files(folder, state.get("_data_files"))
    indices = arrow_files(folder, state.get("_indices_data_files") or [])
    return [SavedDataset(data, indices)]


def dataset_files(folder: Path) -> list[Path]:
    """All Arrow files of a saved dataset or dictionary, in order."""
    return [path for saved in saved_datasets(folder) for path in (*saved.data, *saved.indices)]


def arrow_files(folder: Path, entries: Any) -> tuple[Path, ...]:
    if isinstance(entries, list):
        entries = [entry.get("filename") if isinstance(entry, dict) else entry for entry in entries]
    files = tuple(folder / name for name in names_in(folder / "state.json", entries))
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
