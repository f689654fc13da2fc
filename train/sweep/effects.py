"""Which run is best, and which setting mattered: pure functions of the records of the runs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..value_rules import is_number
from .defaults import value_in
from .record import FINISHED, RunRecord, Sweep, value_text

ALONE = "each field alone: in an unbalanced sweep they can add up to more than 100 %"
MOST_LABELS = 6  # distinct values of a field that each stand alone; more numbers than that are cut into thirds
NOT_SET = "not set"
THIRDS = ("low third", "middle third", "high third")


def ranked(runs: Sequence[RunRecord]) -> list[int]:
    """Numbers of the runs that have an acceptance length, the best first; `DEFINITIONS['ranking']` is the rule."""

    def place(run: RunRecord) -> tuple[float, ...]:
        assert run.acceptance is not None
        parameters = run.results["num_parameters"] if run.results is not None else 0
        return (run.state != FINISHED, -len(run.rungs), -run.acceptance, parameters, run.number)

    return [run.number for run in sorted((run for run in runs if run.acceptance is not None), key=place)]


def main_effects(sweep: Sweep) -> list[dict[str, Any]]:
    """For each field that differs between runs, acceptance by value and the share that it explains; strongest first.

    With rungs, of all runs at the first rung, which every run comes to: later ones only good runs reach.
    """
    step = sweep.rungs[0] if sweep.rungs else None
    lengths = {run.number: length for run in sweep.runs if (length := compared(run, step)) is not None}
    runs = [run for run in sweep.runs if run.number in lengths]
    effects = [found for name in sweep.fields if (found := effect(sweep, name, runs, lengths, step)) is not None]
    return sorted(effects, key=lambda effect: -(effect["share"] or 0.0))  # stable: in the order of the fields


def compared(run: RunRecord, step: int | None) -> float | None:
    """The acceptance length that effects are about."""
    if step is not None:
        return run.rungs[0]["acceptance_length"] if run.rungs else None
    return run.acceptance if run.state == FINISHED else None


def effect(
    sweep: Sweep, name: str, runs: Sequence[RunRecord], lengths: dict[int, float], step: int | None
) -> dict[str, Any] | None:
    """The effect of one field over these runs; None where they have one value of it."""
    groups: dict[str, list[float]] = {}
    for run, label in zip(runs, labels([value_in(sweep, run, name) for run in runs])):
        groups.setdefault(label, []).append(lengths[run.number])
    if len(groups) < 2:
        return None
    every = [length for group in groups.values() for length in group]
    mean = math.fsum(every) / len(every)
    total = math.fsum((length - mean) ** 2 for length in every)
    between = math.fsum(len(group) * (math.fsum(group) / len(group) - mean) ** 2 for group in groups.values())
    names = [third for third in THIRDS if third in groups] or list(groups)
    values = [
        {"label": n, "num_runs": len(g), "mean": math.fsum(g) / len(g), "low": min(g), "high": max(g)}
        for n, g in ((n, groups[n]) for n in names)
    ]
    return {"field": name, "share": min(1.0, between / total) if total else None, "values": values, "step": step}


def share_text(effect: Mapping[str, Any]) -> str:
    """How much of the variance a field explains, in words."""
    share = effect["share"]
    return "all runs are equal" if share is None else f"{100 * share:.0f} % of the variance, this field alone"


def labels(values: Sequence[Any]) -> list[str]:
    """The group of each value: the value itself, or, of many numbers, the third of the runs that it lies in.

    None is a default that the run chooses by itself.
    """
    if not all(map(is_number, values)) or len(set(map(value_text, values))) <= MOST_LABELS:
        return [NOT_SET if value is None else value_text(value) for value in values]
    order = sorted(values)
    cuts = [order[len(order) // 3], order[2 * len(order) // 3]]
    return [THIRDS[sum(value >= cut for cut in cuts)] for value in values]
