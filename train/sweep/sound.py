"""Whether a record of sweep.json holds what its readers take; a file that another hand changed is told by name.

Knows the record's words; no file.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .record import RunRecord, Sweep

MOST_NUMBER = 1e300  # beyond it a sum of many overflows
Rule = Callable[[Any], bool]


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_whole(value: Any) -> bool:
    """A count or a step."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_NUMBER


def is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MOST_NUMBER


def is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def or_none(rule: Rule) -> Rule:
    return lambda value: value is None or rule(value)


def list_of(rule: Rule) -> Rule:
    return lambda value: isinstance(value, list) and all(map(rule, value))


def object_of(rules: Mapping[str, Rule]) -> Rule:
    """An object with these keys; one that is not there is None."""
    return lambda value: isinstance(value, Mapping) and all(rule(value.get(name)) for name, rule in rules.items())


def has_both_lengths(value: Mapping[str, Any]) -> bool:
    """Both means, or neither: nothing was measured."""
    found = [value.get(name) for name in ("acceptance_length", "acceptance_length_cycles")]
    return all(map(is_finite, found)) or found == [None, None]


def is_interval(value: Any) -> bool:
    return list_of(is_finite)(value) and len(value) == 2


def are_intervals(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(or_none(is_interval), value.values()))


RUNG = object_of({"step": is_whole, "is_kept": lambda value: value is None or isinstance(value, bool)})
RESULTS = object_of(
    {
        **{"step": is_whole, "num_parameters": is_whole, "intervals": are_intervals},
        **{"draft_s": is_finite, "train_s": is_finite, "loss": or_none(is_finite)},
        **{"num_prompts": or_none(is_whole), "num_cycles": or_none(is_whole), "origin": or_none(is_text)},
    }
)
DECODED = object_of(
    {
        **{"intervals": are_intervals, "num_prompts": is_whole},
        **{"num_equal": or_none(is_whole), "speed_up": or_none(is_finite)},
    }
)
VALUE = object_of({"label": is_text, "num_runs": is_whole, **dict.fromkeys(("mean", "low", "high"), is_finite)})
EFFECT = object_of({"field": is_text, "share": or_none(is_finite), "values": list_of(VALUE), "step": or_none(is_whole)})
HALVING = object_of({"steps": list_of(is_whole), "keep": is_finite})
OF_SWEEP: dict[str, Rule] = {
    **{"store": is_text, "plan_sha256": is_text, "strategy": is_text, "base": is_mapping, "effects": list_of(EFFECT)},
    **{"devices": list_of(is_text), "fields": list_of(is_text), "halving": or_none(HALVING)},
}
OF_RUN: dict[str, Rule] = {
    **{"overrides": is_mapping, "device": or_none(is_text), "step": is_whole, "steps": or_none(is_whole)},
    **{"error": or_none(is_text), "rungs": list_of(lambda rung: RUNG(rung) and has_both_lengths(rung))},
    "results": or_none(lambda found: RESULTS(found) and has_both_lengths(found)),
    "decoded": or_none(lambda found: DECODED(found) and has_both_lengths(found)),
}


def require_sound(sweep: "Sweep", states: Collection[str]) -> None:
    """Raises ValueError, naming the key, where the record is not as one is written; `states` are those of a run."""
    numbers = [run.number for run in sweep.runs]
    wrong = [name for name, rule in OF_SWEEP.items() if not rule(getattr(sweep, name))]
    if not numbers or numbers != list(range(1, len(numbers) + 1)):
        wrong.append("runs")
    wrong += [f"run {run.number}" for run in sweep.runs if not is_run(run, states)]
    if not wrong and not is_ranking(sweep):
        wrong.append("ranking")
    if wrong:
        raise ValueError(f"see {wrong[0]}")


def is_run(run: "RunRecord", states: Collection[str]) -> bool:
    return is_text(run.state) and run.state in states and all(rule(getattr(run, name)) for name, rule in OF_RUN.items())


def is_ranking(sweep: "Sweep") -> bool:
    """Distinct numbers of runs that have an acceptance length."""
    known = {run.number for run in sweep.runs if run.acceptance is not None}
    found = sweep.ranking
    return list_of(is_whole)(found) and set(found) <= known and len(set(found)) == len(found)
