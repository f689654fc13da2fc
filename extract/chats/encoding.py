"""Text to ids and back with the target's tokenizer, each stretch of a chat tokenized once.

A chat is rendered again for every turn, so the same text comes back many times. Tokenizers
cut a text at added tokens before anything else; so the ids of a text are those of its
stretches, each beginning with an added token. Knows no template and no mask.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any


class Encoder:
    """`encode` equals the tokenizer on the whole text, without tokens that the text does not hold."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = list(tokenizer.added_tokens_decoder.values()) if tokenizer.is_fast else []
        self.cut: re.Pattern[str] | None = None
        self.longest_name = 1  # characters, of the added tokens that are cut at
        if added and not any(token.lstrip or token.rstrip or token.single_word for token in added):
            names = sorted((token.content for token in added if not token.normalized), key=len, reverse=True)
            if names and not getattr(tokenizer, "split_special_tokens", False):
                self.cut = re.compile("|".join(re.escape(name) for name in names))
                self.longest_name = len(names[0])
        self.core = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        tokenizer("a", add_special_tokens=False)  # transformers sets up the core for such calls
        self.blank: dict[tuple[int, ...], bool] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text; the template has written every special token itself."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, a stretch that they share tokenized once and all in one call."""
        cut = self.cut_all(texts)
        new = list(dict.fromkeys(stretch for stretches in cut for stretch in stretches))
        known = dict(zip(new, self.tokenize(new)))
        found = []
        for stretches in cut:
            ids: list[int] = []
            for stretch in stretches:
                ids += known[stretch]
            found.append(ids)
        return found

    def tokenize(self, stretches: list[str]) -> list[list[int]]:
        if not stretches:
            return []
        if self.core is None:
            return self.tokenizer(stretches, add_special_tokens=False, verbose=False)["input_ids"]
        return [found.ids for found in self.core.encode_batch_fast(stretches, add_special_tokens=False)]

    def cut_all(self, texts: Sequence[str]) -> list[list[str]]:
        """The stretches of each text; those of a beginning that it shares with the text before it are not cut again."""
        found: list[list[str]] = []
        shared: list[str] = []
        beginning, edge = "", 0
        for text in texts:
            if edge and text.startswith(beginning):
                found.append(shared + self.stretches(text[edge:]))
            else:
                found.append(self.stretches(text))
            shared, edge = self.settled(text, found[-1])
            beginning = text[: edge + self.longest_name]
        return found

    def settled(self, text: str, stretches: list[str]) -> tuple[list[str], int]:
        """The first stretches that stay the same whatever follows the text, and the number of their characters.

        An added token may begin with another, and so reach over the edge behind that: one edge is taken behind which
        as much of the text is left as the longest has.
        """
        count, edge = len(stretches), len(text)
        while count and edge + self.longest_name > len(text):
            count -= 1
            edge -= len(stretches[count])
        return stretches[:count], edge

    def stretches(self, text: str) -> list[str]:
        starts = [match.start() for match in self.cut.finditer(text)] if self.cut else []
        edges = [0, *(start for start in starts if start), len(text)]
        return [text[a:b] for a, b in pairwise(edges) if b > a]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def is_blank(self, ids: list[int]) -> bool:
        """True where the ids decode to white space or nothing; short ones, the usual tails of turns, are remembered."""
        if len(ids) > 4:
            return not self.decode(ids).strip()
        key = tuple(ids)
        if key not in self.blank:
            self.blank[key] = not ids or not self.decode(ids).strip()
        return self.blank[key]
