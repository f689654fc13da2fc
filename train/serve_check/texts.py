"""Texts to draft along: a prompt, its greedy answer, and what the target would say behind the end of it.

Greedy speculative decoding writes the same text whatever is drafted, so one reading of the text by the target serves
any number of drafters (`replay.py`). Knows the target as `evaluate` does, by its protocols.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..evaluate.target import PROMPT_CHUNK, Session, Target


@dataclass(frozen=True, slots=True)
class Text:
    """`ids` of prompt, answer and what follows it; the answer is ids[first:end]. taps: layer -> [end, H]."""

    ids: list[int]
    first: int
    end: int
    taps: dict[int, Tensor]


@torch.no_grad()
def read_text(
    target: Target, prompt: Sequence[int], answer: Sequence[int], layers: Sequence[int], num_behind: int
) -> Text:
    """One reading of prompt and answer, and `num_behind` greedy tokens after them."""
    session = target.open(layers)
    known = [*prompt, *answer]
    parts: list[Tensor] = []
    logits = torch.empty(0)
    for part in torch.tensor(known).split(PROMPT_CHUNK):
        logits, taps = session.forward(part)
        parts.append(taps)
    planes = torch.cat(parts).chunk(len(layers), dim=-1)
    behind = greedy(session, logits[-1], num_behind)
    return Text(known + behind, len(prompt), len(known), dict(zip(layers, planes)))


def greedy(session: Session, logits: Tensor, count: int) -> list[int]:
    """`count` greedy tokens, of which `logits` [V] choose the first."""
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(int(logits.argmax()))
        if len(tokens) < count:
            logits = session.forward(torch.tensor(tokens[-1:]))[0][-1]
    return tokens
