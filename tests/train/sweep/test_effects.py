"""Ranking and main effects, against the formulas written out with numpy."""

import itertools
from collections import Counter

import numpy as np
import pytest
from dflash_offline.train.sweep.effects import labels, main_effects, ranked, share_text
from dflash_offline.train.sweep.plots import plot_effects
from dflash_offline.train.sweep.record import DEFINITIONS, RunRecord, Sweep
from dflash_offline.train.sweep.report import SweepReport


def finished(number: int, overrides: dict, length: float, parameters: int = 100) -> RunRecord:
    results = {"acceptance_length": length, "num_parameters": parameters}
    return RunRecord(number=number, overrides=overrides, state="finished", results=results)


def sweep_of(folder, runs: list[RunRecord], halving=None) -> Sweep:
    fields = list(dict.fromkeys(name for run in runs for name in run.overrides))
    own = {"store": "/store", "manifest": {}, "strategy": "grid", "count": None, "seed": None, "base": {}}
    return Sweep(folder=folder, fields=fields, halving=halving, runs=runs, **own)


def rung(step: int, length: float) -> dict:
    return {"step": step, "acceptance_length": length, "acceptance_length_cycles": length, "is_kept": True}


def test_the_ranking_goes_by_acceptance_then_parameters_then_number():
    runs = [finished(1, {}, 1.5, 200), finished(2, {}, 1.5, 100), finished(3, {}, 2.0, 900), finished(4, {}, 1.5, 100)]
    late = RunRecord(number=5, overrides={}, state="out", rungs=[rung(5, 9.0), rung(9, 3.0)])
    early = RunRecord(number=6, overrides={}, state="out", rungs=[rung(5, 9.5)])
    nothing = RunRecord(number=7, overrides={}, state="failed")
    assert ranked([*runs, early, nothing, late]) == [3, 2, 4, 1, 5, 6]


@pytest.mark.parametrize("seed", range(4))
def test_shares_and_means_are_those_of_the_slow_formula(tmp_path, seed):
    rng = np.random.default_rng(seed)
    runs = [
        finished(
            i,
            {"drafter.num_layers": int(rng.integers(1, 4)), "optim.name": str(rng.choice(["muon", "adamw"]))},
            float(rng.normal(2, 0.3)),
        )
        for i in range(1, 25)
    ]
    lengths = np.array([run.acceptance for run in runs])
    effects = {effect["field"]: effect for effect in main_effects(sweep_of(tmp_path, runs))}
    for name, found in effects.items():
        values = np.array([str(run.overrides[name]) for run in runs])
        between = sum((values == v).sum() * (lengths[values == v].mean() - lengths.mean()) ** 2 for v in set(values))
        assert found["share"] == pytest.approx(between / ((lengths - lengths.mean()) ** 2).sum())
        for value in found["values"]:
            own = lengths[values == value["label"]]
            assert (value["mean"], value["num_runs"]) == (pytest.approx(own.mean()), len(own))
            assert (value["low"], value["high"]) == (own.min(), own.max())
    shares = [effect["share"] for effect in main_effects(sweep_of(tmp_path, runs))]
    assert shares == sorted(shares, reverse=True)


def test_many_numbers_are_put_into_three_groups_that_are_named_by_what_they_cover(tmp_path):
    runs = [finished(i, {"optim.lr": 10.0**-i, "seed": 1}, float(i)) for i in range(1, 10)]
    (effect,) = main_effects(sweep_of(tmp_path, runs))  # the seed has one value: no effect
    assert [(value["label"], value["num_runs"]) for value in effect["values"]] == [
        ("1e-09 to 1e-07", 3),
        ("1e-06 to 0.0001", 3),
        ("0.001 to 0.1", 3),
    ]
    assert [value["mean"] for value in effect["values"]] == [8.0, 5.0, 2.0]


