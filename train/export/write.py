"""Writes the three files of a served folder aside and renames them into place: the whole folder or nothing.

Knows files; what they say is decided by who calls.
"""

import filecmp
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from ... import UserError
from ...store.files import fsync_folder, publish, storage_error, temporary_path
from .tensors import CONFIG_NAME, TENSORS_NAME

CARD_NAME = "README.md"
FILE_NAMES = (TENSORS_NAME, CONFIG_NAME, CARD_NAME)


def write_folder(out: Path, content: Mapping[str, Any], state: Mapping[str, Tensor], card: str) -> bool:
    """Writes config, tensors and card to `out`; False where the folder is there with equal files.

    Raises UserError for a folder that holds anything else, and when the disk fails.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(state.items())}
    place = out.resolve()  # a link to an empty folder stays one; what it names is replaced
    aside = temporary_path(place)
    try:
        aside.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        publish(aside / TENSORS_NAME, save(tensors, metadata={"format": "pt"}))
        publish(aside / CONFIG_NAME, (json.dumps(content, indent=2) + "\n").encode())
        publish(aside / CARD_NAME, card.encode())
        if is_equal(out, aside):
            return False
        os.rename(aside, place)  # replaces an empty folder, never one that holds something
        fsync_folder(aside.parent)
        return True
    except OSError as error:
        raise storage_error(error, out) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_equal(out: Path, aside: Path) -> bool:
    """True where `out` holds the same files as `aside`, False where it is empty or not there; else UserError."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    require_export_folder(out)
    different = filecmp.cmpfiles(out, aside, FILE_NAMES, shallow=False)[1:]
    if any(different):
        raise other_export(out, [name for part in different for name in part])
    return True


def require_export_folder(out: Path) -> None:
    """Raises UserError where something lies that no export wrote; whether the files are equal is not looked at."""
    if not os.path.lexists(out):
        return
    found = sorted(path.name for path in out.iterdir()) if out.is_dir() else [out.name]
    if found and found != sorted(FILE_NAMES):
        raise other_export(out, [name for name in found if name not in FILE_NAMES] or found)


def other_export(out: Path, found: list[str]) -> UserError:
    return UserError(
        f"{str(out)!r} is there and is not this export: see {found[0]!r}",
        "a new or empty folder, or the same export",
        "name another with --out, or remove it",
    )
