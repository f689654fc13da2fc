"""One JSON value of a user's file, as an input line: with its value, or with the reason why it has none.

Knows JSON and text encodings, neither files nor what a line means. Python's parser also takes NaN and Infinity;
so does this. A key that one object gives twice, with two values, has no meaning: the line is left out.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOM = b"\xef\xbb\xbf"
SURROGATE = re.compile(r"[\ud800-\udfff]")
SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
"""UTF-8 cannot hold a surrogate, so a line without such an escape has none."""
REPLACEMENT = "\ufffd"
MAX_DEPTH = 100
"""Deepest nesting of a line's value: well within what parsers, printers and templates of Python follow."""
MAX_LINE_BYTES = 2**26
"""64 MiB, about 16 M tokens: what is longer is no line, but a file without line ends."""


class LeftOut(Exception):
    """Why an input line gives no sample: a reason that is counted, and what was seen, in one line."""

    def __init__(self, reason: str, detail: str = "") -> None:
        detail = " ".join(detail.splitlines())  # a template's own words, or an array, may have several
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class InputLine:
    """One line or record. `number` counts from 1: the physical line, or the record's place.

    Token ids and masks that come from Arrow are numpy arrays, all other values what JSON gives.
    """

    source: Path
    number: int
    value: dict[str, Any] | None
    fault: LeftOut | None = None
    num_replaced: int = 0
    """Lone surrogates that became U+FFFD."""


def parse_line(path: Path, number: int, raw: bytes) -> InputLine:
    """The line that these bytes are, without their line end."""
    if len(raw) >= MAX_LINE_BYTES:
        return InputLine(path, number, None, LeftOut("line too long", f"more than {MAX_LINE_BYTES >> 20} MiB"))
    try:
        value = DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return InputLine(path, number, None, LeftOut("not UTF-8", str(error)))
    except (ValueError, RecursionError) as error:
        return InputLine(path, number, None, LeftOut("not JSON", str(error)))
    except LeftOut as fault:
        return InputLine(path, number, None, fault)
    is_flat = raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH
    return as_input_line(path, number, value, is_clean=is_flat and not SURROGATE_ESCAPE.search(raw))


def as_input_line(path: Path, number: int, value: Any, is_clean: bool = False) -> InputLine:
    """Lone surrogates, which are no text and no tokenizer takes, become U+FFFD and are counted.

    `is_clean`: the caller knows that there are none, and that the value is not nested too deeply.
    """
    if not isinstance(value, dict):
        advice = "; a file that is one JSON array is read under a name that ends in .json"
        seen = f"a JSON {type(value).__name__}{advice if isinstance(value, list) else ''}"
        return InputLine(path, number, None, LeftOut("not an object", seen))
    if is_clean:
        return InputLine(path, number, value)
    try:
        value, num_replaced = without_surrogates(value)
    except LeftOut as fault:
        return InputLine(path, number, None, fault)
    return InputLine(path, number, value, None, num_replaced)


def without_surrogates(value: Any, depth: int = 0) -> tuple[Any, int]:
    """The same JSON value with every lone surrogate as U+FFFD, and how many there were.

    Raises LeftOut for a value nested deeper than MAX_DEPTH.
    """
    if isinstance(value, str):
        return SURROGATE.subn(REPLACEMENT, value) if SURROGATE.search(value) else (value, 0)
    if depth > MAX_DEPTH:
        raise LeftOut("nested too deeply", f"lists and objects may lie {MAX_DEPTH} deep")
    if isinstance(value, list):
        if all(isinstance(item, int) for item in value):
            return value, 0
        items = [without_surrogates(item, depth + 1) for item in value]
        return [item for item, _ in items], sum(count for _, count in items)
    if isinstance(value, dict):
        pairs = [(without_surrogates(key), without_surrogates(item, depth + 1)) for key, item in value.items()]
        return {key: item for (key, _), (item, _) in pairs}, sum(a + b for (_, a), (_, b) in pairs)
    return value, 0


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises LeftOut where a key comes twice with different values."""
    made = dict(pairs)
    if len(made) != len(pairs):
        for key, value in pairs:
            if repr(made[key]) != repr(value):  # repr tells 1, 1.0 and true apart, and compares nan with nan
                raise LeftOut("key given twice", f"{key!r:.40} is {value!r:.60} and {made[key]!r:.60}")
    return made


DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)