@pytest.mark.parametrize(
    "values, found",
    [
        ([1] * 10 + [2, 3, 4, 5, 6, 7], {"1": 10, "2 to 4": 3, "5 to 7": 3}),
        ([1, 2, 3, 4, 5, 6] + [7] * 10, {"1 to 3": 3, "4 to 6": 3, "7": 10}),
        ([1, 2, 3] + [4] * 10 + [5, 6, 7], {"1 to 3": 3, "4": 10, "5 to 7": 3}),
        ([1, 1.0, 2, 3, 4, 5, 6, 7], {"1": 2, "2 to 4": 3, "5 to 7": 3}),
        ([0.5, None, 1, 2, 3, 4, 5, 6, None], {"0.5 to 1": 2, "2 to 3": 2, "4 to 6": 3, "not set": 2}),
        ([3, 1, 2, "auto", None, 2], {"3": 1, "1": 1, "2": 2, "auto": 1, "not set": 1}),
    ],
    ids=str,
)
def test_equal_numbers_have_one_group_and_runs_without_one_have_another(values, found):
    assert dict(Counter(labels(values))) == found


@pytest.mark.parametrize("seed", range(20))
def test_the_three_groups_are_as_even_as_any_that_keep_equal_numbers_together(seed):
    rng = np.random.default_rng(seed)
    values = [int(value) for value in rng.zipf(1.6, 40) % 30]
    distinct, counts = sorted(set(values)), Counter(values)
    assert len(distinct) > 6
    found = labels(values)
    assert all(len({label for label, v in zip(found, values) if v == value}) == 1 for value in distinct)
    cuts = itertools.combinations(range(1, len(distinct)), 2)
    groups = [(distinct[:a], distinct[a:b], distinct[b:]) for a, b in cuts]
    best = min(sum(sum(counts[value] for value in part) ** 2 for part in parts) for parts in groups)
    assert sum(count**2 for count in Counter(found).values()) == best


def test_one_run_without_a_number_leaves_the_others_in_their_groups(tmp_path):
    runs = [finished(i, {"optim.lr": i / 100}, 2.0 + i % 3) for i in range(1, 9)] + [finished(9, {}, 2.0)]
    (effect,) = main_effects(sweep_of(tmp_path, runs))
    assert [value["num_runs"] for value in effect["values"]] == [2, 3, 3, 1]
    assert effect["values"][-1]["label"] == "not set"
    assert effect["share"] < 0.5


@pytest.mark.parametrize(
    "values, told",
    [
        ([1, 2, 3, 4, 5], "each run is alone with its value"),
        ([1, 2, 3, 4, 4], "3 of 5 runs are alone with their value"),
        ([1, 2, 4, 4], None),
    ],
)
def test_there_is_no_share_where_most_runs_are_alone_with_their_value(tmp_path, values, told):
    """Whatever such a field is, nearly all of the variance lies between its values."""
    runs = [finished(i, {"optim.lr": value}, 2.0 + i % 2) for i, value in enumerate(values, start=1)]
    sweep = sweep_of(tmp_path, runs)
    (effect,) = sweep.effects = main_effects(sweep)
    assert (effect["share"] is None) == (told is not None)
    if told is not None:
        assert f"  optim.lr: no share of the variance, as {told}" in SweepReport(sweep).effects()
        assert [value["num_runs"] for value in effect["values"]] == list(Counter(values).values())


@pytest.mark.parametrize("noise", [0.0, 1e-15, 1e-12])
def test_runs_that_differ_by_rounding_are_equal(tmp_path, noise):
    length = 1.583395631066883
    runs = [finished(i, {"seed": i % 2}, length * (1 + noise * i)) for i in range(3)]
    (effect,) = main_effects(sweep_of(tmp_path, runs))
    assert effect["share"] is None
    assert share_text(effect) == "no share of the variance, as all runs are equal"


