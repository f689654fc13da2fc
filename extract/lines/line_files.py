"""Text files cut into stretches of whole lines, cheaply; and JSON documents, value by value.

A line ends at LF, CRLF or a CR alone, as in any text editor: JSON allows no bare CR inside a string. It does not
end at U+2028 and its like, which stand inside strings. Knows bytes and lines, not what a line means.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from ... import UserError
from .byte_streams import Bytes
from .json_lines import BOM, DECODER, MAX_LINE_BYTES, InputLine, LeftOut, as_input_line, parse_line

CHUNK_BYTES = 2**20
MOST_VALUES = 4096
AFTER_NUMBER = ",] \t\r\n"
BLANK = re.compile(r"[ \t\r\n]*")
BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class RawLines:
    """Whole lines as bytes, which a worker parses."""

    raw: bytes

    def lines(self, source: Path, first: int, keys: object) -> Iterator[InputLine]:
        for number, line in enumerate(self.raw.splitlines(), start=first):
            if content := content_of_line(line):
                yield parse_line(source, number, content)


@dataclass(frozen=True, slots=True)
class ParsedLines:
    """Lines that had to be parsed to be found."""

    parsed: tuple[InputLine, ...]

    def lines(self, source: Path, first: int, keys: object) -> Iterator[InputLine]:
        return iter(self.parsed)


def content_of_line(line: bytes) -> bytes:
    """Without space around it, and without the mark that begins each of several files put together."""
    return line.removeprefix(BOM).strip()


def raw_lines(file: Bytes) -> Iterator[tuple[int, int, RawLines]]:
    """The number of the first line, how many are not blank, and the lines, about CHUNK_BYTES at a time."""
    first = 1
    for raw in stretches(file):
        lines = raw.splitlines()
        if num_lines := sum(1 for line in lines if content_of_line(line)):
            yield first, num_lines, RawLines(raw)
        first += len(lines)


def stretches(file: Bytes) -> Iterator[bytes]:
    """The file's bytes in stretches that end where a line ends; of a line that is too long, its beginning."""
    held: list[bytes] = []
    num_held = 0
    while block := file.read(CHUNK_BYTES):
        end = end_of_last_line(block)
        if end:
            yield b"".join([*held, block[:end]])
            held, num_held = [block[end:]], len(block) - end
        elif num_held < MAX_LINE_BYTES:
            held.append(block)
            num_held += len(block)
    if rest := b"".join(held):
        yield rest


def end_of_last_line(block: bytes) -> int:
    """Where the last line ends that surely does: a CR at the very end may be half of a CRLF."""
    return block.rfind(b"\n") + 1 or block.rfind(b"\r", 0, len(block) - 1) + 1


def json_document(path: Path, file: Bytes) -> Iterator[tuple[int, int, RawLines | ParsedLines]]:
    """A file named .json: an array of lines, read value by value; one object; or JSONL under the wrong name.

    Raises UserError for an array that does not end, and for an object that is not JSON.
    """
    blocks = iter(partial(file.read, CHUNK_BYTES), b"")
    head = b""
    while len(head) < len(BOM) or not head.removeprefix(BOM).strip():
        if not (more := next(blocks, b"")):
            break
        head += more
    if head.removeprefix(BOM).lstrip().startswith(b"["):
        yield from batches(path, array_values(path, text_of(path, chain([head.removeprefix(BOM)], blocks))))
        return
    parts = stretches(Joined(chain([head], blocks)))
    head = next(parts, b"")
    first_line = next(filter(None, map(content_of_line, head.splitlines())), b"{}")
    if not is_json(first_line):
        held = [head]
        while sum(map(len, held)) < MAX_LINE_BYTES and (more := next(parts, b"")):
            held.append(more)
        head = b"".join(held)
        if document := one_object(path, head):
            yield 1, 1, document
            return
    yield from raw_lines(Joined(chain([head], parts)))


def one_object(path: Path, raw: bytes) -> ParsedLines | None:
    """The one object that is printed over the lines of a file; None where they are not one."""
    try:
        value = DECODER.decode(raw.removeprefix(BOM).decode("utf-8"))
    except LeftOut as fault:
        return ParsedLines((InputLine(path, 1, None, fault),))
    except (ValueError, RecursionError) as error:
        if b"\n" not in raw.strip():
            raise not_json(path, error) from error
        return None
    return ParsedLines((as_input_line(path, 1, value),))


class Joined:
    """Stretches that were read already, to be read again as a file."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.parts = iter(parts)

    def read(self, size: int = -1, /) -> bytes:
        return next(self.parts, b"")


def is_json(raw: bytes) -> bool:
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return True


def batches(path: Path, values: Iterable[tuple[Any, int]]) -> Iterator[tuple[int, int, ParsedLines]]:
    """Values with their sizes, as lines numbered by their place, about CHUNK_BYTES at a time."""
    held: list[InputLine] = []
    num_bytes, number = 0, 0
    for number, (value, size) in enumerate(values, start=1):
        is_fault = isinstance(value, LeftOut)
        held.append(InputLine(path, number, None, value) if is_fault else as_input_line(path, number, value))
        num_bytes += size
        if num_bytes >= CHUNK_BYTES or len(held) == MOST_VALUES:
            yield number - len(held) + 1, len(held), ParsedLines(tuple(held))
            held, num_bytes = [], 0
    if held:
        yield number - len(held) + 1, len(held), ParsedLines(tuple(held))


def text_of(path: Path, parts: Iterable[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for part in parts:
            yield decoder.decode(part)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise UserError(f"input {str(path)!r} is not UTF-8: {error}", "UTF-8", "mend the file") from error


def array_values(path: Path, parts: Iterator[str]) -> Iterator[tuple[Any, int]]:
    """Each value of a JSON array and its size; a LeftOut for one that is nested too deeply or has a key twice.

    Raises UserError where the array is not JSON or does not end.
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
            try:
                value, end = DECODER.raw_decode(self.text, self.at)
                problem = "the array does not end"
            except ValueError as error:
                value, end, problem = None, len(self.text), str(error)
            except (RecursionError, LeftOut) as error:
                value = error if isinstance(error, LeftOut) else LeftOut("nested too deeply", str(error))
                end, problem = self.end_of_value(), "the array does not end"
            if end < len(self.text) and (not isinstance(value, (int, float)) or self.text[end] in AFTER_NUMBER):
                size, self.at = end - self.at, end
                return value, size
            if num_left > MAX_LINE_BYTES or not self.more(num_left):
                raise not_json(path, problem)

    def end_of_value(self) -> int:
        """Where the array or object that starts here ends; the window's end where it does not."""
        depth = 0
        for match in BRACKETS.finditer(self.text, self.at):
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
            if depth == 0:
                return match.end()
        return len(self.text)


def not_json(path: Path, error: object) -> UserError:
    return UserError(f"input {str(path)!r} is not JSON: {error}", "a JSON array of lines, or JSONL", "mend the file")
