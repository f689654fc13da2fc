"""`dflash plan` says what extract then does, and writes nothing."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.launch import plan_command
from dflash_offline.store.reader import StoreReader

MakeConfig = Callable[..., ExtractConfig]


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_plan_foretells_the_store(tmp_path: Path, data: Path, whole_store: Path, make_config: MakeConfig) -> None:
    reader = StoreReader(whole_store)
    before = sorted(tmp_path.rglob("*"))
    summary = plan_command(make_config(data, tmp_path / "store", shards=3))
    assert sorted(tmp_path.rglob("*")) == before, "it wrote something"
    assert summary.num_samples == len(reader)
    assert summary.num_positions == int(reader.samples.n.sum())
    assert summary.num_tokens == sum(len(reader.tokens(i)[0]) for i in range(len(reader)))
    assert summary.num_segments == reader.manifest.num_segments
    assert summary.segment_positions == reader.manifest.segment_positions
    assert summary.tap_layers == reader.manifest.tap_layers
    assert summary.workers == ("cpu", "cpu", "cpu")
    largest = max(path.stat().st_size for path in (whole_store / "hidden").glob("c.*"))
    assert 0.5 * largest <= summary.segment_bytes
    actual = size_bytes(whole_store)
    assert actual <= summary.store_bytes <= actual + 300_000
    assert summary.needed_bytes == summary.store_bytes
    assert summary.fits


def test_text_holds_what_a_user_asks(data: Path, tmp_path: Path, make_config: MakeConfig) -> None:
    text = plan_command(make_config(data, tmp_path / "store", shards=2)).text()
    for wanted in ("56 samples", "positions", "segments", "free: fits", "taps       1, 3, 0 of layers 0-5", "2 on cpu"):
        assert wanted in text
    assert text.splitlines()[-1] == f"next: dflash extract --data {data} --store {tmp_path / 'store'}"


def test_plan_of_a_half_filled_store(tmp_path: Path, data: Path, whole_store: Path, make_config: MakeConfig) -> None:
    store = tmp_path / "store"
    shutil.copytree(whole_store, store)
    for segment in (0, 1, 2):
        (store / "commits" / f"{segment:08d}.arrow").unlink()
    summary = plan_command(make_config(data, store))
    assert summary.num_committed == summary.num_segments - 3
    segments = sum((whole_store / "hidden" / f"c.{segment}.0.0").stat().st_size for segment in (0, 1, 2))
    assert segments <= summary.needed_bytes < segments + 8192 * summary.num_segments + 10_000
    assert f"{summary.num_committed} of them committed" in summary.text()


def test_plan_refuses_what_extract_would_refuse(
    tmp_path: Path, data: Path, whole_store: Path, make_config: MakeConfig, case_target: Any
) -> None:
    with pytest.raises(UserError, match="tap_layers"):
        plan_command(make_config(data, whole_store, taps=(0, 1)))
    with pytest.raises(UserError, match="was prepared for target"):
        plan_command(make_config(data, tmp_path / "store", target=str(case_target("generation-tags"))))
    with pytest.raises(UserError, match="CUDA device 99"):
        plan_command(make_config(data, tmp_path / "store", devices="99"))


def test_a_folder_of_somebody_else_is_refused_by_plan_too(data: Path, tmp_path: Path, make_config: MakeConfig) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    (tmp_path / "file").write_text("no folder")
    for folder, told in (("notes", "mine.txt"), ("file", "is a file")):
        with pytest.raises(UserError, match=told):
            plan_command(make_config(data, tmp_path / folder))
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    assert plan_command(make_config(data, tmp_path / "disk")).fits
