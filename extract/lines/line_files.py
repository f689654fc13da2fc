"""Text files cut into stretches of whole lines, cheaply; and JSON documents, of one value or of many.

A line ends at LF, CRLF or a CR alone, as in any text editor: JSON allows no bare CR inside a string. It does not
end at U+2028 and its like, which stand inside strings. Knows bytes and lines, not what a line means.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from .byte_streams import Bytes
from .json_array import array_values, bad_bytes, not_json, text_of
from .json_lines import BOM, DECODER, MAX_LINE_BYTES, InputLine, LeftOut, as_input_line, parse_line

CHUNK_BYTES = 2**20
MOST_VALUES = 4096


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

    Raises UserError as `array_values` does, and for one object that is not JSON.
    """
    blocks = iter(partial(file.read, CHUNK_BYTES), b"")
    head = b""
    while len(head) < len(BOM) or not head.removeprefix(BOM).strip():
        if not (more := next(blocks, b"")):
            break
        head += more
    if head.removeprefix(BOM).lstrip().startswith(b"["):
        yield from batches(path, array_values(path, text_of(chain([head.removeprefix(BOM)], blocks))))
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
    text = raw.removeprefix(BOM).decode("utf-8", "surrogateescape")
    try:
        value = DECODER.decode(text)
    except LeftOut as fault:
        return ParsedLines((InputLine(path, 1, None, fault),))
    except (ValueError, RecursionError) as error:
        if b"\n" not in raw.strip():
            raise not_json(path, error) from error
        return None
    fault = bad_bytes(text)
    return ParsedLines((InputLine(path, 1, None, fault) if fault else as_input_line(path, 1, value),))


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
