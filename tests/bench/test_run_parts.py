"""The benchmark of a run in small: what it compares are the same rows, and its table names every number."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths and lengths that say only whether the benchmark runs."""
    from run_parts import loading
    from store_parts import made

    monkeypatch.setattr(made, "HIDDEN", 64)
    monkeypatch.setattr(made, "TAPS", 2)
    monkeypatch.setattr(made, "LONGEST", 512)
    for name, value in {"MEDIAN": 150, "SHORTEST": 20, "ROW_TOKENS": 512}.items():
        monkeypatch.setattr(loading, name, value)


def test_bare_reads_leave_in_the_slots_what_the_loader_leaves_there(tmp_path: Path, monkeypatch) -> None:
    small(monkeypatch)
    from dflash_offline.store.reader import StoreReader
    from run_parts.loading import SLOTS, BareRows, loader_of, make_states, order_of
    from store_parts.made import Noise

    noise = Noise()
    with StoreReader(make_states(tmp_path, noise, 3e-3)) as reader:
        order = order_of(reader)
        with loader_of(reader, noise, order) as loader:
            bare = BareRows(loader, reader, order)
            expected = []
            for _ in range(SLOTS):
                with loader.row() as row:
                    expected.append(row.arrays.taps.copy())
        for taps in bare.taps:
            taps[:] = 0
        for number, row in enumerate(order.rows(0)[:SLOTS]):
            for fd, buffers, offset in bare.calls(bare.taps[number], row):
                os.preadv(fd, buffers, offset)
        bare.close()
    for number, taps in enumerate(expected):
        np.testing.assert_array_equal(bare.taps[number], taps)


def test_the_part_gives_every_row_with_its_bar(tmp_path: Path, monkeypatch) -> None:
    small(monkeypatch)
    from run_parts.loading import loading_rows
    from run_parts.planning import planning_rows

    rows = {row.name: row for row in loading_rows(tmp_path, 5e-3, 1) + planning_rows(1, 20_000)}
    assert {"loader_vs_preadv", "loader_vs_dataloader", "packing_fill", "plan_epoch_s"} <= set(rows)
    bars = {name: (row.least, row.most) for name, row in rows.items() if row.bar}
    assert bars == {
        "loader_vs_preadv": (0.7, None),
        "loader_vs_dataloader": (3, None),
        "packing_fill": (0.97, None),
        "plan_epoch_s": (None, 10),
    }
    assert all(row.value > 0 for row in rows.values())
    assert rows["packed_samples"].value == 20_000


def test_shares_and_rates_of_a_run_are_those_of_its_counted_steps() -> None:
    from run_parts.training import Measured

    steps = [(1.0, 0.0, 0.0, 100), (1.0, 0.1, 0.2, 100), (2.0, 0.0, 0.0, 300)]
    names = ("step_s", "wait_s", "reduce_s", "num_tokens")
    run = Measured([dict(zip(names, step)) | {"rate_block_tok_s": 1000 / step[0]} for step in steps])
    assert run.positions_per_s == pytest.approx(750)
    assert run.wait_share == pytest.approx(0.025)
    assert run.reduction_share == pytest.approx(0.2 / 3.8)
    assert run.need(10.0) == pytest.approx(1250)
    assert run.spread == pytest.approx(1.98)


def test_a_figure_that_the_disk_cannot_feed_is_left_out_with_its_reason() -> None:
    from run_parts.training import Job, Measured, put_worst
    from step_parts.cases import CASES, tiny
    from step_parts.table import Part

    job = Job(store=Path("store"), case=tiny(CASES["8b"]), codec="raw", steps=1, rows=1)
    line = {"step_s": 1.0, "wait_s": 0.5, "num_tokens": 1000}
    run, need = Measured([line]), 1000 * job.token_bytes
    slow, fast = Part("training"), Part("training")
    put_worst(slow, {"one": run}, job, disk=need)
    assert (slow.values, set(slow.left_out)) == ({}, {"data_wait_share", "step_p99_over_p50"})
    put_worst(fast, {"one": run}, job, disk=2 * need)
    assert fast.values["data_wait_share"] == (0.5, "ratio")


def test_bare_reads_are_of_whole_files(tmp_path: Path) -> None:
    from run_parts.disk import PIECE_BYTES, drop_from_cache, read_rate, read_whole

    sizes = [0, 1, 4096, PIECE_BYTES, PIECE_BYTES + 513]
    files = [tmp_path / str(size) for size in sizes]
    for path, size in zip(files, sizes):
        path.write_bytes(b"x" * size)
    drop_from_cache(files)
    try:
        assert [read_whole(path) for path in files] == sizes
    except OSError as error:
        pytest.skip(f"no direct reads on this file system: {error}")
    assert read_rate(files) > 0


@pytest.mark.slow
def test_training_runs_in_small(tmp_path: Path) -> None:
    script = Path(__file__).with_name("run.py")
    command = [sys.executable, str(script), "--tiny", "--part", "training", "--dir", str(tmp_path), "--out"]
    done = subprocess.run([*command, str(tmp_path / "out")], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    names = {row["name"] for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert {"two_gpus_vs_one", "ddp_overhead", "draft_positions_per_s_two"} <= names
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
