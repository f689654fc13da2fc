"""A run inside of a sweep: what is typed next is the sweep's command, since only the sweep knows its rungs."""

import shutil
from pathlib import Path

import pytest
from dflash_offline.settings_text import as_toml
from dflash_offline.store.files import FolderLock
from dflash_offline.train.report import words
from dflash_offline.train.report.page import comparison_page, run_page
from dflash_offline.train.report.run_folder import read_run
from dflash_offline.train.report.sweep_folder import read_comparison
from dflash_offline.train.summary import describe_run
from dflash_offline.train.sweep.config import SweepConfig

HALVING = {"steps": [5], "keep": 0.5}


@pytest.fixture
def sweep_with(make_run, make_sweep, lab, tmp_path):
    """Its run 6 stands where its stop_at ended it, at the rung; gives the sweep's folder and the run's."""

    def make(**record) -> tuple[Path, Path]:
        folder = tmp_path / "sweep"
        sweep = make_sweep(folder)
        (folder / "sweep.toml").write_text(as_toml(SweepConfig(out=str(folder)), "sweep"))
        for name, value in record.items():
            setattr(sweep.runs[5], name, value)
        sweep.halving = HALVING
        sweep.write()
        run_dir = folder / sweep.runs[5].folder
        make_run(run_dir, lab.usual_lines(5), is_finished=False, settings=("stop_at=5",))
        return folder, run_dir

    return make


def test_the_next_command_of_a_run_is_that_of_its_sweep(sweep_with, lab, monkeypatch):
    folder, run_dir = sweep_with(state="paused")
    again = f"dflash sweep --config {folder}/sweep.toml"
    assert words.commands(read_run(run_dir)) == [again]
    text = describe_run(run_dir)
    for told in (text, lab.Page(run_page(read_run(run_dir))).text, comparison_page(read_comparison(folder))):
        assert again in told
        assert "dflash train" not in told
    assert "its sweep was stopped, or the run failed; the sweep's command goes on with it" in text
    monkeypatch.chdir(run_dir)
    assert words.commands(read_run(Path("."))) == [again]


def test_nothing_goes_on_with_a_run_while_its_sweep_does(sweep_with):
    folder, run_dir = sweep_with(state="waiting")
    with FolderLock(folder):
        run = read_run(run_dir)
    assert words.commands(run) == []
    assert run.notes[0] == "step 5 of 10: its sweep is still going"


RUNG = {"step": 5, "acceptance_length": 1.5, "acceptance_length_cycles": 1.5, "is_kept": False}


def test_nothing_goes_on_with_a_run_that_the_rule_stopped(sweep_with):
    run = read_run(sweep_with(state="out", rungs=[RUNG])[1])
    assert words.commands(run) == []
    assert run.notes[0] == "step 5 of 10: its sweep stopped it at a rung, where others were better"


def test_nothing_goes_on_with_a_run_that_failed_before_a_rung_that_is_decided(make_run, sweep_with, lab):
    folder, _ = sweep_with(state="out", rungs=[RUNG])
    run_dir = make_run(folder / "runs" / "0005", lab.usual_lines(4), is_finished=False)
    run = read_run(run_dir)
    assert words.commands(run) == []
    assert run.notes[0] == "step 4 of 10: it failed, and its sweep decided the rung without it"


def test_where_the_sweep_cannot_be_read_its_command_says_why(sweep_with):
    folder, run_dir = sweep_with()
    (folder / "sweep.json").write_text("{")
    assert words.commands(read_run(run_dir)) == [f"dflash sweep --config {folder}/sweep.toml"]


def test_a_run_beside_those_of_a_sweep_or_copied_out_of_it_is_a_run_of_its_own(sweep_with, tmp_path):
    folder, run_dir = sweep_with()
    for own in (folder / "runs" / "mine", folder / "copied", tmp_path / "runs" / "0006"):
        shutil.copytree(run_dir, own)
        assert words.commands(read_run(own)) == [
            f"dflash train --config {own}/train.toml --out {own} --set stop_at=none"
        ]