def test_with_rungs_effects_are_those_of_the_first_one(tmp_path):
    runs = [finished(i, {"seed": i % 2}, 9.0) for i in (1, 2)]
    runs += [RunRecord(number=3, overrides={"seed": 1}, state="out")]
    for run, length in zip(runs, (1.0, 2.0, 3.0)):
        run.rungs = [rung(5, length)]
    (effect,) = main_effects(sweep_of(tmp_path, runs, {"steps": [5], "keep": 0.5}))
    assert effect["step"] == 5
    assert {value["label"]: value["mean"] for value in effect["values"]} == {"1": 2.0, "0": 2.0}
    assert effect["share"] == 0.0


def test_equal_runs_have_no_share_and_one_run_no_effect(tmp_path):
    runs = [finished(i, {"seed": i}, 2.0) for i in (1, 2)]
    assert main_effects(sweep_of(tmp_path, runs))[0]["share"] is None
    assert main_effects(sweep_of(tmp_path, runs[:1])) == []


def test_shares_of_fields_that_go_together_add_up_to_more_than_all_and_that_is_said(tmp_path):
    runs = [finished(i, {"seed": i % 2, "optim.lr": 0.1 * (i % 2)}, 2.0 + i % 2) for i in range(4)]
    sweep = sweep_of(tmp_path, runs)
    sweep.effects = main_effects(sweep)
    assert sum(effect["share"] for effect in sweep.effects) == pytest.approx(2.0)
    text = "\n".join(SweepReport(sweep).effects())
    assert "  seed: 100 % of the variance, this field alone" in text
    assert "add up to more than 100 %" in text
    assert [share_text(effect) for effect in sweep.effects] == ["100 % of the variance, this field alone"] * 2
    assert "Each field alone" in DEFINITIONS["share"]


def test_the_picture_is_drawn_where_there_is_an_effect(tmp_path):
    sweep = sweep_of(tmp_path, [finished(i, {"seed": i, "optim.lr": 0.1 * i}, 2.0 + i) for i in (1, 2)])
    assert plot_effects(sweep) is None
    sweep.effects = main_effects(sweep)
    path = plot_effects(sweep)
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")


def test_runs_that_leave_a_field_to_all_have_its_value(tmp_path):
    """Of a list, each run names what it likes: the first and the second have one learning rate."""
    runs = [finished(1, {"optim.lr": 0.01, "seed": 1}, 1.0), finished(2, {"seed": 2}, 2.0)]
    found = sweep_of(tmp_path, runs)
    found.base = {"optim.lr": 0.01}
    assert [effect["field"] for effect in main_effects(found)] == ["seed"]
    found.base = {}
    (effect,) = [effect for effect in main_effects(found) if effect["field"] == "optim.lr"]
    assert [value["label"] for value in effect["values"]] == ["0.01", "not set"]
    found.effects = main_effects(found)
    assert plot_effects(found) is not None


def test_a_default_is_a_value_like_any_other(tmp_path):
    runs = [
        finished(1, {"loss.weights": "decay"}, 1.0),
        finished(2, {}, 2.0),
        finished(3, {"loss.weights": "dpace"}, 3.0),
    ]
    (effect,) = main_effects(sweep_of(tmp_path, runs))
    assert [(value["label"], value["num_runs"]) for value in effect["values"]] == [("decay", 2), ("dpace", 1)]


def test_a_run_that_failed_too_late_is_not_said_to_be_taken_up(tmp_path):
    runs = [
        RunRecord(number=1, overrides={}, state="out", rungs=[rung(5, 1.0)]),
        RunRecord(number=2, overrides={}, state="failed", error="x"),
    ]
    found = sweep_of(tmp_path, runs, halving={"steps": [5], "keep": 0.5})
    assert SweepReport(found).faults()[2:] == ["runs 2 failed, and their rung was decided without them"]
    found.runs.append(RunRecord(number=3, overrides={}, state="interrupted", error="y", rungs=[rung(5, 2.0)]))
    assert SweepReport(found).faults()[-1] == "the same command takes the others up again"
    found.runs[1:2] = []
    assert SweepReport(found).faults()[-1] == "the same command takes them up again"
