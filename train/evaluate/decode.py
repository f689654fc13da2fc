"""Decoding one text, plainly or with drafts, and where two answers part.

Speculative output equals plain output in exact arithmetic whatever the drafter says: token for token when both are
greedy, in distribution when both sample.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from .lockstep import Decoded, DrafterSide, OneByOne, serve
from .sampling import Chooser, Greedy
from .steps import plain, speculative
from .target import Session, read_prompt


def decode(
    session: Session,
    drafter: DrafterSide,
    prompt: Sequence[int],
    *,
    block_size: int,
    max_new_tokens: int,
    stop_ids: Collection[int],
    chooser: Chooser | None = None,
) -> Decoded:
    """Speculative decoding of one text from an empty session, greedy without a `chooser`."""
    steps = speculative(
        prompt, chooser or Greedy(), block_size=block_size, max_new_tokens=max_new_tokens, stop_ids=stop_ids
    )
    return serve([steps], OneByOne(lambda: session), drafter, 1)[0]


def decode_plain(
    session: Session,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    chooser: Chooser | None = None,
) -> Decoded:
    """The target's own decoding from an empty session, one token a forward, greedy without a `chooser`."""
    steps = plain(prompt, chooser or Greedy(), max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    return serve([steps], OneByOne(lambda: session), None, 1)[0]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where speculative and plain greedy output part: index in the answer, both tokens, and how close they were.

    Both gaps are the target's logit of the plain token less that of the speculative one behind the common text:
    `logit_gap` from a forward over one token, as plain decoding runs it, `verify_gap` from one over a block, as
    drafts are checked. Both are replayed for the text alone. A token is None where that answer had already ended, and
    the gaps are None with it.
    """

    position: int
    plain_token: int | None
    speculative_token: int | None
    logit_gap: float | None
    verify_gap: float | None = None

    @property
    def is_exact_tie(self) -> bool:
        """True where one of the two forwards gives both tokens the very same logit: nothing but their ids decides."""
        return 0.0 in (self.logit_gap, self.verify_gap)


def first_difference(
    open_session: Callable[[], Session], prompt: Sequence[int], speculative: Decoded, plain: Decoded, block_size: int
) -> Mismatch | None:
    """The first difference of two greedy answers, None when they are equal."""
    ours, theirs = speculative.tokens, plain.tokens
    if ours == theirs:
        return None
    same = next((i for i, (s, p) in enumerate(zip(ours, theirs)) if s != p), min(len(ours), len(theirs)))
    if same >= min(len(ours), len(theirs)):
        ended = [answer[same] if same < len(answer) else None for answer in (theirs, ours)]
        return Mismatch(same, ended[0], ended[1], None)
    sure, drafted = theirs[same], ours[same]
    paths = both_paths(open_session(), prompt, speculative, same, block_size)
    alone, checked = (float(logits[sure] - logits[drafted]) for logits in paths)
    return Mismatch(same, sure, drafted, alone, checked)


@torch.no_grad()
def both_paths(
    session: Session, prompt: Sequence[int], speculative: Decoded, place: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's logits [V] before answer token `place`: token by token, and in the block that checked it.

    Where that block held refused drafts, here it holds what the answer went on with; no logit before them depends
    on them.
    """
    tokens = speculative.tokens
    alone, _ = read_prompt(session, prompt)
    if place == 0:
        return alone, alone
    for token in tokens[:place]:
        logits, _ = session.forward(torch.tensor([token]))
        alone = logits[-1]
    anchor = first = 0  # in the answer, of the cycle that produced the token
    for cycle in speculative.cycles:
        anchor, first = first, first + cycle.produced
        if first >= place:
            break
    session.roll_back(len(prompt) + anchor)
    block, _ = session.forward(torch.tensor(tokens[anchor : anchor + block_size]))
    return alone, block[place - anchor - 1]
