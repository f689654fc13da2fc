"""Which run is best, and which setting mattered: pure functions of the records of the runs."""

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from ..value_rules import is_number
from .defaults import value_in
from .record import FINISHED, RunRecord, Sweep, value_text

ALONE = "each field alone: in an unbalanced sweep they can add up to more than 100 %"
MOST_LABELS = 6  # distinct numbers of a field that are each a group; more than that are put into three groups
NOT_SET = "not set"
EQUAL = 1e-9  # acceptance lengths no further apart than this part of the largest differ by rounding alone


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
    effects = [found for name in sweep.fields if (found := effect(sweep, name, step)) is not None]
    return sorted(effects, key=lambda effect: -(effect["share"] or 0.0))  # stable: in the order of the fields


def compared(run: RunRecord, step: int | None) -> float | None:
    """The acceptance length that effects are about."""
    if step is not None:
        return run.rungs[0]["acceptance_length"] if run.rungs else None
    return run.acceptance if run.state == FINISHED else None


def effect(sweep: Sweep, name: str, step: int | None) -> dict[str, Any] | None:
    """The effect of one field on the acceptance length at a step; None where the runs have one value of it."""
    groups = {label: [length for _, length in runs] for label, runs in grouped(sweep, name, step).items()}
    if len(groups) < 2:
        return None
    values = [
        {"label": label, "num_runs": len(group), "mean": mean_of(group), "low": min(group), "high": max(group)}
        for label, group in groups.items()
    ]
    share = explained(list(groups.values())) if why_no_share(values) is None else None
    return {"field": name, "share": share, "values": values, "step": step}


def grouped(sweep: Sweep, name: str, step: int | None) -> dict[str, list[tuple[RunRecord, float]]]:
    """The runs with an acceptance length at a step (None: at the end), and it, by what they have a field set to.

    Groups of numbers come first, the smallest first, then the others in the order of their runs.
    """
    runs = [(run, length) for run in sweep.runs if (length := compared(run, step)) is not None]
    values = [value_in(sweep, run, name) for run, _ in runs]
    groups: dict[str, list[tuple[RunRecord, float]]] = {}
    told = zip(values, labels(values), runs)
    for _, label, run in sorted(told, key=lambda one: one[0] if is_number(one[0]) else math.inf):
        groups.setdefault(label, []).append(run)
    return groups


def mean_of(lengths: Sequence[float]) -> float:
    return math.fsum(lengths) / len(lengths)


def explained(groups: Sequence[Sequence[float]]) -> float:
    """The share of the variance that lies between the groups, 0 to 1; not all numbers may be equal."""
    largest = max(abs(length) for group in groups for length in group)  # so that no square overflows
    scaled = [[length / largest for length in group] for group in groups]
    every = [length for group in scaled for length in group]
    mean = mean_of(every)
    total = math.fsum((length - mean) ** 2 for length in every)
    return min(1.0, math.fsum(len(group) * (mean_of(group) - mean) ** 2 for group in scaled) / total)


def why_no_share(values: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a share of the variance would mean nothing, in words; None where it does mean something.

    `values` are those of an effect. A run alone with its value counts as explained whatever its acceptance length is,
    so where most runs are alone the share is near 100 % for any field.
    """
    low, high = min(value["low"] for value in values), max(value["high"] for value in values)
    if high - low <= EQUAL * max(abs(low), abs(high)):
        return "all runs are equal"
    counts = [value["num_runs"] for value in values]
    num_runs, num_alone = sum(counts), counts.count(1)
    if num_alone == num_runs:
        return "each run is alone with its value"
    return f"{num_alone} of {num_runs} runs are alone with their value" if 2 * num_alone > num_runs else None


def share_text(effect: Mapping[str, Any]) -> str:
    """How much of the variance a field explains, or why that is not said, in words."""
    if effect["share"] is None:
        return f"no share of the variance, as {why_no_share(effect['values'])}"
    return f"{100 * effect['share']:.0f} % of the variance, this field alone"


def labels(values: Sequence[Any]) -> list[str]:
    """The group of each value: the value itself, or of many numbers the range it lies in, like 0.001 to 0.004.

    Equal values have one group. None is a default that the run chooses by itself, and a group of its own.
    """
    numbers = sorted(value for value in values if is_number(value))
    texts = {value: value_text(value) for value in numbers}
    if len(set(texts.values())) > MOST_LABELS:
        texts = ranges(numbers, texts)
    return [texts[v] if is_number(v) else NOT_SET if v is None else value_text(v) for v in values]


def ranges(numbers: Sequence[float], texts: Mapping[float, str]) -> dict[float, str]:
    """The range of each of the sorted numbers: three, of as equally many runs as can be where equal ones stay together.

    `texts` has the words of each number; those that read the same stay together, too.
    """
    count = len(numbers)
    starts = [i for i in range(1, count) if texts[numbers[i]] != texts[numbers[i - 1]]]
    cuts: list[tuple[int, int]] = []  # where the second and the third range begin
    for place, third in enumerate(starts[1:], start=1):
        half = bisect(starts, third / 2, 0, place)  # the best second one lies just before or behind the middle
        cuts += [(second, third) for second in starts[max(0, half - 1) : min(half + 1, place)]]
    second, third = min(cuts, key=lambda cut: cut[0] ** 2 + (cut[1] - cut[0]) ** 2 + (count - cut[1]) ** 2)
    found = {}
    for part in (numbers[:second], numbers[second:third], numbers[third:]):
        low, high = texts[part[0]], texts[part[-1]]
        found |= dict.fromkeys(part, low if low == high else f"{low} to {high}")
    return found
