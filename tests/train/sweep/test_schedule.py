"""What becomes of a run whose process ended, and which runs another command takes up."""

from pathlib import Path

import pytest
from dflash_offline import UserError
from dflash_offline.store.files import storage_error
from dflash_offline.train.sweep.record import RunRecord, Sweep
from dflash_offline.train.sweep.schedule import end_of, take_up
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
    own = {"store": "", "plan_sha256": "", "strategy": "grid", "count": None, "seed": None, "fields": [], "base": {}}
    sweep = Sweep(folder=tmp_path, halving={"steps": [5], "keep": 0.5}, runs=runs, **own)
    (tmp_path / runs[5].folder).mkdir(parents=True)
    (tmp_path / runs[5].folder / "run.json").write_text("{}")
    take_up(sweep)
    states = ["waiting", "waiting", "waiting", "failed", "out", "finished", "waiting"]
    assert [run.state for run in runs] == states
    assert "run 7 was finished, and its runs/0007/run.json is gone" in capsys.readouterr().err
    assert (runs[6].results, runs[6].decoded, len(runs[6].rungs)) == (None, None, 1), "what the rung decided stands"
    assert (runs[1].error, runs[3].error) == (None, "x")
