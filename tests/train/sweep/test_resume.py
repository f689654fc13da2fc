"""A sweep that was ended between two runs goes on with the others; its runs train in this process, one by one."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Pipe

from dflash_offline.train.metrics import METRICS_NAME, TRAIN, read_metrics
from dflash_offline.train.sweep.check import Device, require_all
from dflash_offline.train.sweep.record import WAITING, Sweep, merged
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
    known = merged(read_known(wanted.folder), wanted)
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
