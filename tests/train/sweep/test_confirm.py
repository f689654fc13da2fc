"""The best K decode with the target: which ones, with which settings, and what is kept."""

from pathlib import Path

import pytest
from dflash_offline import UserError
from dflash_offline.train.evaluate.config import EvaluateConfig
from dflash_offline.train.facts import FACTS_NAME
from dflash_offline.train.sweep.check import Device
from dflash_offline.train.sweep.record import RunRecord, Sweep, read_sweep
from dflash_offline.train.sweep.report import SweepReport
from dflash_offline.train.sweep.sweep import confirm, make_folder_of, planned, sweep


def test_the_best_runs_decode_once(lab, tmp_path):
    own = {"store": "", "manifest": {}, "strategy": "grid", "count": None, "seed": None, "fields": [], "base": {}}
    runs = [RunRecord(number=i, overrides={}, state="finished", results=results(1.0 + i / 10)) for i in (1, 2, 3)]
    rung = {"step": 4, "acceptance_length": 9.0, "acceptance_length_cycles": 9.0, "is_kept": False}
    runs += [RunRecord(number=4, overrides={}, state="out", rungs=[rung])]
    sweep = Sweep(folder=tmp_path, halving=None, runs=runs, ranking=[3, 2, 1, 4], **own)
    asked: list[tuple[Path, EvaluateConfig]] = []

    def examine(run_dir: Path, config: EvaluateConfig) -> dict:
        asked.append((run_dir, config))
        return results(3.0) | {"num_equal": 7, "speed_up": 1.5, "num_prompts": 8, "histogram": [1]}

    for most in (1, 2, 9):
        confirm(lab.config_of(tmp_path, tmp_path, confirm=most, confirm_limit=8), sweep, Device("cpu"), examine)
    assert [run_dir for run_dir, _ in asked] == [tmp_path / "runs" / f"000{number}" for number in (3, 2, 1)]
    assert {(config.offline, config.limit, config.device, config.target) for _, config in asked} == {
        (False, 8, "cpu", None)
    }
    kept = read_sweep(tmp_path)
    assert kept is not None
    assert [run.decoded and run.decoded["num_equal"] for run in kept.runs] == [7, 7, 7, None]
    assert "run 3 decoded with the target: 3.000 tokens a forward, 7/8 answers" in SweepReport(sweep).decoded()[1]


def test_decodes_of_other_prompts_are_made_again(lab, tmp_path, capsys):
    """What stands in one column of the ranking was measured on the same prompts."""
    own = {"store": "", "manifest": {}, "strategy": "grid", "count": None, "seed": None, "fields": [], "base": {}}
    runs = [RunRecord(number=i, overrides={}, state="finished", results=results(1.0 + i / 10)) for i in (1, 2)]
    sweep = Sweep(folder=tmp_path, halving=None, runs=runs, ranking=[2, 1], **own)
    asked: list[tuple[str, int | None]] = []

    def examine(run_dir: Path, config: EvaluateConfig) -> dict:
        asked.append((run_dir.name, config.limit))
        return results(3.0) | {"num_equal": 2, "speed_up": 1.5, "num_prompts": config.limit or 8}

    for most, limit in ((2, 2), (1, 5), (2, 5), (1, None)):
        confirm(lab.config_of(tmp_path, tmp_path, confirm=most, confirm_limit=limit), sweep, Device("cpu"), examine)
    assert asked == [("0002", 2), ("0001", 2), ("0002", 5), ("0001", 5), ("0002", None)]
    kept = read_sweep(tmp_path)
    assert kept is not None
    assert [run.decoded and run.decoded["num_prompts"] for run in kept.runs] == [None, 8]
    assert "runs 1, 2 decoded other prompts" in capsys.readouterr().err


def test_a_target_that_is_missing_hides_no_ranking(lab, tiny_store, tmp_path, capsys):
    config = lab.config_of(tiny_store, tmp_path / "sweep", fields={"seed": [1]}, confirm=1, target="nowhere")
    known = planned(config, {})
    make_folder_of(known.folder)
    known.runs[0].state, known.runs[0].results = "finished", results(1.5)
    (known.folder / known.runs[0].folder).mkdir()
    (known.folder / known.runs[0].folder / FACTS_NAME).touch()
    known.write()

    def examine(run_dir: Path, config: EvaluateConfig) -> dict:
        raise UserError("no such target", "a target", "give one")

    with pytest.raises(UserError, match="no such target"):
        sweep(config, {}, examine)
    assert "1.500 [1.400, 1.600]" in capsys.readouterr().err


def results(length: float) -> dict:
    means = {"acceptance_length": length, "acceptance_length_cycles": length}
    measured = {"step": 4, "num_parameters": 10, "draft_s": 0.1, "train_s": 1.0}
    return {**measured, **means, "intervals": {name: [length - 0.1, length + 0.1] for name in means}}
