"""Rules for values of JSON files: from types as from other rules, and the first key or field that breaks its own."""

from dataclasses import dataclass
from typing import Any

import pytest
from dflash_offline.train.value_rules import (
    is_count,
    is_finite,
    is_text,
    list_of,
    object_of,
    of_type,
    or_none,
    pair_of,
    values_of,
    wrong_field,
    wrong_key,
)

VALUES = [None, True, 0, -1, 1.5, float("nan"), 10**400, "a", [], [1], [1, 2], {}, {"a": 1}, {"a": None}]
TAKEN = {
    "int": (of_type(int), [0, -1, 10**400]),
    "float": (of_type(float), [0, -1, 1.5, float("nan"), 10**400]),
    "bool | None": (of_type(bool | None), [None, True]),
    "dict[str, str] | None": (of_type(dict[str, str] | None), [None, {}, {"a": 1}, {"a": None}]),
    "list[int] | float": (of_type(list[int] | float), [0, -1, 1.5, float("nan"), 10**400, [], [1], [1, 2]]),
    "count": (is_count, [0]),
    "finite": (is_finite, [0, -1, 1.5]),
    "text or none": (or_none(is_text), [None, "a"]),
    "list of counts": (list_of(is_count), [[], [1], [1, 2]]),
    "pair of counts": (pair_of(is_count), [[1, 2]]),
    "object": (object_of({"a": is_count}), [{"a": 1}]),
    "object without": (object_of({"a": or_none(is_count)}), [{}, {"a": 1}, {"a": None}]),
    "values": (values_of(is_count), [{}, {"a": 1}]),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_rule_takes_its_values_alone(name: str) -> None:
    rule, taken = TAKEN[name]
    assert list(map(repr, filter(rule, VALUES))) == list(map(repr, taken))


@dataclass(slots=True)
class Record:
    name: str
    steps: list[int]
    share: float | None = None


@pytest.mark.parametrize(
    "record, wrong",
    [
        (Record("a", [1], 1), None),
        (Record("a", [-1]), "steps"),
        (Record(1, "x"), "name"),  # type: ignore[arg-type]
        (Record("a", [], True), "share"),
    ],
)
def test_the_first_field_that_breaks_its_rule_is_named(record: Any, wrong: str | None) -> None:
    rules = {"steps": list_of(is_count)}
    assert wrong_field(record, rules) == wrong
    values = {name: getattr(record, name) for name in ("name", "steps", "share")}
    assert wrong_key(values, {"name": is_text, **rules, "share": or_none(of_type(float))}) == wrong


def test_a_field_without_a_rule_of_its_own_keeps_its_type() -> None:
    assert wrong_field(Record("a", [-1])) is None
