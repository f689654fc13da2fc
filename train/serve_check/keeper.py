"""A script that keeps one command: when it, or the process that started it, ends, nothing of the command lives on.

Engines start processes of their own, which outlive a killed server. So this process adopts every orphan below it
(PR_SET_CHILD_SUBREAPER), is told of its parent's death by SIGTERM (PR_SET_PDEATHSIG), and then ends them all. Needs the
standard library alone; Linux.

Usage: python keeper.py PARENT_PID GRACE_S COMMAND...
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def main(parent: int, grace_s: float, command: list[str]) -> int:
    """The command's exit code, 128 + N where signal N ended it."""
    signal.signal(signal.SIGTERM, leave)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    kept = subprocess.Popen(command, start_new_session=True)
    try:
        code = kept.wait()
        return code if code >= 0 else 128 - code
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end(kept, grace_s)


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def leave(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def end(kept: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Asks the command's session to end, then kills all that is left of it, orphans included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(kept.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        kept.wait(grace_s)
    limit = time.monotonic() + grace_s
    while (left := children()) and time.monotonic() < limit:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def children() -> list[int]:
    """Processes whose parent is this one; those of a killed child are among them as soon as it is gone."""
    own = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{own}/task/{own}/children").read_text().split()]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
