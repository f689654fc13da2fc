"""Text to ids and back with the target's tokenizer, each stretch of a chat tokenized once.

A chat is rendered again for every turn, so the same text comes back many times. Tokenizers
cut a text at added tokens before anything else; so the ids of a text are those of its
stretches, each beginning with an added token. Knows no template and no mask.
"""

import re
from itertools import pairwise
from typing import Any


class Encoder:
    """`encode` equals the tokenizer on the whole text, without tokens that the text does not hold."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = list(tokenizer.added_tokens_decoder.values()) if tokenizer.is_fast else []
        self.cut: re.Pattern[str] | None = None
        if added and not any(token.lstrip or token.rstrip or token.single_word for token in added):
            names = sorted((token.content for token in added if not token.normalized), key=len, reverse=True)
            if names:
                self.cut = re.compile("|".join(re.escape(name) for name in names))
        self.known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text; the template has written every special token itself."""
        stretches = self.stretches(text)
        new = [stretch for stretch in dict.fromkeys(stretches) if stretch not in self.known]
        if new:
            ids = self.tokenizer(new, add_special_tokens=False, verbose=False)["input_ids"]
            self.known.update(zip(new, ids))
        return [token for stretch in stretches for token in self.known[stretch]]

    def stretches(self, text: str) -> list[str]:
        starts = [match.start() for match in self.cut.finditer(text)] if self.cut else []
        edges = [0, *(start for start in starts if start), len(text)]
        return [text[a:b] for a, b in pairwise(edges) if b > a]

    def forget(self) -> None:
        """Drops what it knows; called for each chat, so that memory stays small."""
        self.known.clear()

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
