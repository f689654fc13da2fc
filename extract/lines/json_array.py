"""One JSON array, read value by value, as the lines of a file.

Knows JSON and where a value ends, not what it means. A value that is broken costs itself alone where its end can be
told all the same, which is where its strings and brackets are whole.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ... import UserError
from .json_lines import DECODER, MAX_LINE_BYTES, LeftOut

AFTER_NUMBER = ",] \t\r\n"
BLANK = re.compile(r"[ \t\r\n]*")
BAD_BYTE = re.compile(r"[\udc80-\udcff]")
"""What the error handler surrogateescape makes of a byte that is not UTF-8; UTF-8 itself holds no surrogate."""
TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}:,"]|[^\s\[\]{}:,"]+', re.DOTALL)
"""Strings, marks, and any words between them; a quote alone begins a string that does not end here."""
CLOSING = {"[": "]", "{": "}"}
MARKS = (",", ":", "]", "}")


def text_of(parts: Iterable[bytes]) -> Iterator[str]:
    """The text of UTF-8; a byte that is none stands for itself, as BAD_BYTE finds it."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    for part in parts:
        yield decoder.decode(part)
    yield decoder.decode(b"", final=True)


def bad_bytes(text: str) -> LeftOut | None:
    """Why a text that `text_of` gave is none, None where it is."""
    if BAD_BYTE.search(text):
        try:
            text.encode("utf-8", "surrogateescape").decode("utf-8")
        except UnicodeDecodeError as error:
            return LeftOut("not UTF-8", str(error))
    return None


def array_values(path: Path, parts: Iterator[str]) -> Iterator[tuple[Any, int]]:
    """Each value of a JSON array and its size in characters; a LeftOut for one that cannot be read.

    Such a value is nested too deeply, has a key twice, is not UTF-8, or is not JSON and its end can be told all the
    same. Raises UserError where it cannot, and where the array does not end.
    """
    text = Window(parts)
    text.skip_blank()
    text.at += 1
    is_first = True
    while (mark := text.skip_blank()) != "]":
        if not is_first:
            if mark != ",":
                raise not_json(path, f"expected ',' or ']' after value {text.num_values}, found {mark[:1]!r}")
            text.at += 1
            text.skip_blank()
        is_first = False
        yield text.value(path)
    text.at += 1
    if text.skip_blank():
        raise not_json(path, "more text after the end of the array")


class Window:
    """The part of a long text that is being read: `text` from `at` on is not used up yet."""

    def __init__(self, parts: Iterator[str]) -> None:
        self.parts = parts
        self.text = ""
        self.at = 0
        self.num_values = 0

    def more(self, size: int = 1) -> bool:
        """Takes in at least `size` more characters where there are any; False at the end."""
        taken: list[str] = []
        num_taken = 0
        while num_taken < size and (part := next(self.parts, None)) is not None:
            taken.append(part)
            num_taken += len(part)
        self.text, self.at = self.text[self.at :] + "".join(taken), 0
        return num_taken > 0

    def skip_blank(self) -> str:
        """The next character that is not blank; an empty text at the end."""
        while True:
            match = BLANK.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def value(self, path: Path) -> tuple[Any, int]:
        """The value that starts here; more text is taken in until it is whole, a number's 1. or 1e too."""
        self.num_values += 1
        while True:
            num_left = len(self.text) - self.at
            problem = f"the array does not end, value {self.num_values} is the last that begins"
            try:
                value, end = DECODER.raw_decode(self.text, self.at)
            except (RecursionError, LeftOut) as error:
                value = error if isinstance(error, LeftOut) else LeftOut("nested too deeply", str(error))
                end = self.end_of_value()
            except ValueError as error:
                problem = self.place_of(error)
                value, end = LeftOut("not JSON", problem), self.end_of_value()
            if end is None:
                raise not_json(path, f"{problem}; where that value ends cannot be told")
            if end < len(self.text) and (not isinstance(value, (int, float)) or self.text[end] in AFTER_NUMBER):
                value = bad_bytes(self.text[self.at : end]) or value
                size, self.at = end - self.at, end
                return value, size
            if num_left > MAX_LINE_BYTES or not self.more(num_left):
                raise not_json(path, problem)

    def place_of(self, error: ValueError) -> str:
        if not isinstance(error, json.JSONDecodeError):
            return f"value {self.num_values}: {error}"
        return f"value {self.num_values}, character {error.pos - self.at + 1} of it: {error.msg}"

    def end_of_value(self) -> int | None:
        """Where the value that starts here ends, JSON or not: the window's end where more text must tell, None where
        nothing can.

        The brackets of an object or array must match, and its tokens follow each other as `may_follow` says: a quote
        or bracket that is missing or too many breaks that.
        """
        open_ones: list[str] = []
        before = ""
        for match in TOKENS.finditer(self.text, self.at):
            token = match[0]
            if token == '"':
                return len(self.text)  # a string that goes on behind the window
            if not open_ones and token not in CLOSING:
                return None if token in MARKS else match.end()
            if not may_follow(token, before, open_ones):
                return None
            if token in CLOSING:
                open_ones.append(CLOSING[token])
            elif token in CLOSING.values() and open_ones.pop() != token:
                return None
            if not open_ones:
                return match.end()
            before = token
        return len(self.text)


def may_follow(token: str, before: str, open_ones: list[str]) -> bool:
    """False where a token cannot stand behind another in any object or array whose quotes and brackets are whole."""
    if before.startswith('"'):
        return token in MARKS
    if token.startswith('"'):
        return before in ("{", "[", ",", ":")
    if token in CLOSING and before:
        return before in ("[", ":") or (before == "," and open_ones[-1] == "]")
    return True


def not_json(path: Path, error: object) -> UserError:
    return UserError(f"input {str(path)!r} is not JSON: {error}", "a JSON array of lines, or JSONL", "mend the file")
