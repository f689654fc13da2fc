"""Token ids as pieces of text that a terminal and a browser can show safely, each with what the mask says of it.

A token of a byte-level tokenizer may be half a character, so a piece is the fewest neighbouring tokens that spell
whole characters; half a character at a border of the mask or beside a mark of the template is shown byte by byte.
Knows a tokenizer and one sample's arrays; no folder, no colour, no HTML.
"""

import codecs
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
LINE_END, TAB = "\u21b5", "\u2192"  # arrows, which fonts have, unlike the pictures of control characters
FIRST_LONE_BYTE = 0xDC00  # where Python's "surrogateescape" puts byte 0; only bytes from 0x80 come there
DOTTED_CIRCLE = "\u25cc"
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
JOINERS = "\u200c\u200d"  # they shape letters and emoji, and move nothing


@dataclass(frozen=True, slots=True)
class Piece:
    """The fewest neighbouring tokens that spell whole characters, all trained on or none."""

    text: str
    """Printable but for line ends and tabs; each of those follows its sign."""
    first: int
    """The place of its first token in the sample."""
    ids: tuple[int, ...]
    is_trained: bool
    is_mark: bool
    """One token of its own that the tokenizer was given beside its vocabulary: a special token, a template's mark."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring pieces of which all are trained on, or none."""

    pieces: tuple[Piece, ...]

    @property
    def is_trained(self) -> bool:
        return self.pieces[0].is_trained

    @property
    def first(self) -> int:
        return self.pieces[0].first

    @property
    def num_tokens(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces)


class Spelling:
    """What each token of a tokenizer spells, in bytes, so that characters over several tokens come out whole.

    Byte-level vocabularies (the GPT-2 alphabet) and SentencePiece ones (U+2581 for a space, <0xF0> for a byte) are
    read as such; of any other, each token is what the vocabulary calls it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.marks = {token: added.content for token, added in tokenizer.added_tokens_decoder.items()}
        decoder = tokenizer.backend_tokenizer.decoder if tokenizer.is_fast else None
        is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        self.alphabet = byte_alphabet() if is_byte_level else None

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that a token stands for; the id in words where the tokenizer has no such token."""
        if token in self.marks:
            return self.marks[token].encode()
        name = self.tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return f"<id {token}>".encode()
        if self.alphabet is not None and all(char in self.alphabet for char in name):
            return bytes(self.alphabet[char] for char in name)
        if self.alphabet is None and (byte := BYTE_TOKEN.fullmatch(name)):
            return bytes.fromhex(byte[1])
        return name.replace("\u2581", " ").encode(errors="surrogatepass")

    def pieces(self, ids: np.ndarray, mask: np.ndarray) -> list[Piece]:
        """All pieces of a sample, in order: ids [S], mask [S] bool."""
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        trained = mask.tolist()
        pieces: list[Piece] = []
        held: list[int] = []  # ids since the last whole character
        text = ""

        def close(place: int) -> None:
            nonlocal text
            if held:
                shown = visible(text + decoder.decode(b"", final=True))
                is_mark = len(held) == 1 and held[0] in self.marks
                pieces.append(Piece(shown, place - len(held), tuple(held), trained[place - 1], is_mark))
                held.clear()
                text = ""

        for place, token in enumerate(ids.tolist()):
            if token in self.marks or (place and trained[place] != trained[place - 1]):
                close(place)
            held.append(token)
            text += decoder.decode(self.token_bytes(token))
            if not decoder.getstate()[0]:
                close(place + 1)
        close(len(ids))
        return pieces


def byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's encoder.py).

    Printable bytes of Latin-1 stand for themselves, the others in their order for U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class Signs(dict[int, str]):
    """For str.translate: what each character is shown as, filled in as characters come up."""

    def __missing__(self, code: int) -> str:
        sign = self[code] = sign_of(chr(code))
        return sign


def sign_of(char: str) -> str:
    """The character itself, or something printable for one that controls, hides or turns round what is shown."""
    code = ord(char)
    if FIRST_LONE_BYTE + 0x80 <= code < FIRST_LONE_BYTE + 0x100:
        return f"<0x{code - FIRST_LONE_BYTE:02X}>"
    if char in "\n\t":
        return {"\n": LINE_END, "\t": TAB}[char] + char
    if unicodedata.category(char) in HIDDEN and char not in JOINERS:
        return f"<U+{code:04X}>"
    return char


SIGNS = Signs()


def visible(text: str) -> str:
    """The text with a sign for whatever would not be seen, or would do something to a terminal.

    A line end or a tab is its sign and then itself; nothing else below a space is left, nor anything that turns
    the direction of writing.
    """
    return text.translate(SIGNS)


def one_line(shown: str) -> str:
    """What `visible` gave, with the signs of line ends and tabs alone."""
    return shown.replace("\n", "").replace("\t", "")


def text_of(pieces: Iterable[Piece]) -> str:
    """The pieces' text; a combining mark at its beginning gets a circle, not the character that stands before."""
    text = "".join(piece.text for piece in pieces)
    return DOTTED_CIRCLE + text if text and unicodedata.category(text[0]).startswith("M") else text


def runs_of(pieces: Iterable[Piece]) -> list[Run]:
    return [Run(tuple(group)) for _, group in groupby(pieces, key=lambda piece: piece.is_trained)]


def ends_of(run: Run, most: int) -> tuple[tuple[Piece, ...], int, tuple[Piece, ...]]:
    """The pieces at a run's beginning, how many tokens to leave out, and the pieces at its end.

    About `most` tokens stay; a run that is hardly longer stays whole, all in the first part.
    """
    if run.num_tokens <= most + most // 4:
        return run.pieces, 0, ()
    begin, end = run.first + most // 2, run.first + run.num_tokens - most // 2
    head = tuple(piece for piece in run.pieces if piece.first < begin)
    tail = tuple(piece for piece in run.pieces[len(head) :] if piece.first >= end)
    kept = sum(len(piece.ids) for piece in (*head, *tail))
    return head, run.num_tokens - kept, tail
