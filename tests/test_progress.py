"""Bars and lines on stderr, and a stderr that takes nothing."""

import subprocess
import sys

import pytest
from dflash_offline.progress import bar, say

SHOWN = """
from dflash_offline.progress import bar, say
with bar("work", " items", range(3)) as shown:
    for item in shown:
        shown.refresh()
        say("a line")
print("done")
"""


def test_a_line_stands_alone_above_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("work", " items", total=2) as shown:
        shown.refresh()
        say("a line")
    assert "\ra line\n" in capsys.readouterr().err


def test_a_stderr_that_takes_nothing_ends_no_work() -> None:
    """A log on the disk that is full: what filled it is told as it is, and where it can be."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", SHOWN], stdout=subprocess.PIPE, stderr=full)
    assert done.stdout == b"done\n"
