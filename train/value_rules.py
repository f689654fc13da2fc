"""Of what kind a value of a JSON file is: rules that say whether its readers can take it.

A rule follows from a type, as the fields of a dataclass have theirs, or is made of other rules. Knows values; no file,
and of no key what it means.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

MOST_COUNT = 2**53  # whole numbers up to here are exact on an axis
MOST_NUMBER = 1e300  # beyond it a sum of many overflows
Rule = Callable[[Any], bool]


def of_type(hint: Any) -> Rule:
    """A value of a type like `dict[str, str] | None`, its parts not looked at; true and false are no numbers."""
    kinds = kinds_of(hint)
    if bool in kinds:
        return lambda value: isinstance(value, kinds)
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool)


def kinds_of(hint: Any) -> tuple[type, ...]:
    """The classes of a type hint: (dict, NoneType) of `dict[str, str] | None`; a whole number is a float too."""
    if isinstance(hint, UnionType):
        return tuple(kind for one in get_args(hint) for kind in kinds_of(one))
    return (int, float) if hint is float else (get_origin(hint) or hint,)


is_text, is_flag, is_whole, is_number, is_object = map(of_type, (str, bool, int, float, dict))


def is_count(value: Any) -> bool:
    """A count or a step."""
    return is_whole(value) and 0 <= value <= MOST_COUNT


def is_finite(value: Any) -> bool:
    return is_number(value) and abs(value) <= MOST_NUMBER


def require_unicode(value: Any) -> None:
    """Raises ValueError for half a character in a text of a JSON value: `"\\ud800"` parses, and cannot be printed."""
    json.dumps(value, ensure_ascii=False).encode()


def or_none(rule: Rule) -> Rule:
    return lambda value: value is None or rule(value)


def list_of(rule: Rule) -> Rule:
    return lambda value: isinstance(value, list) and all(map(rule, value))


def pair_of(rule: Rule) -> Rule:
    return lambda value: list_of(rule)(value) and len(value) == 2


def object_of(rules: Mapping[str, Rule]) -> Rule:
    """An object with these keys, perhaps among others; one that is not there is None."""
    return lambda value: is_object(value) and wrong_key(value, rules) is None


def values_of(rule: Rule) -> Rule:
    """An object of any keys, each of whose values keeps the rule."""
    return lambda value: is_object(value) and all(map(rule, value.values()))


def wrong_key(values: Mapping[str, Any], rules: Mapping[str, Rule]) -> str | None:
    """The first key of an object that breaks its rule, None where none does; one that is not there is None."""
    return next((name for name, rule in rules.items() if not rule(values.get(name))), None)


def wrong_field(record: Any, rules: Mapping[str, Rule] | None = None) -> str | None:
    """The same of a dataclass: each field has its type, and those of `rules` keep their rule."""
    own = {**rules_of(type(record)), **(rules or {})}
    return next((name for name, rule in own.items() if not rule(getattr(record, name))), None)


@cache
def rules_of(record_type: type) -> Mapping[str, Rule]:
    return {name: of_type(hint) for name, hint in get_type_hints(record_type).items()}
