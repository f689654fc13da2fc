"""The DATA folder: samples, the facts they follow from, and all of the input that was left out.

`tokens-*.arrow` (store.samples), `rejected.parquet` (source, line, id, what, reason, detail) and
`data.json`, written last: {"facts": what decides the samples, "report": what was counted,
"fingerprint": of the samples}. A folder with data.json is complete. It is filled beside its
final name and renamed, so a run that fails leaves nothing.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import UserError, system_reason
from ..store.files import fsync_folder, is_abandoned, publish, storage_error, temporary_path
from ..store.samples import SampleTable
from .lines.dataset_folders import is_dataset
from .rejected import LINE, REJECTED_NAME, SAMPLE, TURN, count_rejected

DATA_NAME = "data.json"
NOTHING_LEFT = "nothing is left behind"
TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # of a rename onto a folder that somebody filled meanwhile


@dataclass(frozen=True, slots=True)
class Data:
    """The content of a complete folder's data.json."""

    facts: dict[str, Any]
    report: dict[str, Any]
    fingerprint: str


def read_data(folder: Path) -> Data:
    """Raises UserError when the folder is not there, not complete, or not ours."""
    path = folder / DATA_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Data(content["facts"], content["report"], content["fingerprint"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"{str(folder)!r} holds no {DATA_NAME}",
            "a folder that `dflash prepare` has completed",
            "run `dflash prepare CHATS --target TARGET --out FOLDER` first, or check the path",
        ) from error
    except OSError as error:
        raise UserError(
            f"{str(path)!r} cannot be read: {system_reason(error)}",
            "a file that you may read",
            "check path and rights",
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{str(path)!r} cannot be read: {error}", "facts, report and fingerprint", "prepare the data again"
        ) from error


def write_data(folder: Path, data: Data) -> None:
    content = {"facts": data.facts, "report": data.report, "fingerprint": data.fingerprint}
    publish(folder / DATA_NAME, (json.dumps(content, indent=2, ensure_ascii=True) + "\n").encode())


def facts_sha256(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def find_data(folder: Path) -> Data | None:
    """The data that is already there, None for a free name. Raises UserError for another folder."""
    try:
        if (folder / DATA_NAME).is_file():
            return read_data(folder)
        if folder.is_dir() and not any(folder.iterdir()):
            return None
        is_taken = os.path.lexists(folder)
    except OSError as error:
        raise storage_error(error, folder, safe=NOTHING_LEFT) from error
    if is_taken:
        raise UserError(
            f"{str(folder)!r} exists and holds no {DATA_NAME}",
            "a new folder, an empty one, or one made by `dflash prepare`",
            "choose another --out, or empty that folder",
        )
    return None


def require_outside(folder: Path, inputs: Sequence[str], *, option: str = "--out") -> None:
    """Raises UserError for a folder below one of the inputs, all files of which are read: it would be read itself.

    Hidden folders are not, nor is more of a saved dataset than it names.
    """
    real = Path(os.path.realpath(folder))
    for given in inputs:
        above = Path(os.path.realpath(Path(given).expanduser()))
        if not (above.is_dir() and real.is_relative_to(above)) or is_dataset(above):
            continue
        if not any(part.startswith(".") for part in real.relative_to(above).parts):
            raise UserError(
                f"{str(folder)!r} lies in {given!r}, and all files below that are input",
                "a folder outside of the inputs",
                f"choose another {option}",
            )


def require_same_facts(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises UserError with the first field that differs and both of its values."""
    for name in [*new, *(name for name in old if name not in new)]:
        if old.get(name) != new.get(name):
            path, was, now = first_difference(name, old.get(name), new.get(name))
            raise UserError(
                f"{str(folder)!r} was prepared with {path} = {json.dumps(was)}, this run has {json.dumps(now)}",
                "the same settings and inputs as before",
                "choose another --out, or remove that folder and prepare again",
            )


def require_whole(folder: Path, data: Data) -> None:
    """Raises UserError where a complete folder has lost a file, or holds one that is not what was written."""
    kinds = ((LINE, "left_out"), (TURN, "turns_left_out"), (SAMPLE, "samples_left_out"))
    expected = {what: sum(data.report[name].values()) for what, name in kinds}
    try:
        found = count_rejected(folder)
        counted = {what: found[what] for what in expected}
        fault = "" if counted == expected else f"{REJECTED_NAME} has rows {counted}, the report counts {expected}"
    except (OSError, ValueError, LookupError) as error:
        fault = f"{REJECTED_NAME} cannot be read: {' '.join(str(error).split())}"
    if not fault and SampleTable(folder).fingerprint() != data.fingerprint:
        fault = "its samples are not those that it was completed with"
    if fault:
        raise UserError(
            f"{str(folder)!r} is complete no more: {fault}",
            "all files as `dflash prepare` wrote them",
            "bring the file back, or remove that folder and prepare again",
        )


def first_difference(path: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    if isinstance(old, dict) and isinstance(new, dict):
        key = next(key for key in [*new, *old] if old.get(key) != new.get(key))
        return first_difference(f"{path}.{key}", old.get(key), new.get(key))
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        i = next(i for i in range(len(new)) if old[i] != new[i])
        return first_difference(f"{path}[{i}]", old[i], new[i])
    return path, old, new


@contextmanager
def filled_aside(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` at the end, or vanishes when the body raises.

    The body writes nowhere else, so an OSError in it or around it is raised as a UserError.
    """
    parent = folder.absolute().parent
    aside = temporary_path(folder.absolute())
    made: list[Path] = []
    try:
        made += [path for path in (parent, *parent.parents) if not os.path.lexists(path)]
        parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(folder)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        yield aside
        fsync_folder(aside)
        try:
            os.rename(aside, folder)
        except OSError as error:
            if error.errno not in TAKEN:
                raise
            raise UserError(
                f"{str(folder)!r} appeared while it was being prepared: {error}", "a free name", "choose another --out"
            ) from error
        fsync_folder(parent)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        for path in made:
            with suppress(OSError):  # it holds something, or the disk that failed fails at this too
                path.rmdir()
        if isinstance(error, OSError):
            safe = NOTHING_LEFT if not os.path.lexists(aside) else f"the next start removes {aside.name!r}"
            raise storage_error(error, folder, safe=safe) from error
        raise


def remove_abandoned(folder: Path) -> None:
    """Removes temporary folders that killed runs of this machine left for the same name."""
    for path in folder.absolute().parent.glob(glob_text(folder.absolute().name) + ".tmp.*"):
        if is_abandoned(path):
            shutil.rmtree(path)


def glob_text(text: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", text)
