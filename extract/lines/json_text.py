"""Values of a line that are given as text: JSON inside a text, what text says nothing, a value in words.

Knows no key of a line.
"""

import json
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any

from .json_lines import DECODER, LeftOut, without_surrogates

UNSEEN = {"Cc", "Cf", "Zs", "Zl", "Zp"}
"""Unicode's control, format and separator characters: whitespace, NUL, byte order marks, zero widths."""
UNSEEN_ALONE = frozenset(
    chain(
        map(ord, "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"),
        range(0xFE00, 0xFE10),
        range(0xE0100, 0xE01F0),
    )
)
"""Letters and marks that Unicode draws as nothing (Default_Ignorable_Code_Point), and Braille's empty cell."""

NUM_REPLACED: ContextVar[dict[str, int] | None] = ContextVar("NUM_REPLACED", default=None)


@contextmanager
def replacements_counted() -> Iterator[dict[str, int]]:
    """How many lone surrogates became U+FFFD in each JSON text that `from_json_text` reads while the context lasts."""
    found: dict[str, int] = {}
    token = NUM_REPLACED.set(found)
    try:
        yield found
    finally:
        NUM_REPLACED.reset(token)


def is_blank(text: str) -> bool:
    """True for a text in which a reader sees nothing."""
    return all(unicodedata.category(one) in UNSEEN or ord(one) in UNSEEN_ALONE for one in text)


def is_filled(value: Any) -> bool:
    """False for what says no more than an absent key: null, false, blank text, an empty list or object."""
    if isinstance(value, str):
        return not is_blank(value)
    return value is not None and value is not False and value != [] and value != {}


def from_json_text(given: Any, reason: str) -> Any:
    """JSON that came as text is parsed; anything else, and blank text as None, passes.

    Lone surrogates become U+FFFD, and are counted by `replacements_counted`. Raises LeftOut where it does not parse,
    or gives a key of one object twice.
    """
    if not isinstance(given, str):
        return given
    if is_blank(given):
        return None
    try:
        value, num_replaced = without_surrogates(DECODER.decode(given))
    except (ValueError, RecursionError) as error:
        raise LeftOut(reason, f"{short(given)}: {error}") from error
    if num_replaced and (found := NUM_REPLACED.get()) is not None:
        found[given] = num_replaced
    return value


def json_of(value: Any, reason: str, name: str) -> str:
    """The value as JSON text. Raises LeftOut for what JSON does not hold: NaN, and times and bytes of a table."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise LeftOut(reason, f"{name}: {error}") from error


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
