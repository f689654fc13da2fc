"""Successive halving: who goes on does not depend on the order in which runs come to a rung, nor on kills."""

import copy
import math

import numpy as np
import pytest
from dflash_offline.train.sweep.halving import decide, may_try_again
from dflash_offline.train.sweep.record import RunRecord

STEPS = [10, 20]


def runs_of(count: int) -> list[RunRecord]:
    return [RunRecord(number=number, overrides={"seed": number}) for number in range(1, count + 1)]


def reach(run: RunRecord, length: float | None) -> None:
    rung = {"step": STEPS[len(run.rungs)], "acceptance_length": length, "acceptance_length_cycles": length}
    run.rungs.append({**rung, "is_kept": None})
    run.state = "paused"


def play(lengths: np.ndarray, keep: float, rng: np.random.Generator, failing: set[tuple[int, int]]) -> list[RunRecord]:
    """A whole sweep: runs come to their rungs in random order; lengths [runs, rungs]; failing: (run, rung)."""
    runs = runs_of(len(lengths))
    while waiting := [run for run in runs if run.state == "waiting"]:
        run = waiting[int(rng.integers(len(waiting)))]
        rung = len(run.rungs)
        if (run.number, rung) in failing:
            run.state = "failed"
        elif rung == len(STEPS):
            run.state = "finished"
        else:
            reach(run, float(lengths[run.number - 1, rung]))
        decide(runs, STEPS, keep)
    return runs


def slow_survivors(lengths: np.ndarray, keep: float, failing: set[tuple[int, int]]) -> list[int]:
    """Round by round, as the page says it."""
    alive = list(range(1, len(lengths) + 1))
    for rung in range(len(STEPS)):
        num_kept = math.ceil(round(keep * len(alive), 9))
        there = [number for number in alive if (number, rung) not in failing]
        alive = sorted(there, key=lambda number: (-lengths[number - 1, rung], number))[:num_kept]
    return sorted(number for number in alive if (number, len(STEPS)) not in failing)


@pytest.mark.parametrize("seed", range(20))
def test_survivors_are_those_of_the_slow_rule_in_any_order(seed):
    rng = np.random.default_rng(seed)
    count, keep = int(rng.integers(1, 12)), float(rng.choice([0.2, 0.34, 0.5, 0.9]))
    lengths = rng.integers(1, 4, (count, len(STEPS))).astype(float)  # ties on purpose
    failing = {(int(number), int(rng.integers(3))) for number in rng.integers(1, count + 1, 2)} if seed % 2 else set()
    outcomes = [play(lengths, keep, rng, failing) for _ in range(3)]
    assert outcomes[0] == outcomes[1] == outcomes[2]
    finished = [run.number for run in outcomes[0] if run.state == "finished"]
    assert finished == slow_survivors(lengths, keep, failing)
    assert {run.state for run in outcomes[0]} <= {"finished", "out", "failed"}


@pytest.mark.parametrize("state", ["waiting", "running", "interrupted"])
def test_a_rung_waits_for_a_run_that_was_interrupted_and_not_for_one_that_failed(state):
    runs = runs_of(4)
    for run, length in zip(runs[:3], (1.0, 3.0, 2.0)):
        reach(run, length)
    runs[3].state = state
    before = copy.deepcopy(runs)
    assert decide(runs, STEPS, 0.5) == []
    assert runs == before
    assert may_try_again(runs, runs[3])
    runs[3].state = "failed"
    assert decide(runs, STEPS, 0.5) == [10]
    assert [run.state for run in runs] == ["out", "waiting", "waiting", "failed"]
    assert not may_try_again(runs, runs[3])


def test_nothing_to_measure_comes_last():
    runs = runs_of(2)
    reach(runs[0], None)
    reach(runs[1], 1.0)
    decide(runs, STEPS, 0.5)
    assert [run.state for run in runs] == ["out", "waiting"]
