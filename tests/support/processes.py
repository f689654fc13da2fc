"""What tests that kill look at: which processes live, and whose children they are."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def is_alive(pid: int) -> bool:
    """A zombie counts as dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], Any], limit_s: float) -> bool:
    """True as soon as the condition holds, False when it did not within the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def children(parent: int, word: str) -> dict[int, str]:
    """The living children of a process by process id, with their names, of those whose name holds the word."""
    try:
        pids = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")[-1] for pid in pids}
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {pid: name for pid, name in lines.items() if word in name}
