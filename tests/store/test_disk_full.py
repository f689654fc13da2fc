"""A disk that fills up, fails, is read-only or vanishes: one message, nothing torn, and the next run continues."""

import errno
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.store.direct import DirectFile
from dflash_offline.store.files import FolderLock
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.samples import SampleWriter


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 240 kB; skipped, with the reason, where mounting is refused."""
    disk = tmp_path / "disk"
    disk.mkdir()
    result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=240k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if result.returncode:
        pytest.skip(f"mounting a tmpfs was refused: {result.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)  # token files may still be mapped


@pytest.fixture
def small_ext4(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 4 MiB, which takes direct writes; skipped, with the reason, where it cannot be mounted."""
    image, disk = tmp_path / "image", tmp_path / "ext4"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(4 << 20)
    for command in (["mkfs.ext4", "-q", "-b", "4096", "-m", "0", image], ["mount", "-o", "loop", image, disk]):
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} is not installed")
        result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
        if result.returncode:
            pytest.skip(f"{command[0]} was refused: {result.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


def test_a_full_disk_says_what_is_safe_and_the_next_run_continues(
    small_disk: Path, tmp_path: Path, small: ModuleType
) -> None:
    plan = small.make_plan(small.make_samples(tmp_path / "data", 30))
    manifest = small.make_manifest(plan)
    small.create_store(small_disk / "store", manifest, plan, tmp_path / "data")  # links cannot cross: copies
    writer = small.StoreWriter(small_disk / "store", manifest)
    with pytest.raises(UserError) as caught:
        small.fill_segments(writer, range(manifest.num_segments))
    done = writer.committed()
    assert 0 < len(done) < manifest.num_segments
    num_safe = sum(row["segment"] in done for row in plan.to_pylist())
    error = caught.value
    assert "ENOSPC" in error.happened
    assert str(small_disk) in error.happened
    assert "are still to write" in error.happened
    assert "bytes) are free" in error.expected
    assert f"{num_safe} of 30 samples in {len(done)} committed segments are safe" in error.advice
    assert not list(small_disk.rglob("*.tmp.*"))
    with StoreReader(small_disk / "store", partial=True) as reader:
        assert len(reader) == num_safe
    remount(small_disk, "size=4m")
    writer = small.StoreWriter(small_disk / "store", manifest)
    small.fill_segments(writer, sorted(set(range(manifest.num_segments)) - writer.committed()))
    expected, _, _ = small.make_store(tmp_path / "other", 30)
    assert small.tree(small_disk / "store") == small.tree(expected)


def test_a_disk_too_small_for_the_tokens(small_disk: Path) -> None:
    def add(writer: SampleWriter) -> None:
        with writer:
            for line in range(100):
                writer.add(list(range(1000)), [1] * 1000, split="train", task="", source="", source_line=line)

    writer = SampleWriter(small_disk / "data", rows_per_file=10)
    with pytest.raises(UserError, match="ENOSPC"):
        add(writer)
    assert not list(small_disk.rglob("*.tmp.*"))


def test_a_disk_without_inodes_says_so(small_disk: Path, tmp_path: Path, small: ModuleType) -> None:
    """It has bytes left, which alone would tell nobody what to do."""
    plan = small.make_plan(small.make_samples(tmp_path / "data", 3))
    remount(small_disk, "nr_inodes=8")  # fewer than a laid out store has files and folders
    with pytest.raises(UserError) as caught:
        small.create_store(small_disk / "store", small.make_manifest(plan), plan, tmp_path / "data")
    assert "ENOSPC" in caught.value.happened
    assert "a free inode for each new file: none is left" in caught.value.expected
    assert "bytes) are free" in caught.value.expected
    assert "remove files" in caught.value.advice


def test_a_read_only_disk(small_disk: Path, tmp_path: Path, small: ModuleType) -> None:
    plan = small.make_plan(small.make_samples(tmp_path / "data", 3))
    manifest = small.make_manifest(plan)
    store_dir = small_disk / "store"
    small.create_store(store_dir, manifest, plan, tmp_path / "data")
    writer = small.StoreWriter(store_dir, manifest)
    remount(small_disk, "ro")
    with pytest.raises(UserError, match="EROFS"):
        writer.open(0)
    with pytest.raises(UserError, match="EROFS"):
        small.create_store(small_disk / "other", manifest, plan, tmp_path / "data")
    remount(small_disk, "rw")
    small.fill_segment(writer, 0)
    remount(small_disk, "ro")
    with StoreReader(store_dir, partial=True) as reader:
        assert len(reader) > 0
    assert os.listdir(small_disk) == ["store"]
    with pytest.raises(UserError, match=r"store/\.lock' failed: .*EROFS") as caught, FolderLock(store_dir):
        pass
    assert "check mount" in caught.value.advice


@pytest.mark.parametrize("codec", ["raw", "zstd", "int8:2"])
def test_a_full_disk_that_takes_direct_writes(small_ext4: Path, tmp_path: Path, small: ModuleType, codec: str) -> None:
    store_dir, ballast = small_ext4 / "store", small_ext4 / "ballast"
    plan = small.make_plan(small.make_samples(tmp_path / "data", 30))
    manifest = small.make_manifest(plan, codec=codec)
    small.create_store(store_dir, manifest, plan, tmp_path / "data")
    with DirectFile(small_ext4 / "probe") as file:
        assert fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT
    facts = os.statvfs(small_ext4)
    ballast.write_bytes(b"x" * (facts.f_bavail * facts.f_frsize - 150_000))
    writer = small.StoreWriter(store_dir, manifest)
    with pytest.raises(UserError) as caught:
        small.fill_segments(writer, range(manifest.num_segments))
    done = writer.committed()
    assert 0 < len(done) < manifest.num_segments
    assert "ENOSPC" in caught.value.happened
    assert ("; at most " in caught.value.happened) == (codec == "zstd")
    assert f"samples in {len(done)} committed segments are safe" in caught.value.advice
    assert not list(small_ext4.rglob("*.tmp.*"))
    with StoreReader(store_dir, partial=True) as reader:
        assert len(reader) == sum(row["segment"] in done for row in plan.to_pylist())
    ballast.unlink()
    small.fill_segments(writer, sorted(set(range(manifest.num_segments)) - done))
    expected, _, _ = small.make_store(tmp_path / "other", 30, codec=codec)
    assert small.tree(store_dir) == small.tree(expected)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("step", ["open", "pwrite", "ftruncate", "fdatasync", "writev", "replace", "fsync", "unlink"])
def test_a_disk_that_fails_anywhere_in_a_segment(
    tmp_path: Path, small: ModuleType, monkeypatch: pytest.MonkeyPatch, step: str, code: int
) -> None:
    store_dir, manifest, plan = small.make_store(tmp_path, 12, fill=False)
    writer = small.StoreWriter(store_dir, manifest)
    small.fill_segment(writer, 1)
    before = small.tree(store_dir)
    call, is_broken = getattr(os, step), True

    def fail(path: Any, *rest: Any, **options: Any) -> Any:
        is_temporary = ".tmp." in str(path)  # the first failure removes it: a disk that fails at that too says it once
        if is_broken and not (step == "unlink" and is_temporary):
            raise OSError(code, os.strerror(code))
        return call(path, *rest, **options)

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(UserError) as caught:
        small.fill_segment(writer, 0)
    is_broken = False
    num_safe = sum(row["segment"] == 1 for row in plan.to_pylist())
    assert errno.errorcode[code] in caught.value.happened
    assert str(store_dir) in caught.value.happened
    assert "bytes) are still to write" in caught.value.happened
    assert "bytes) are free" in caught.value.expected
    assert f"{num_safe} of 12 samples in 1 committed segments are safe" in caught.value.advice
    found = small.tree(store_dir)
    assert before.items() <= found.items()
    assert set(found) - set(before) <= {"hidden/c.0.0.0", "last/c.0.0.0"}  # replaced by the next run, unread till then
    small.fill_segments(writer, sorted(set(range(manifest.num_segments)) - writer.committed()))
    expected, _, _ = small.make_store(tmp_path / "other", 12)
    assert small.tree(store_dir) == small.tree(expected)


@pytest.mark.parametrize("gone", ["hidden", "last", "commits", "."])
def test_a_folder_that_vanishes(tmp_path: Path, small: ModuleType, gone: str) -> None:
    store_dir, manifest, _ = small.make_store(tmp_path, 12, fill=False)
    writer = small.StoreWriter(store_dir, manifest)
    small.fill_segment(writer, 0)
    sink = writer.open(1)
    for sample_id, position, n in zip(*(sink.plan[name].tolist() for name in ("sample_id", "position", "n"))):
        sink.append(sample_id, position, small.states(sample_id, n), small.states(1, n, 1)[0])
    (store_dir / gone).rename(tmp_path / "elsewhere")
    with pytest.raises(UserError) as caught:
        sink.commit({})
    assert "ENOENT" in caught.value.happened
    assert str(store_dir) in caught.value.happened
    assert "bytes) are still to write" in caught.value.happened
    assert "bytes) are free" in caught.value.expected
    unknown = gone in ("commits", ".")
    assert ("cannot be told now" if unknown else "in 1 committed segments are safe") in caught.value.advice
    assert len(str(caught.value).splitlines()) == 3
