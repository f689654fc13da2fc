"""What is done after a failure fails too: the first cause is told, and the next start removes what stays."""

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.store.config import RecodeConfig
from dflash_offline.store.files import FolderLock, NewFile, publish, remove_temporaries, temporary_path
from dflash_offline.store.frozen import remove_unfinished
from dflash_offline.store.index import write_consolidated
from dflash_offline.store.recode import Dealer
from dflash_offline.store.recode_layout import lay_out_store
from dflash_offline.store.recode_plan import plan_recode
from dflash_offline.store.ring import Ring
from dflash_offline.store.samples import SampleWriter
from dflash_offline.store.segment_locks import SegmentLocks
from dflash_offline.store.state_error import ERRORS_NAME, Measurement, write_errors
from dflash_offline.store.stopped import what_is_safe

FIRST = UserError("the first cause", "none", "nothing")


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """A folder on a tmpfs, and what makes that read-only; skipped, with the reason, where mounting is refused."""
    disk = tmp_path / "disk"
    disk.mkdir()
    result = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if result.returncode:
        pytest.skip(f"mounting a tmpfs was refused: {result.stderr.decode().strip()}")

    def remount() -> Path:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        return disk

    try:
        yield remount
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """broken(code, "unlink", "pwrite"): from here on these calls of the system fail, as on a disk that died."""

    def break_calls(code: int, *names: str) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            raise OSError(code, os.strerror(code))

        for name in names:
            monkeypatch.setattr(os, name, fail)

    return break_calls


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO], ids=errno.errorcode.get)
def test_a_disk_that_takes_nothing_any_more_in_a_segment(
    tmp_path: Path, small: ModuleType, broken: Any, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As when a file system is remounted read-only: neither can the half-written files be removed."""
    store_dir, manifest, _ = small.make_store(tmp_path, 12, fill=False)
    writer = small.StoreWriter(store_dir, manifest)
    small.fill_segment(writer, 1)
    sink = writer.open(0)
    ids, positions, lengths = (sink.plan[name].tolist() for name in ("sample_id", "position", "n"))
    broken(code, "pwrite", "writev", "ftruncate", "fdatasync", "fsync", "replace", "unlink", "open")
    with pytest.raises(UserError) as caught:
        for sample_id, position, n in zip(ids, positions, lengths):
            sink.append(sample_id, position, small.states(sample_id, n), small.states(1, n, 1)[0])
        sink.commit({})
    monkeypatch.undo()
    assert errno.errorcode[code] in caught.value.happened
    assert "in 1 committed segments are safe" in caught.value.advice
    assert len(str(caught.value).splitlines()) == 3
    assert all(file.file.fd < 0 for file in sink.files.values()), "all are closed"
    assert len(remove_temporaries(store_dir, {0})) == 2
    assert not list(store_dir.rglob("*.tmp.*"))


@pytest.mark.parametrize("is_explained", [False, True], ids=["raised", "written"])
def test_a_file_whose_temporary_stays(tmp_path: Path, broken: Any, is_explained: bool) -> None:
    file = NewFile(tmp_path / "a")
    broken(errno.EROFS, "unlink", "writev", "replace")
    expected = "EROFS" if is_explained else "the first cause"
    with pytest.raises(UserError, match=expected), file:
        if is_explained:
            file.write(b"x")
        raise FIRST
    assert os.listdir(tmp_path) == [file.temporary.name]


def test_a_lock_whose_file_cannot_be_closed_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network disk tells at the end of a file that its bytes could not be written."""
    close = os.close

    def fail(fd: int) -> None:
        close(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", fail)
    with pytest.raises(UserError, match="the first cause"), FolderLock(tmp_path), SegmentLocks(tmp_path, [range(3)]):
        raise FIRST
    monkeypatch.undo()
    with FolderLock(tmp_path), SegmentLocks(tmp_path, [range(3)]):
        pass


def test_left_overs_that_cannot_be_removed_are_named(tmp_path: Path, small: ModuleType, read_only: Any) -> None:
    disk = tmp_path / "disk"
    (disk / "hidden").mkdir()
    left = temporary_path(disk / "hidden" / "c.1.0.0")
    left.touch()
    read_only()
    with pytest.raises(UserError, match=f"{left.name}' failed: .*EROFS") as caught:
        remove_temporaries(disk, {1})
    assert len(str(caught.value).splitlines()) == 3
    with pytest.raises(UserError, match="data' failed: .*EROFS"):
        SampleWriter(disk / "data")


def test_what_a_killed_launcher_left_at_the_very_end_is_removed(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, _ = small.make_store(tmp_path, 12)
    left = [store_dir / f"{name}.tmp.elsewhere.17" for name in (ERRORS_NAME, "index.arrow")]
    for path in left:
        path.touch()
    assert write_consolidated(store_dir, manifest.identity_sha256, manifest.num_segments)
    write_errors(store_dir, Measurement())
    assert not list(store_dir.rglob("*.tmp.*"))


def test_frozen_parts_half_written_by_a_dead_process_are_removed(tmp_path: Path) -> None:
    """Alone in the store all of them, else only those that surely nobody writes."""
    folder = tmp_path / "frozen"
    folder.mkdir()
    alive = temporary_path(folder / "frozen.safetensors")
    dead = alive.with_name(alive.name.rpartition(".")[0] + f".{2**22 + 1}")  # above the largest process id
    elsewhere = folder / "frozen.safetensors.tmp.another-host.17"
    for path in (alive, dead, elsewhere):
        path.touch()
    publish(folder / "config.json", b"{}")
    remove_unfinished(tmp_path, is_alone=False)
    assert {path.name for path in folder.iterdir()} == {alive.name, elsewhere.name, "config.json"}
    remove_unfinished(tmp_path, is_alone=True)
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_what_is_safe_is_told_as_the_disk_has_it(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, plan = small.make_store(tmp_path, 12, fill=False)
    small.fill_segment(small.StoreWriter(store_dir, manifest), 1)
    num_samples = plan["segment"].to_pylist().count(1)
    assert what_is_safe(store_dir, plan, manifest.num_segments) == (
        f"stopped: {num_samples} of 12 samples, in 1 of {manifest.num_segments} segments, are committed and safe; "
        "the same command continues from there"
    )
    shutil.rmtree(store_dir / "commits")
    assert what_is_safe(store_dir, plan, manifest.num_segments) == (
        f"stopped: what is committed cannot be told now: {str(store_dir / 'commits')!r} does not exist"
    )


def test_a_new_store_that_is_gone_in_a_run_is_what_is_told(
    tmp_path: Path, lab: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither what is safe can be told then, nor can all be removed; why the run ended is told all the same."""
    out = tmp_path / "out"
    plan = plan_recode(RecodeConfig(out=str(out), workers=1), [lab.make_store(tmp_path / "whole", range(4))])
    lay_out_store(plan)
    shutil.rmtree(out / "commits")
    (out / "hidden" / "c.0.0.0.tmp.elsewhere.17").mkdir()  # no file, so that removing it fails
    with pytest.raises(UserError, match=r"commits/\d+.arrow' failed: .*\(ENOENT\)"):
        Dealer(plan, set()).run()
    assert f"stopped: what is committed cannot be told now: {str(out / 'commits')!r}" in capsys.readouterr().err


def test_a_ring_that_the_system_refuses_is_no_matter_of_the_disk() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(UserError, match=r"a ring of 4 slots of .* cannot be made: .*\(EFBIG\)") as caught:
            Ring.create(2**20, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "no disk is needed" in caught.value.expected
