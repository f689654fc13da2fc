"""A sweep that was ended between two runs goes on with the others; its runs train in this process, one by one."""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest
from dflash_offline.store.manifest import read_manifest
from dflash_offline.train.facts import read_facts
from dflash_offline.train.metrics import METRICS_NAME, TRAIN, read_metrics
from dflash_offline.train.start import run_trainer
from dflash_offline.train.sweep.check import Device, config_of, require_all
from dflash_offline.train.sweep.record import WAITING, Sweep, merged
from dflash_offline.train.sweep.report import SweepReport
from dflash_offline.train.sweep.schedule import Schedule, take_up
from dflash_offline.train.sweep.sweep import make_folder_of, planned, read_known
from dflash_offline.train.sweep.table import LiveTable
from dflash_offline.watch import Channel

DEVICE = Device("cpu")
SETTINGS = {"steps": 3, "eval_every": 3, "checkpoint_every": 3}


@contextmanager
def stderr_kept() -> Iterator[None]:
    """A run sends the stderr of its process to its log."""
    number = sys.stderr.fileno()
    kept = os.dup(number)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


def command(wanted: Sweep, most_jobs: int = 99) -> Sweep:
    """`dflash sweep`, but for its processes: one job after another, ended after so many of them."""
    known = merged(read_known(wanted.folder, Path(wanted.store)), wanted)
    take_up(known)
    require_all(known, known.with_state(WAITING), [DEVICE])
    make_folder_of(known.folder)
    schedule = Schedule(known, [DEVICE], LiveTable(known))
    schedule.settle()
    for _ in range(most_jobs):
        job = schedule.next_job(DEVICE.name)
        if job is None:
            break
        ours, theirs = Pipe()
        with stderr_kept():
            job.function(Channel(theirs, job.name), *job.args)
        while ours.poll():
            if (message := ours.recv()[1]) is not None:
                schedule.hear(job.name, message)
        schedule.ended(job.name, None)
    schedule.close()
    return known


def test_a_sweep_ended_between_two_runs_goes_on_with_the_other(lab, tiny_store, tmp_path, monkeypatch):
    """That a run goes on from a rung to the same bits, test_stop_at.py shows; with kills, test_sweep.py."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what a run sets is put back
    out, own = tmp_path / "sweep", {"fields": {"optim.lr": [0.02, 1e-6]}, "halving.steps": (2,)}
    metrics = [out / f"runs/000{number}" / METRICS_NAME for number in (1, 2)]
    states, written = [], []
    for _ in range(4):
        wanted = planned(lab.config_of(tiny_store, out, **own), lab.base | SETTINGS)
        states.append([run.state for run in command(wanted, 1).runs])
        written.append([path.read_bytes() if path.exists() else b"" for path in metrics])
    assert states == [["paused", "waiting"], ["waiting", "out"], ["finished", "out"], ["finished", "out"]]
    assert written[1][0] == written[0][0], "run 1 was not trained again before its rung was decided"
    assert written[2][1] == written[1][1], "nor run 2 behind it"
    assert written[3] == written[2], "nor any that is finished"
    assert [line["step"] for line in read_metrics(metrics[0], TRAIN)] == [1, 2, 3]
    assert [line["step"] for line in read_metrics(metrics[1], TRAIN)] == [1, 2]
    content = lab.content_of(out)
    assert content["ranking"] == [1, 2]
    assert [rung["is_kept"] for run in content["runs"] for rung in run["rungs"]] == [True, False]
    assert content["runs"][0]["results"]["step"] == 3


def test_the_second_run_begins_with_the_kernels_of_the_first(lab, tiny_store, tmp_path, monkeypatch):
    """A CPU compiles nothing, so the file that is found there in the end was copied."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    out = tmp_path / "sweep"
    wanted = planned(lab.config_of(tiny_store, out, fields={"optim.lr": [0.02, 0.01]}), lab.base | SETTINGS)
    assert [run.state for run in command(wanted, 1).runs] == ["finished", "waiting"]
    (out / "runs/0001/kernels/ab").mkdir(parents=True)
    (out / "runs/0001/kernels/ab/kernel.py").write_text("compiled")
    assert [run.state for run in command(wanted, 1).runs] == ["finished", "finished"]
    assert (out / "runs/0002/kernels/ab/kernel.py").read_text() == "compiled"


def test_a_run_that_is_added_on_a_store_that_has_grown_reads_what_the_first_one_read(
    lab, runs_lab, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    store, base = runs_lab.make_store(tmp_path, num_committed=9), lab.base | SETTINGS | {"partial": True}
    command(planned(lab.config_of(store, tmp_path / "sweep", fields={"optim.lr": [0.02]}), base))
    manifest = read_manifest(store)
    runs_lab.fill_segments(store, manifest, range(9, manifest.num_segments))
    found = command(planned(lab.config_of(store, tmp_path / "sweep", fields={"optim.lr": [0.02, 0.01]}), base))
    facts = [read_facts(found.folder / run.folder) for run in found.runs]
    assert [fact.segments for fact in facts] == ["0-8", "0-8"]
    assert facts[0].snapshot == facts[1].snapshot
    results = [run.results or {} for run in found.runs]
    assert results[0]["num_prompts"] == results[1]["num_prompts"] > 0


def train_outside(sweep: Sweep, **settings) -> None:
    """Run 1 by a command of its own, as `dflash train --config SWEEP/runs/0001/train.toml --set ...`."""
    _ours, theirs = Pipe()
    run_trainer(Channel(theirs, "trainer"), dataclasses.replace(config_of(sweep, sweep.runs[0], "cpu"), **settings))


@pytest.fixture
def two_rungs(lab, tiny_store, tmp_path, monkeypatch) -> Callable[[str], Sweep]:
    """A sweep of two runs with rungs at steps 1 and 2 of 4, as its settings say, in a folder of that name."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    own = {"fields": {"optim.lr": [0.02, 1e-6]}, "halving.steps": (1, 2), "halving.keep": 0.6}

    def make(name: str) -> Sweep:
        return planned(lab.config_of(tiny_store, tmp_path / name, **own), lab.base | SETTINGS | {"steps": 4})

    return make


@pytest.mark.parametrize("stop_at", [3, None])
def test_a_run_that_was_trained_past_its_rungs_is_taken_at_their_exams(lab, two_rungs, stop_at):
    train_outside(two_rungs("sweep"), eval_every=1, stop_at=stop_at)
    found, reference = command(two_rungs("sweep")), command(two_rungs("reference"))
    assert [run.state for run in found.runs] == ["finished", "finished"]
    assert [len(run.rungs) for run in found.runs] == [2, 2]
    assert lab.lasting(found.folder) == lab.lasting(reference.folder)


@pytest.mark.parametrize("stop_at", [3, None])
def test_a_run_past_a_rung_where_it_held_no_exam_fails_alone(two_rungs, stop_at):
    train_outside(two_rungs("sweep"), stop_at=stop_at)
    found = command(command(two_rungs("sweep")))
    assert [run.state for run in found.runs] == ["failed", "finished"]
    error = "run 1 was trained past the rung at step 1 by another command, and metrics.jsonl holds no exam of that step"
    assert (found.runs[0].error, found.runs[0].step) == (error, stop_at or 4)
    assert f"UserError: {error}\n" in (found.folder / found.runs[0].log).read_text()
    assert "runs 1 failed, and their rung was decided without them" in SweepReport(found).text()
