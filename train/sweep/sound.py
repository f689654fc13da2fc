"""Whether a record of sweep.json holds what its readers take; a file that another hand changed is told by name.

Knows the record's words; no file.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ...store.ranges import ALL, spans
from ..value_rules import (
    Rule,
    is_count,
    is_finite,
    is_flag,
    is_text,
    list_of,
    object_of,
    or_none,
    pair_of,
    values_of,
    wrong_field,
)

if TYPE_CHECKING:
    from .record import RunRecord, Sweep


def has_both_lengths(value: Mapping[str, Any]) -> bool:
    """Both means, or neither: nothing was measured."""
    found = [value.get(name, "absent") for name in ("acceptance_length", "acceptance_length_cycles")]
    return all(map(is_finite, found)) or found == [None, None]


INTERVALS = values_of(or_none(pair_of(is_finite)))
RUNG = object_of({"step": is_count, "is_kept": or_none(is_flag)})
RESULTS = object_of(
    {
        **{"step": is_count, "num_parameters": is_count, "intervals": INTERVALS},
        **{"draft_s": is_finite, "train_s": is_finite, "loss": or_none(is_finite)},
        **{"num_prompts": or_none(is_count), "num_cycles": or_none(is_count), "origin": or_none(is_text)},
    }
)
DECODED = object_of(
    {
        **{"intervals": INTERVALS, "num_prompts": is_count},
        **{"limit": or_none(is_count), "num_equal": or_none(is_count), "speed_up": or_none(is_finite)},
    }
)
VALUE = object_of({"label": is_text, "num_runs": is_count, **dict.fromkeys(("mean", "low", "high"), is_finite)})
EFFECT = object_of({"field": is_text, "share": or_none(is_finite), "values": list_of(VALUE), "step": or_none(is_count)})
HALVING = object_of({"steps": list_of(is_count), "keep": is_finite})
OF_SWEEP: dict[str, Rule] = {
    **{"devices": list_of(is_text), "fields": list_of(is_text), "effects": list_of(EFFECT)},
    "halving": or_none(HALVING),
}
OF_RUN: dict[str, Rule] = {
    **{"step": is_count, "steps": or_none(is_count)},
    "rungs": list_of(lambda rung: RUNG(rung) and "is_kept" in rung and has_both_lengths(rung)),
    "results": or_none(lambda found: RESULTS(found) and has_both_lengths(found)),
    "decoded": or_none(lambda found: DECODED(found) and has_both_lengths(found)),
}
"""What is asked of a record beyond the types of its fields."""


def require_sound(sweep: "Sweep", states: Collection[str]) -> None:
    """Raises ValueError, naming the key, where the record is not as one is written; `states` are those of a run."""
    numbers = [run.number for run in sweep.runs]
    wrong = [name] if (name := wrong_field(sweep, OF_SWEEP)) else []
    if not numbers or numbers != list(range(1, len(numbers) + 1)):
        wrong.append("runs")
    wrong += [f"run {run.number}" for run in sweep.runs if not is_run(run, states)]
    if not wrong and not has_segments(sweep):
        wrong.append("segments")
    if not wrong and not is_ranking(sweep):
        wrong.append("ranking")
    if wrong:
        raise ValueError(f"see {wrong[0]}")


def has_segments(sweep: "Sweep") -> bool:
    """Segments that its store has, or none yet. Raises ValueError for text that names none."""
    ranges = [] if sweep.segments in (None, ALL) else spans(sweep.segments)
    return not ranges or ranges[-1][1] < sweep.manifest["num_segments"]


def is_run(run: "RunRecord", states: Collection[str]) -> bool:
    return wrong_field(run, OF_RUN) is None and run.state in states


def is_ranking(sweep: "Sweep") -> bool:
    """Distinct numbers of runs that have an acceptance length."""
    known = {run.number for run in sweep.runs if run.acceptance is not None}
    found = sweep.ranking
    return list_of(is_count)(found) and set(found) <= known and len(set(found)) == len(found)
