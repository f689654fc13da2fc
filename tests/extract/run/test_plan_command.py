"""`dflash plan` says what extract then does, and writes nothing."""

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.cli import COMMANDS
from dflash_offline.extract.config import ExtractConfig, PlanConfig
from dflash_offline.extract.foretell import plan_command
from dflash_offline.extract.launch import Dealer, extract, report
from dflash_offline.extract.run_log import LOG_NAME, last_run, log_run
from dflash_offline.extract.survey import Survey, survey
from dflash_offline.options import resolved
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


@pytest.mark.parametrize("own", [{}, {"shards": 2}, {"shards": 2, "only": "1"}])
def test_hours_at_a_given_rate(tmp_path: Path, data: Path, make_config: MakeConfig, own: dict[str, Any]) -> None:
    """Tokens of the forwards of this launcher's segments, by the rate of each worker."""
    settings = {name: getattr(make_config(data, tmp_path / "s", **own), name) for name in ExtractConfig.__slots__}
    found = survey(ExtractConfig(**settings))
    segments = {segment for groups in found.own_segments for segment in groups}
    tokens = sum(
        int(length) for length, segment in zip(found.plan.lengths, found.plan.column("segment")) if segment in segments
    )
    hours = tokens / 50.0 / (2 if own == {"shards": 2} else 1) / 3600
    text = plan_command(PlanConfig(**settings, rate=50.0)).text()
    assert f"time       {hours:.3g} hours for {tokens:,} tokens, at 50 tokens/s of each worker (as given)" in text
    assert "--rate" not in text.splitlines()[-1]
    assert "unknown how long, give --rate" in plan_command(ExtractConfig(**settings)).text()


def test_hours_at_the_rate_of_the_last_run(tmp_path: Path, data: Path, whole_store: Path, make_config: Any) -> None:
    store = tmp_path / "store"
    shutil.copytree(whole_store, store)
    own = last_run(store)
    assert own is not None
    assert own.devices == "cpu"
    assert own.num_positions > 0
    assert own.wall_s > 0
    log_run(store, workers=("cuda:0", "cuda:1"), num_positions=12_000, wall_s=3.0)
    log_run(store, workers=("cuda:0",), num_positions=0, wall_s=3.0)
    with (store / LOG_NAME).open("a") as file:
        file.write("torn")
    (store / "commits" / "00000000.arrow").unlink()
    text = plan_command(make_config(data, store)).text()
    assert "at 2,000 tokens/s of each worker (measured in this store, 2 worker(s) on cuda:0,cuda:1" in text


def test_a_disk_that_takes_no_line_of_speed_ends_no_run(
    tmp_path: Path, data: Path, whole_store: Path, make_config: Any, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk fails many a write; the one that only helps `plan` must not hide the others, nor fail a good run."""
    store = tmp_path / "store"
    shutil.copytree(whole_store, store)
    for segment in range(8):  # more than one batch: a single one tells nothing of speed
        (store / "commits" / f"{segment:08}.arrow").unlink()
    (store / LOG_NAME).unlink()
    (store / LOG_NAME).symlink_to("/dev/full")
    assert extract(make_config(data, store)).num_missing == 0
    assert f"{LOG_NAME}': No space left on device (ENOSPC)" in capsys.readouterr().err
    assert content(store) == content(whole_store)


def test_bytes_of_every_codec_are_those_of_stores_made_with_them(
    tmp_path: Path, case_target: Any, make_data: Any, make_config: MakeConfig, extract_here: Callable[..., Survey]
) -> None:
    lines = [{"input_ids": list(range(first, first + 65)), "loss_mask": [1] * 65} for first in (6, 8, 10)]
    prepared = make_data(lines, case_target())
    said = plan_command(make_config(prepared, tmp_path / "none", codec="int8:4", segment_positions=64))
    for name in ("raw", "zstd", "int8:4"):
        config = make_config(prepared, tmp_path / name, codec=name, segment_positions=64)
        extract_here(config, with_frozen=False)
        size = size_bytes(tmp_path / name / "hidden") - (tmp_path / name / "hidden" / "zarr.json").stat().st_size
        assert size < said.codec_bytes[name] if name == "zstd" else size == said.codec_bytes[name]
    assert "zstd some " in said.text()
    assert "estimated" in said.text()


def test_several_gpus_of_a_worker(
    tmp_path: Path, data: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dealt in groups; refused on a CPU, and without the package that spreads a target."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(UserError, match=r"gpus_per_shard = 2, but accelerate is not installed") as caught:
        plan_command(make_config(data, tmp_path / "s", devices="0-3", gpus_per_shard=2))
    assert "pip install accelerate" in caught.value.advice
    with pytest.raises(UserError, match="gpus_per_shard = 2 on a CPU"):
        plan_command(make_config(data, tmp_path / "s", gpus_per_shard=2))


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
