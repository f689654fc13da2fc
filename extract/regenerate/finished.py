"""A finished folder: what regenerate.json says of it, and whether its files are still what was written.

Knows names, sizes and hashes, no lines.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import UserError
from ...store.files import storage_error
from .report import LEFT_OUT_NAME, REPORT_NAME, RESPONSES_NAME


@dataclass(frozen=True, slots=True)
class Finished:
    """The content of regenerate.json; `files`: size and hash of each other file, by name."""

    facts: dict[str, Any]
    report: dict[str, Any]
    files: dict[str, dict[str, Any]]


def read_finished(folder: Path) -> Finished | None:
    """None where the folder is not finished. Raises UserError where regenerate.json is no such file."""
    path = folder / REPORT_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Finished(content["facts"], content["report"], content.get("files", {}))
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{str(path)!r} cannot be read: {error}", "facts and report", "remove it; the same command writes it again"
        ) from error


def missing_files(folder: Path, finished: Finished) -> list[str]:
    """Names of files that a finished folder lost. Raises UserError for one that is not what was written."""
    missing: list[str] = []
    for name in (RESPONSES_NAME, LEFT_OUT_NAME):
        path, written = folder / name, finished.files.get(name)
        try:
            if not path.exists():
                missing.append(name)
            elif written is not None and file_facts(path) != written:
                raise UserError(
                    f"{str(path)!r} is not what the finished run wrote: {path.stat().st_size:,} bytes, "
                    f"{written['size_bytes']:,} were written, or others in their place",
                    "the files of a finished folder as they were",
                    "move it away; the same command then writes it again from the journal",
                )
        except OSError as error:
            raise storage_error(error, path) from error
    return missing


def file_facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size_bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
