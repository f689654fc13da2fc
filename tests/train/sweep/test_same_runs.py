"""Runs of a sweep that are one run, with every default filled in: refused by name, before the first starts."""

import pytest
from dflash_offline import UserError
from dflash_offline.train.sweep.check import Device, require_all
from dflash_offline.train.sweep.record import Sweep, shown
from dflash_offline.train.sweep.sweep import planned

CPU = [Device("cpu")]


def plan(lab, store, out, without: str = "", **own) -> Sweep:
    base = {name: value for name, value in lab.base.items() if name != without}
    return planned(lab.config_of(store, out, **own), base)


@pytest.mark.parametrize(
    "without, fields",
    [
        ("drafter.num_layers", {"drafter.num_layers": ["none", 5]}),
        ("optim.lr", {"optim.lr": ["none", 0.02]}),
        ("", {"loss.gamma": [4.0, "none"]}),  # of blocks of 8
        ("rows.anchors", {"rows.anchors": [16, "none"]}),
        ("steps", {"epochs": [0.01, 0.02]}),  # of a store of a few rows
    ],
)
def test_values_that_are_the_default_make_no_run_of_their_own(lab, tiny_store, tmp_path, without, fields):
    sweep = plan(lab, tiny_store, tmp_path / "out", without, fields=fields)
    with pytest.raises(UserError) as caught:
        require_all(sweep, sweep.runs, CPU)
    first, second = (shown(run.overrides) for run in sweep.runs)
    assert caught.value.happened == (
        f"1 of 2 runs cannot be trained (run 2, {second}): it is the same run as run 1 ({first}), with every default "
        "filled in"
    )
    assert len(str(caught.value).splitlines()) == 3


def test_runs_of_a_list_that_set_different_defaults_are_the_same(lab, tiny_store, tmp_path):
    runs = ({"seed": 0}, {"seed": 1}, {"noise": 0.0})
    sweep = plan(lab, tiny_store, tmp_path / "out", strategy="list", runs=runs)
    with pytest.raises(UserError, match=r"\(run 3, noise=0\): it is the same run as run 1 \(seed=0\)"):
        require_all(sweep, sweep.runs, CPU)


def test_settings_that_change_no_weights_may_be_compared(lab, tiny_store, tmp_path):
    sweep = plan(lab, tiny_store, tmp_path / "out", "cpu_threads", fields={"cpu_threads": [1, 2]})
    require_all(sweep, sweep.runs, CPU)


def test_runs_that_were_checked_before_go_on(lab, tiny_store, tmp_path):
    sweep = plan(lab, tiny_store, tmp_path / "out", strategy="list", runs=({"seed": 0}, {"noise": 0.0}))
    for run in sweep.runs:
        run.steps = 12
    require_all(sweep, sweep.runs, CPU)
