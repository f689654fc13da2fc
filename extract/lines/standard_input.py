"""Standard input as a file: it is read twice, once for its fingerprint and once for its lines.

Knows where the bytes go and when they are deleted, nothing of their format.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ... import UserError, system_reason

STDIN_NAME = "stdin"
"""The name of the file, and of the source in every report; its format is told by its content."""


@contextmanager
def spooled_stdin() -> Iterator[Path]:
    """All of standard input, in a file of the folder for temporary files (TMPDIR) that is deleted at the end.

    Raises UserError for a terminal, and for a disk that is full.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("standard input is a terminal", "a file or pipe as standard input", "pipe a file into `-`")
    with tempfile.TemporaryDirectory(prefix="dflash-") as folder:
        path = Path(folder) / STDIN_NAME
        try:
            with path.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file, 2**20)
        except OSError as error:
            raise UserError(
                f"standard input could not be kept in {folder!r}: {system_reason(error)}",
                "room for all of it, as it comes",
                "set TMPDIR to a folder with room, or give a file",
            ) from error
        yield path
