"""Greedy decoding with a target: plain, one token a forward, and speculative with a drafter.

States the little it needs of a target as protocols; must not know where targets come from
(`extract` satisfies the protocols, and the command line brings the two together), nor stores
or runs. Speculative output equals plain output in exact arithmetic whatever the drafter says.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..drafter import Drafter
from .acceptance import Cycle, judge


class Session(Protocol):
    """One growing text inside a target, batch 1, with the target's own cache."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        ...

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends ids [m]; gives logits [m, V] fp32 and taps [m, Lt*H]."""
        ...

    def roll_back(self, length: int) -> None:
        """Forgets all tokens from `length` on, recurrent states included."""
        ...


class Target(Protocol):
    """A frozen model that an exam can decode with."""

    @property
    def facts(self) -> Any:
        """A dataclass of what identifies the model: name, weights_sha256, hidden_size, eos_ids, ..."""
        ...

    @property
    def tokenizer(self) -> Any:
        """A transformers tokenizer with the model's chat template."""
        ...

    def frozen(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The tensors 'embedding' [V, H] and 'head' [V, H] (left out when tied), and facts."""
        ...

    def open(self, tap_layers: Sequence[int]) -> Session:
        """An empty session that gives the outputs of these layers, concatenated in this order."""
        ...


PROMPT_CHUNK = 1024  # prompt tokens of one forward; bounds the logits, which are of no use but the last

# Drafts of one cycle: (taps of the tokens since the last call [m, Lt*H], position of the anchor,
# id of the anchor) -> block_size - 1 token ids. The taps belong to positions start - m .. start - 1.
Proposer = Callable[[torch.Tensor, int, int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Decoded:
    """An answer: its token ids (the stop token included), the cycles it took, and the wall time.

    `prompt_s` is the part of `wall_s` until the first token was known. Plain decoding has no cycles.
    """

    tokens: list[int]
    cycles: tuple[Cycle, ...]
    prompt_s: float
    wall_s: float


class DrafterProposer:
    """The drafter's side of one prompt: its context cache and the frozen ends of the target.

    embedding, head [V, H] are on the drafter's device in its dtype. A block is always drafted
    at full width, as in training and in serving engines, also where fewer tokens are wanted.
    (z-lab's loop narrows the last block before max_new_tokens; only that cycle can differ.)
    """

    def __init__(self, drafter: Drafter, embedding: torch.Tensor, head: torch.Tensor, tap_dtype: str) -> None:
        self.drafter, self.embedding, self.head, self.tap_dtype = drafter, embedding, head, tap_dtype
        self.cache = drafter.new_cache()

    @torch.no_grad()
    def __call__(self, taps: torch.Tensor, start: int, anchor: int) -> list[int]:
        spec, embedding = self.drafter.spec, self.embedding
        if self.tap_dtype == "store":
            taps = taps.to(torch.bfloat16)  # as the store rounds them
        context = torch.arange(start - len(taps), start, device=embedding.device)  # [m]
        self.drafter.extend(self.cache, taps.to(embedding), context)
        ids = torch.full((spec.block_size,), spec.mask_token_id, device=embedding.device)  # [B]
        ids[0] = anchor
        positions = torch.arange(start, start + spec.block_size, device=embedding.device)  # [B]
        hidden = self.drafter.propose(self.cache, embedding[ids] * spec.embedding_scale, positions)  # [B, H]
        return choose_tokens(hidden[1:], self.head).tolist()


def choose_tokens(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each hidden state [..., H]: ids [...].

    The target's output multiplier and soft cap are left out: both are increasing functions of
    a logit and cannot change which one is largest.
    """
    return (hidden.to(head.dtype) @ head.T).argmax(-1)


@torch.no_grad()
def decode(
    session: Session,
    propose: Proposer,
    prompt: Sequence[int],
    *,
    block_size: int,
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> Decoded:
    """Greedy speculative decoding from an empty session (dflash-spec 3.1).

    A cycle drafts block_size - 1 tokens after the last known one (the anchor), lets the target
    check as many as are still wanted, keeps the leading ones it agrees with and adds its own
    next token. Tokens are counted, never told apart by the mask id.
    """
    started = time.perf_counter()
    logits, taps = read_prompt(session, prompt)
    tokens = [int(logits.argmax())]
    prompt_s = time.perf_counter() - started
    cycles: list[Cycle] = []
    while len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
        start, wanted = len(prompt) + len(tokens) - 1, max_new_tokens - len(tokens)
        drafts = list(propose(taps, start, tokens[-1]))
        assert len(drafts) == block_size - 1, f"{len(drafts)} drafts for a block of {block_size}"
        checked = drafts[:wanted]
        logits, taps = session.forward(torch.tensor([tokens[-1], *checked]))
        choices: list[int] = logits.argmax(-1).tolist()  # the target's token after each of the block
        leading = next((k for k, draft in enumerate(checked) if draft != choices[k]), len(checked))
        stop = next((k + 1 for k, token in enumerate(choices[:leading]) if token in stop_ids), wanted)
        cycles.append(judge(leading, min(stop, wanted), block_size))
        produced = cycles[-1].produced
        tokens += choices[:produced]
        session.roll_back(start + produced)
        taps = taps[:produced]
    return Decoded(tokens, tuple(cycles), prompt_s, time.perf_counter() - started)


@torch.no_grad()
def decode_plain(session: Session, prompt: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int]) -> Decoded:
    """The target's own greedy decoding from an empty session, one token a forward."""
    started = time.perf_counter()
    logits, _ = read_prompt(session, prompt)
    tokens = [int(logits.argmax())]
    prompt_s = time.perf_counter() - started
    while len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
        logits, _ = session.forward(torch.tensor(tokens[-1:]))
        tokens.append(int(logits[-1].argmax()))
    return Decoded(tokens, (), prompt_s, time.perf_counter() - started)


def read_prompt(session: Session, prompt: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits [V] after the prompt and its taps [n, Lt*H], read in chunks from an empty session."""
    assert session.length == 0, f"the session holds {session.length} tokens"
    assert len(prompt) > 0, "the prompt is empty"
    logits, parts = torch.empty(0), []
    for part in torch.tensor(list(prompt)).split(PROMPT_CHUNK):
        logits, taps = session.forward(part)
        parts.append(taps)
    return logits[-1], torch.cat(parts)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where speculative and plain output part: index in the answer, both tokens, and how close they were.

    `logit_gap` is the target's logit of the plain token less that of the speculative one after
    the common text, from one forward over it; near 0 it is a tie that rounding decided. A token
    is None where that answer had already ended.
    """

    position: int
    plain_token: int | None
    speculative_token: int | None
    logit_gap: float | None


@torch.no_grad()
def first_difference(
    session: Session, prompt: Sequence[int], speculative: Sequence[int], plain: Sequence[int]
) -> Mismatch | None:
    """The first difference of two answers, None when they are equal; `session` is an empty one."""
    if list(speculative) == list(plain):
        return None
    same = next((i for i, (s, p) in enumerate(zip(speculative, plain)) if s != p), min(len(speculative), len(plain)))
    if same >= min(len(speculative), len(plain)):
        ended = [answer[same] if same < len(answer) else None for answer in (plain, speculative)]
        return Mismatch(same, ended[0], ended[1], None)
    logits, _ = read_prompt(session, [*prompt, *plain[:same]])
    gap = logits[plain[same]] - logits[speculative[same]]
    return Mismatch(same, plain[same], speculative[same], float(gap))
