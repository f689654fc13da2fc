"""`dflash plan` says what extract then does, and writes nothing."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.cli import COMMANDS, resolved
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.launch import Dealer, plan_command, report
from dflash_offline.extract.survey import Survey
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
    own = "--taps 1,3,0 --shards 2 --devices cpu --token-budget 600 --set stall_s=120.0"
    assert text.splitlines()[-1] == f"next: dflash extract --data {data} --store {tmp_path / 'store'} {own}"


@pytest.mark.parametrize(
    "changes",
    [
        {"taps": None, "devices": None, "token_budget": 8192, "stall_s": 600.0},
        {"codec": "int8", "window": 8, "last": True, "dtype": "float32", "segment_positions": 256},
        {"space_check": False, "slow_kernels": True, "cpu_threads": 2, "shards": 3, "taps": (4,)},
    ],
)
def test_the_next_command_makes_the_store_that_was_planned(
    tmp_path: Path, data: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Words that a shell splits, given to the command's own parser, are the planned config again."""
    named = str(data) if changes.get("window") else None
    target = json.loads((data / "data.json").read_text())["facts"]["target"] if named else None
    config = make_config(data, tmp_path / "s raw 'e", **changes, target=target)
    next_line = plan_command(config).text().splitlines()[-1]
    words = shlex.split(next_line.removeprefix("next: dflash "))
    monkeypatch.chdir(tmp_path)
    given = COMMANDS[words[0]][0]().make_context("extract", words[1:]).params
    assert resolved(ExtractConfig, "extract", given) == config


@pytest.mark.parametrize("devices", [None, "0", "0,1"])
def test_threads_of_a_cpu_are_refused_where_no_worker_runs_on_one(
    tmp_path: Path, data: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, devices: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="cpu_threads = 3 does nothing on cuda:0") as caught:
        plan_command(make_config(data, tmp_path / "store", devices=devices, cpu_threads=3))
    assert len(str(caught.value).splitlines()) == 3
    assert plan_command(make_config(data, tmp_path / "store", devices="cpu", cpu_threads=3)).workers == ("cpu",)
    assert plan_command(make_config(data, tmp_path / "store", devices="0")).workers == ("cuda:0",)


def test_the_whole_store_takes_the_same_whatever_is_there_already(
    tmp_path: Path, data: Path, whole_store: Path, make_config: MakeConfig
) -> None:
    planned, there = plan_command(make_config(data, tmp_path / "store")), plan_command(make_config(data, whole_store))
    assert there.store_bytes == planned.store_bytes
    assert there.needed_bytes < planned.needed_bytes


@pytest.mark.parametrize("codec", ["raw", "int8:4", "zstd"])
def test_a_full_segment_takes_what_is_said(
    tmp_path: Path,
    case_target: Any,
    make_data: Any,
    make_config: MakeConfig,
    extract_here: Callable[..., Survey],
    codec: str,
) -> None:
    """Samples of 64 positions in segments of 64: every segment is full, its indexes and last states included."""
    lines = [{"input_ids": list(range(first, first + 65)), "loss_mask": [1] * 65} for first in (6, 8, 10)]
    config = make_config(
        make_data(lines, case_target()), tmp_path / "s raw e", codec=codec, last=True, segment_positions=64
    )
    found = extract_here(config, with_frozen=False)
    sizes = {
        sum((tmp_path / "s raw e" / array / f"c.{segment}.0.0").stat().st_size for array in ("hidden", "last"))
        for segment in range(3)
    }
    said = plan_command(config).segment_bytes
    assert max(sizes) < said if codec == "zstd" else sizes == {said}
    told = report(Dealer(found, set()), 1.0).text().splitlines()[-1]
    assert told == f"next: dflash train --store '{tmp_path / 's raw e'}'"


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
