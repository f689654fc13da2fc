"""A disk that fills up, or is read-only: one message, nothing torn, and the next run continues."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from dflash_offline import UserError
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
