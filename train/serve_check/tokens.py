"""Our prompts beside those that the engine's own tokenizer and chat template make.

Acceptance is measured on token ids; a user's chats reach the engine as text. A template or tokenizer of another version
costs acceptance there and shows nowhere else.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .engine import Engine
from .server import Server

SHOWN_IDS = 6
CHECKED = 16  # prompts; each is one request
PROBES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Name three rivers of Europe."}],
    [
        {"role": "user", "content": "Name one of them."},
        {"role": "assistant", "content": "The Rhine."},
        {"role": "user", "content": "And another, please: twice!"},
    ],
)
"""Chats for a store's prompts, whose own chats are not in the store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherIds:
    """Where the engine's tokens of a prompt are first others; `kind` is 'template' or 'tokenizer'."""

    prompt: str
    kind: str
    position: int
    ours: tuple[int, ...]
    engine: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        own = {"prompt": self.prompt, "kind": self.kind, "position": self.position}
        return {**own, "ours": list(self.ours), "engine": list(self.engine)}

    def text(self) -> str:
        return (
            f"{self.kind}: {self.prompt} has other tokens in the engine from {self.position} on: "
            f"ours {list(self.ours)}, the engine's {list(self.engine)}"
        )


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """Chats and texts that were compared; the first that differ, one of each kind."""

    num_chats: int
    num_texts: int
    others: tuple[OtherIds, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_chats": self.num_chats,
            "num_texts": self.num_texts,
            "others": [other.as_dict() for other in self.others],
        }


def other_ids(prompt: str, kind: str, ours: Sequence[int], engine: Sequence[int]) -> OtherIds | None:
    """None where both are equal."""
    if list(ours) == list(engine):
        return None
    place = next((i for i, (a, b) in enumerate(zip(ours, engine)) if a != b), min(len(ours), len(engine)))
    shown = slice(place, place + SHOWN_IDS)
    return OtherIds(prompt=prompt, kind=kind, position=place, ours=tuple(ours[shown]), engine=tuple(engine[shown]))


def check_tokens(
    engine: Engine,
    server: Server,
    chats: Iterable[tuple[str, Mapping[str, Any], list[int]]],
    texts: Iterable[tuple[str, str]],
    encode: Callable[[str], list[int]],
) -> TokenCheck:
    """`chats` are (name, request, our ids), `texts` (name, text), of which `encode` makes our ids."""
    counts, others = {"template": 0, "tokenizer": 0}, dict[str, OtherIds]()

    def compare(kind: str, name: str, ours: list[int], found: list[int] | None) -> None:
        if found is None:
            return
        counts[kind] += 1
        if kind not in others and (other := other_ids(name, kind, ours, found)):
            others[kind] = other

    for name, text in texts:
        compare("tokenizer", name, encode(text), engine.text_ids(server, text))
    for name, chat, ids in chats:
        compare("template", name, ids, engine.chat_ids(server, chat))
    return TokenCheck(counts["template"], counts["tokenizer"], tuple(others[kind] for kind in sorted(others)))
