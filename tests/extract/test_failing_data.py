"""DATA on a disk that fails: the first cause is told, and what is said of the folder is true."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.extract.data import NOTHING_LEFT, filled_aside
from dflash_offline.extract.targets.fingerprint import weights_sha256

FIRST = UserError("the first cause", "none", "nothing")
FULL_LIST = """
import resource, sys
from pathlib import Path
from dflash_offline import UserError
from dflash_offline.extract.lines.inputs import LeftOut
from dflash_offline.extract.rejected import RejectedWriter
try:
    with RejectedWriter(Path(sys.argv[1])) as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # the head of the file is written already
        for line in range(10_000 if sys.argv[2] == "in the middle" else 10):
            writer.add("a.jsonl", line, None, "line", LeftOut("empty", str(line) * 200))
        if sys.argv[2] == "after another":
            raise UserError("the first cause", "none", "nothing")
except (OSError, UserError) as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("when", ["in the middle", "at the end", "after another"])
def test_a_list_that_a_full_disk_does_not_take(tmp_path: Path, when: str) -> None:
    """Ending the list fails too; that hides no other error, and Arrow prints nothing of its own about it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", FULL_LIST, str(tmp_path), when], capture_output=True, text=True, env=environment
    )
    assert done.stderr == ""
    assert done.stdout.startswith("UserError: the first cause" if when == "after another" else "OSError: [Errno 27]")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_a_rename_that_fails_is_not_blamed_on_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "rename", fail)
    told = rf"data' failed: .*\({errno.errorcode[code]}\)"
    with pytest.raises(UserError, match=told) as caught, filled_aside(tmp_path / "data"):
        pass
    assert NOTHING_LEFT in caught.value.advice
    assert os.listdir(tmp_path) == []


def test_a_folder_that_appeared_meanwhile_is_named(tmp_path: Path) -> None:
    told = "data' appeared while it was being prepared"
    with pytest.raises(UserError, match=told), filled_aside(tmp_path / "data"):
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "somebody's").touch()
    assert os.listdir(tmp_path) == ["data"]


def test_a_disk_that_gives_nothing_back_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the half-filled folder nor those above it can be removed: the first cause is told, the next start can."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    folder = tmp_path / "above" / "data"
    with pytest.raises(UserError, match="the first cause"), filled_aside(folder):
        monkeypatch.setattr(os, "rmdir", fail)
        raise FIRST
    monkeypatch.undo()
    with pytest.raises(UserError, match="EROFS") as caught, filled_aside(folder):
        monkeypatch.setattr(os, "rmdir", fail)
        fail()
    left = os.listdir(tmp_path / "above")
    assert len(left) == 1
    assert f"the next start removes {left[0]!r}" in caught.value.advice
    monkeypatch.undo()
    with filled_aside(folder) as aside:  # that of this process is removed, whatever process it is
        (aside / "a").touch()
    assert os.listdir(tmp_path / "above") == ["data"]
    assert os.listdir(folder) == ["a"]


def test_weights_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=r"model.safetensors' failed: Input/output error \(EIO\)"):
        weights_sha256([path])
