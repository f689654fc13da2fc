"""Whole files or none, temporaries, locks, and what a failing disk tells the user."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.store.buffers import drop, read_all, write_all
from dflash_offline.store.files import (
    FolderLock,
    NewFile,
    free_bytes,
    make_folder,
    publish,
    remove_temporaries,
    storage_error,
    temporary_path,
)
from hypothesis import given
from hypothesis import strategies as st


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    publish(path, b"first")
    with suppress(RuntimeError), NewFile(path) as file:
        file.write(b"seco")
        assert path.read_bytes() == b"first"
        raise RuntimeError
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["facts.json"]
    publish(path, b"second")
    assert path.read_bytes() == b"second"


def test_a_closed_file_takes_no_more_bytes(tmp_path: Path) -> None:
    file = NewFile(tmp_path / "a")
    file.abort()
    with pytest.raises(ValueError, match="closed"):
        file.write(b"x")


@given(st.lists(st.binary(max_size=5), max_size=6), st.data())
def test_drop_leaves_what_joining_the_buffers_would_leave(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    count = data.draw(st.integers(0, len(whole)))
    assert b"".join(drop([memoryview(part) for part in parts], count)) == whole[count:]


def test_more_buffers_than_one_system_call_takes(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(5000)
    pieces = [memoryview(data)[i : i + 2] for i in range(0, 5000, 2)]
    fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    write_all(fd, pieces)
    back = bytearray(4990)
    assert read_all(fd, [memoryview(back)[i : i + 1] for i in range(4990)], 10)
    assert bytes(back) == data[10:]
    assert not read_all(fd, [memoryview(bytearray(100))], 4950)
    os.close(fd)


def test_only_temporaries_of_the_given_segments_are_removed(tmp_path: Path) -> None:
    names = [
        "hidden/c.1.0.0.tmp.box.7",
        "hidden/c.11.0.0.tmp.box.7",
        "hidden/c.2.0.0.tmp.box.8",
        "last/c.1.0.0.tmp.other.9",
        "commits/00000001.arrow.tmp.box.7",
        "commits/00000003.arrow.tmp.box.7",
        "hidden/c.1.0.0",
        "commits/00000001.arrow",
        "hidden/zarr.json.tmp.box.7",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    removed = remove_temporaries(tmp_path, {1, 3})
    assert {str(path.relative_to(tmp_path)) for path in removed} == {names[0], names[3], names[4], names[5]}
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(names) - {names[0], names[3], names[4], names[5]}


def test_temporaries_name_host_and_process(tmp_path: Path) -> None:
    name = temporary_path(tmp_path / "c.3.0.0").name
    assert name.startswith("c.3.0.0.tmp.")
    assert name.endswith(f".{os.getpid()}")
    assert len(name.split(".")) == 7  # a dot in the host's name would make it ambiguous


HOLDER = """
import sys
from contextlib import suppress
from pathlib import Path
from dflash_offline.store.files import FolderLock
with FolderLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path: Path, python_environment: dict[str, str]) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        env=python_environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"process {holder.pid} on .*waited 0.2 s"):
            FolderLock(tmp_path, wait_s=0.2).__enter__()
        with FolderLock(tmp_path, name=".other"):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with FolderLock(tmp_path):
        pass


def test_a_shared_lock_keeps_out_only_who_wants_it_alone(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path, is_shared=True), FolderLock(tmp_path, is_shared=True)
    with first, second, pytest.raises(UserError, match="in use by process"):
        FolderLock(tmp_path).__enter__()
    with FolderLock(tmp_path), pytest.raises(UserError, match="in use by process"):
        FolderLock(tmp_path, is_shared=True).__enter__()


def test_a_lock_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError, match=r"\.lock' failed: .*EISDIR") as caught, FolderLock(tmp_path):
        pass
    assert len(str(caught.value).splitlines()) == 3
    assert "what was published before stays safe" in caught.value.advice


def test_what_a_failing_disk_tells_the_user(tmp_path: Path) -> None:
    path = tmp_path / "c.3.0.0"
    full = storage_error(OSError(errno.ENOSPC, "No space left on device"), path, needed_bytes=12_345_678, safe="7 kept")
    assert "12.3 MB (12345678 bytes)" in full.happened
    assert str(path) in full.happened
    assert "bytes) are free" in full.expected
    assert "7 kept" in full.advice
    for code, word in ((errno.EIO, "kernel|log"), (errno.EROFS, "mount")):
        error = storage_error(OSError(code, os.strerror(code)), path, safe="7 kept")
        assert errno.errorcode[code] in error.happened
        assert any(part in error.advice for part in word.split("|"))
        assert "7 kept" in error.advice
        assert "bytes) are free" in error.expected
    bound = storage_error(OSError(errno.ENOSPC, ""), path, needed_bytes=5, is_most=True)
    assert "at most 5 B (5 bytes) are still to write" in bound.happened


def test_a_new_folder_is_durable_up_to_the_one_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is on the disk when the folder that holds it was synced."""
    synced: list[str] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    make_folder(tmp_path / "a/b/c")
    assert set(synced) == {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/b")}
    synced.clear()
    make_folder(tmp_path / "a/b/c")  # made by somebody who may not have synced
    assert synced == [str(tmp_path / "a/b")]


def test_free_bytes_of_a_folder_that_does_not_exist_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, asked = os.statvfs(tmp_path), []  # others write to this disk meanwhile
    monkeypatch.setattr(os, "statvfs", lambda path: asked.append(path) or facts)
    assert free_bytes(tmp_path / "not" / "yet") == facts.f_bavail * facts.f_frsize
    assert asked == [tmp_path]
