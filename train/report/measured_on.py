"""On what runs were trained and measured: whether their acceptance lengths compare, and what differs where not."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...store.manifest import ABSENT, DESCRIPTION_ONLY, LATER_FACTS
from ..facts import RunFacts

SHOWN_FACTS, SHOWN_RUNS, SHOWN_CHARACTERS = 4, 4, 24
FIRST = ("target.name", "target.weights_sha256", "codec", "plan_sha256")  # the others follow in the manifest's order


def unlike(runs: Mapping[str, RunFacts]) -> str | None:
    """What differs between the stores and the held-out answers of runs by their names; None where nothing does.

    A drafter of some of the store's taps was measured like one of all of them.
    """
    own = {name: dict(measured_on(facts)) for name, facts in runs.items()}
    names = dict.fromkeys(name for facts in own.values() for name in facts)
    told = []
    for name in names:
        values = {run: facts.get(name, ABSENT) for run, facts in own.items()}
        if name.removeprefix("store.") in LATER_FACTS:
            values = {run: value for run, value in values.items() if value != ABSENT}
        by_text: dict[str, list[str]] = {}
        for run, value in values.items():
            by_text.setdefault(json.dumps(value, sort_keys=True), []).append(run)
        if len(by_text) > 1:
            told.append(f"{name} is " + ", ".join(f"{shortened(t)} in {listed(r)}" for t, r in by_text.items()))
    if not told:
        return None
    more = f"; and {len(told) - SHOWN_FACTS} facts more" if len(told) > SHOWN_FACTS else ""
    happened = "these runs were not trained on the same store and measured on the same held-out answers"
    return f"{happened}, so do not rank them by acceptance: {'; '.join(told[:SHOWN_FACTS])}{more}"


def measured_on(facts: RunFacts) -> Iterator[tuple[str, Any]]:
    """Names and values of all that decides on what a run's exams are held, the plainest first."""
    yield "the number of answers of an exam", min(facts.eval_samples, facts.num_held_out)
    yield "the number of held-out answers", facts.num_held_out
    yield "segments", facts.segments
    store = dict(flat(facts.store))
    for name in (*FIRST, *store):
        yield f"store.{name}", store.get(name, ABSENT)
    yield "snapshot", facts.snapshot


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a manifest, what only describes it left out."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in DESCRIPTION_ONLY:
            continue
        if isinstance(value, dict):
            yield from flat(value, f"{name}.")
        else:
            yield name, value


def shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def listed(runs: Sequence[str]) -> str:
    """Names of runs, the first few of many."""
    more = len(runs) - SHOWN_RUNS
    return f"{', '.join(runs[:SHOWN_RUNS])} and {more} more" if more > 0 else " and ".join(runs)
