"""What becomes of a run whose process ended, and which runs another command takes up."""

import json
from pathlib import Path

import pytest
from dflash_offline import UserError
from dflash_offline.store.files import storage_error
from dflash_offline.train.sweep.check import Device
from dflash_offline.train.sweep.record import RunRecord, Sweep
from dflash_offline.train.sweep.schedule import Schedule, end_of, take_up
from dflash_offline.train.sweep.sweep import make_folder_of, planned
from dflash_offline.train.sweep.table import LiveTable
from dflash_offline.watch import ChildDied, PeerLost, Stalled


@pytest.mark.parametrize(
    "error, state, reason",
    [
        (None, "interrupted", "told to end, with a checkpoint"),
        (ChildDied("run 2", -9), "interrupted", "run 2 was killed by SIGKILL (out of memory, or killed by hand)"),
        (ChildDied("loader", 1), "interrupted", "loader ended with exit code 1 before its work was done"),
        (Stalled("the sweep", "a sign of life from run 2", 60.0), "interrupted", "waited for a sign of life"),
        (PeerLost("gone"), "interrupted", "gone"),
        (OSError(5, "Input/output error"), "interrupted", "Input/output error"),
        (
            storage_error(OSError(28, "No space left on device"), Path("run/x")),
            "interrupted",
            "No space left on device",
        ),
        (UserError("the gradient is not finite", "a finite one", "lower it"), "failed", "the gradient is not finite"),
        (RuntimeError("first line\nsecond line"), "failed", "RuntimeError: first line second line"),
    ],
)
def test_an_end_of_its_own_is_told_from_one_that_came_from_outside(error, state, reason):
    found = end_of(error)
    assert found[0] == state
    assert reason in found[1]
    assert "\n" not in found[1]


def test_the_next_command_takes_up_what_has_not_ended(tmp_path, capsys):
    def run(number: int, state: str, *kept: bool | None) -> RunRecord:
        names = ("acceptance_length", "acceptance_length_cycles")
        rungs = [{"step": 5, "is_kept": is_kept, **dict.fromkeys(names, 1.0)} for is_kept in kept]
        return RunRecord(number=number, overrides={}, state=state, rungs=rungs, error="x", results={}, decoded={})

    runs = [
        run(1, "running"),
        run(2, "interrupted", True),
        run(3, "failed", True),  # behind a rung that is decided
        run(4, "failed"),  # its rung was decided without it
        run(5, "out", False),
        run(6, "finished", True),
        run(7, "finished", True),
    ]
    own = {"store": "", "manifest": {}, "strategy": "grid", "count": None, "seed": None, "fields": [], "base": {}}
    sweep = Sweep(folder=tmp_path, halving={"steps": [5], "keep": 0.5}, runs=runs, **own)
    (tmp_path / runs[5].folder).mkdir(parents=True)
    (tmp_path / runs[5].folder / "run.json").write_text("{}")
    take_up(sweep)
    states = ["waiting", "waiting", "waiting", "failed", "out", "finished", "waiting"]
    assert [run.state for run in runs] == states
    assert "run 7 was finished, and its runs/0007/run.json is gone" in capsys.readouterr().err
    assert (runs[6].results, runs[6].decoded, len(runs[6].rungs)) == (None, None, 1), "what the rung decided stands"
    assert (runs[1].error, runs[3].error) == (None, "x")


@pytest.fixture
def two_at_a_rung(lab, tiny_store, tmp_path) -> Schedule:
    """Two runs that have said to be at the rung of step 4; their processes still live."""
    config = lab.config_of(tiny_store, tmp_path / "out", fields={"seed": [1, 2]}, **{"halving.steps": (4,)})
    known = planned(config, lab.base)
    make_folder_of(known.folder)
    schedule = Schedule(known, [Device("cpu")] * 2, LiveTable(known))
    exam = {"kind": "exam", "step": 4, "acceptance_length": 1.5, "acceptance_length_cycles": 1.5, "num_prompts": 1}
    for run in known.runs:
        job = schedule.next_job("cpu")
        assert job is not None
        folder = known.folder / run.folder
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(json.dumps(exam) + "\n")
        schedule.hear(job.name, ("paused", {"step": 4, "steps": 12}))
    return schedule


def test_a_rung_waits_for_the_processes_that_came_to_it(two_at_a_rung):
    """Their last word comes before their end: a run that went on at once would be trained twice at a time."""
    schedule, runs = two_at_a_rung, two_at_a_rung.sweep.runs
    assert [(run.state, run.rungs) for run in runs] == [("running", [])] * 2
    schedule.ended("run 2", None)
    assert [run.state for run in runs] == ["running", "paused"]
    assert schedule.next_job("cpu") is None
    schedule.ended("run 1", None)
    assert [run.state for run in runs] == ["waiting", "out"], "equal runs by their numbers"
    job = schedule.next_job("cpu")
    assert job is not None
    assert job.name == "run 1"
    assert job.args[0].stop_at is None


def test_a_process_that_is_killed_behind_its_last_word_comes_to_no_rung(two_at_a_rung):
    two_at_a_rung.ended("run 1", ChildDied("run 1", -9))
    two_at_a_rung.ended("run 2", None)
    assert [(run.state, len(run.rungs)) for run in two_at_a_rung.sweep.runs] == [("interrupted", 0), ("paused", 1)]


def test_a_metrics_file_that_is_broken_ends_its_own_run_alone(two_at_a_rung):
    (two_at_a_rung.sweep.folder / "runs/0001/metrics.jsonl").write_text("{\n")
    for name in ("run 1", "run 2"):
        two_at_a_rung.ended(name, None)
    assert [run.state for run in two_at_a_rung.sweep.runs] == ["failed", "waiting"]
    assert "metrics.jsonl' is broken" in (two_at_a_rung.sweep.runs[0].error or "")
