"""Decoding as steps: one text says what it wants done next, and is told the result.

The one statement of both algorithms (dflash-spec 3.1), for one text and for many at once: a generator yields
requests and returns its answer; `lockstep` serves one such generator or several together. Knows no model.
"""

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .acceptance import Cycle, judge
from .sampling import Chooser


@dataclass(frozen=True, slots=True)
class Read:
    """Wanted: the target's logits [V] behind the prompt, and the taps [n, Lt*H] of its tokens."""

    prompt: Sequence[int]


@dataclass(frozen=True, slots=True)
class Draft:
    """Wanted: the drafter's logits [B-1, V] for the block of the token `anchor` at position `start`.

    `taps` [m, Lt*H] belong to the positions start - m .. start - 1; together with earlier ones they are all of
    0 .. start - 1, each given once.
    """

    taps: Tensor
    start: int
    anchor: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Wanted: the target's logits [m, V] and taps [m, Lt*H] of `ids` [m] at positions start .. start + m - 1.

    Whatever the target holds of the text from `start` on is forgotten first.
    """

    start: int
    ids: list[int]


Request = Read | Draft | Forward


@dataclass(frozen=True, slots=True)
class Answer:
    """The token ids, the stop token included, and the cycles they took (none when decoded plainly)."""

    tokens: list[int]
    cycles: tuple[Cycle, ...] = ()


Steps = Generator[Request, Any, Answer]


def speculative(
    prompt: Sequence[int], chooser: Chooser, *, block_size: int, max_new_tokens: int, stop_ids: Collection[int]
) -> Steps:
    """Speculative decoding of one text.

    A cycle drafts block_size - 1 tokens behind the last known one (the anchor), lets the target check as many as are
    still wanted, keeps the leading ones that stand and adds the target's next token. A block is always drafted at
    full width, as in training and in serving engines. Tokens are counted, never told apart by the mask id.
    """
    logits, taps = yield Read(prompt)
    tokens, cycles = [chooser.first(logits)], []
    while len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
        start, wanted = len(prompt) + len(tokens) - 1, max_new_tokens - len(tokens)
        drafts = chooser.draft((yield Draft(taps, start, tokens[-1])))
        assert len(drafts) == block_size - 1, f"{len(drafts)} drafts for a block of {block_size}"
        checked = drafts[:wanted]
        logits, taps = yield Forward(start, [tokens[-1], *checked])
        leading, token = chooser.check(logits, checked)
        stop = next((k for k, draft in enumerate(checked[:leading], start=1) if draft in stop_ids), wanted)
        cycles.append(judge(leading, min(stop, wanted), block_size))
        produced = cycles[-1].produced
        tokens += [*checked[:leading], token][:produced]
        taps = taps[:produced]
    return Answer(tokens, tuple(cycles))


def plain(prompt: Sequence[int], chooser: Chooser, *, max_new_tokens: int, stop_ids: Collection[int]) -> Steps:
    """The target's own decoding of one text, one token a forward."""
    logits, _ = yield Read(prompt)
    tokens = [chooser.first(logits)]
    while len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
        logits, _ = yield Forward(len(prompt) + len(tokens) - 1, tokens[-1:])
        tokens.append(chooser.first(logits[-1]))
    return Answer(tokens)
