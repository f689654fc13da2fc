"""Whether a process works on a folder right now. Takes no lock that would stop one from starting."""

import fcntl
import os
from pathlib import Path

LOCK_NAME = ".lock"


def is_held(folder: Path) -> bool:
    """Whether a process holds the lock of the folder, of a run or of a sweep."""
    try:
        fd = os.open(folder / LOCK_NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
