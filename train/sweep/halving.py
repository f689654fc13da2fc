"""Successive halving: which runs go on behind a rung. A pure function of the records of the runs.

At a rung all runs of a round are compared at the same step by the acceptance length of their exam there; the best
`keep` of them go on (rounded up), equal ones by their numbers. Decisions do not depend on the order in which runs
came to the rung: nothing is decided before each of them did, or failed by an error of its own, which counts as last.
"""

import math
from collections.abc import Sequence

from .record import FAILED, OUT, PAUSED, WAITING, RunRecord, Sweep


def decide(runs: Sequence[RunRecord], steps: Sequence[int], keep: float) -> list[int]:
    """Decides every rung that can be decided, in place; gives the steps of those that now were."""
    decided: list[int] = []
    for rung, step in enumerate(steps):
        entered = [run for run in runs if rung == 0 or has_kept(run, rung - 1)]
        reached = [run for run in entered if len(run.rungs) > rung]
        if is_decided(runs, rung):
            continue
        if not reached or any(run.state != FAILED for run in entered if run not in reached):
            break
        num_kept = max(1, math.ceil(round(keep * len(entered), 9)))
        best = sorted(reached, key=lambda run: (-(run.rungs[rung]["acceptance_length"] or 0.0), run.number))
        for place, run in enumerate(best):
            run.rungs[rung]["is_kept"] = place < num_kept
            if run.state == PAUSED:
                run.state = WAITING if place < num_kept else OUT
        decided.append(step)
    return decided


def has_kept(run: RunRecord, rung: int) -> bool:
    return len(run.rungs) > rung and run.rungs[rung]["is_kept"] is True


def is_decided(runs: Sequence[RunRecord], rung: int) -> bool:
    return any(len(run.rungs) > rung and run.rungs[rung]["is_kept"] is not None for run in runs)


def may_try_again(runs: Sequence[RunRecord], run: RunRecord) -> bool:
    """Whether a run that failed still has a place: the rung that it would come to is not decided without it."""
    return not is_decided(runs, len(run.rungs))


def too_late(sweep: Sweep) -> list[RunRecord]:
    """The runs that failed and have no place any more."""
    return [run for run in sweep.with_state(FAILED) if not may_try_again(sweep.runs, run)]
