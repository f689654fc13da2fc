"""What a sweep shows: a table drawn in place on a terminal, lines elsewhere."""

import io
import re
import sys

import pytest
from dflash_offline.train.sweep.record import RunRecord, Sweep
from dflash_offline.train.sweep.table import LiveTable, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def sweep(tmp_path) -> Sweep:
    runs = [RunRecord(number=i, overrides={"optim.lr": 0.01 * i}, device="cpu", steps=100) for i in (1, 2, 3)]
    own = {"store": "", "manifest": {}, "strategy": "grid", "count": None, "seed": None, "fields": [], "base": {}}
    return Sweep(folder=tmp_path, halving={"steps": [50], "keep": 0.5}, runs=runs, **own)


def play(table: LiveTable, sweep: Sweep) -> None:
    run = sweep.runs[1]
    run.state, run.step = "running", 10
    table.started(run)
    table.heard(run, "train", {"step": 10, "loss": 3.5, "step_s": 2.0})
    table.heard(run, "exam", {"step": 10, "acceptance_length": 1.25})


def screen(text: str) -> list[str]:
    """What a terminal shows after all of it: `ESC[nF ESC[J` goes back n lines and clears the rest."""
    lines: list[str] = []
    for part in re.split(r"(\x1b\[\d+F\x1b\[J)", text):
        back = re.fullmatch(r"\x1b\[(\d+)F\x1b\[J", part)
        if back:
            del lines[-int(back[1]) :]
        else:
            lines += part.split("\n")[:-1]
    return lines


def test_a_terminal_shows_the_events_above_one_table(sweep, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "30")
    table = LiveTable(sweep)
    play(table, sweep)
    table.redraw()
    shown = screen(sys.stderr.getvalue())  # pyright: ignore[reportAttributeAccessIssue]
    assert shown[:2] == ["run 2 on cpu: optim.lr=0.02", "run 2: step 10 of 100, acceptance 1.250"]
    assert shown[2] == "3 runs: 1 running, 2 waiting"
    assert shown[3].split() == ["run", "device", "state", "step", "loss", "acceptance", "rung", "ETA", "settings"]
    assert shown[4].split() == ["2", "cpu", "running", "10/100", "3.500", "1.250", "0/1", "1:20", "optim.lr=0.02"]
    assert [line.split()[0] for line in shown[5:]] == ["1", "3"]


def test_a_small_terminal_shows_the_runs_under_way(sweep, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "6")
    table = LiveTable(sweep)
    play(table, sweep)
    shown = screen(sys.stderr.getvalue())[2:]  # pyright: ignore[reportAttributeAccessIssue]
    assert [line.split()[0] for line in shown] == ["3", "run", "2"]
    assert max(map(len, shown)) < 60


def test_elsewhere_events_are_lines_and_nothing_is_drawn(sweep, capsys):
    table = LiveTable(sweep)
    play(table, sweep)
    table.redraw()
    for run, is_kept in zip(sweep.runs, (True, False, True)):
        run.rungs = [{"step": 50, "acceptance_length": 1.0, "acceptance_length_cycles": 1.0, "is_kept": is_kept}]
    table.decided(50, sweep)
    sweep.runs[0].state, sweep.runs[0].error = "failed", "it broke"
    table.ended(sweep.runs[0])
    table.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[2:] == [
        "rung at step 50: runs 1, 3 go on, 2 are out",
        "run 1 failed at step 0, acceptance 1.000: it broke (see logs/0001.txt)",
    ]


def test_durations_are_read_at_once():
    assert [duration(s) for s in (0.4, 65, 7265)] == ["0:00", "1:05", "2:01:05"]
