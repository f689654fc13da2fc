"""How tokens are chosen and drafts accepted: greedily, or by lossless rejection sampling.

Knows numbers and rules, no model. Target and drafter go through the same settings (temperature, then top-k, then
top-p, the order of transformers and of vLLM). The sampled rule is the one of Leviathan et al. (arXiv 2211.17192)
and dflash-spec 3.1: whatever the drafter says, a token has the target's own distribution.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

PLAIN, SPECULATIVE = 0, 1  # streams of random numbers: the two answers to a prompt are drawn independently


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """What a token is drawn from; temperature 0 is greedy, and then nothing else counts."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def __str__(self) -> str:
        if self.is_greedy:
            return "greedy"
        cut = [f"top-k {self.top_k}"] * (self.top_k > 0) + [f"top-p {self.top_p:g}"] * (self.top_p < 1)
        return ", ".join([f"temperature {self.temperature:g}", *cut, f"seed {self.seed}"])

    def chooser(self, number: int, stream: int) -> "Chooser":
        """What chooses the tokens of one answer to the prompt of this number; draws depend on it and the seed alone."""
        if self.is_greedy:
            return Greedy()
        return Sampled(self, np.random.default_rng([self.seed, number, stream]))


class Chooser(Protocol):
    """Chooses the tokens of one text."""

    def first(self, logits: Tensor) -> int:
        """A token of the target, from its logits [V]."""
        ...

    def draft(self, logits: Tensor) -> list[int]:
        """Drafted tokens, from the drafter's logits [B-1, V]."""
        ...

    def check(self, logits: Tensor, drafts: list[int]) -> tuple[int, int]:
        """How many of the k leading drafts of the last `draft` stand, and the token behind those.

        logits [k+1, V]: the target's, before each of the drafts and behind the last one.
        """
        ...


class Greedy:
    """The likeliest token, always."""

    def first(self, logits: Tensor) -> int:
        return int(logits.argmax())

    def draft(self, logits: Tensor) -> list[int]:
        return logits.argmax(-1).tolist()

    def check(self, logits: Tensor, drafts: list[int]) -> tuple[int, int]:
        choices: list[int] = logits.argmax(-1).tolist()
        leading = next((k for k, draft in enumerate(drafts) if draft != choices[k]), len(drafts))
        return leading, choices[leading]


class Sampled:
    """Draws of one text from numbers of its own, so that they depend on no other text beside it."""

    def __init__(self, sampling: Sampling, numbers: np.random.Generator) -> None:
        self.sampling, self.numbers = sampling, numbers
        self.drafted = torch.empty(0)  # [B-1, V] the distributions that the last drafts were drawn from

    def uniform(self, count: int, beside: Tensor) -> Tensor:
        """Uniform numbers [count] of [0, 1), on the device of `beside`."""
        return torch.from_numpy(self.numbers.random(count)).to(beside.device)

    def first(self, logits: Tensor) -> int:
        p = probabilities(logits, self.sampling)
        return int(draw(p, self.uniform(1, p)[0]))

    def draft(self, logits: Tensor) -> list[int]:
        self.drafted = probabilities(logits, self.sampling)
        return draw(self.drafted, self.uniform(len(logits), logits)).tolist()

    def check(self, logits: Tensor, drafts: list[int]) -> tuple[int, int]:
        p, q = probabilities(logits, self.sampling), self.drafted[: len(drafts)]
        numbers = self.uniform(len(drafts) + 1, p)
        tokens = torch.tensor(drafts, dtype=torch.long, device=p.device)
        leading, token = settle(p, q, tokens, numbers[:-1], numbers[-1])
        return int(leading), int(token)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distributions [..., V] float64 that logits [..., V] become under the settings.

    Tokens that tie with the k-th one stay, as in transformers. Of tokens that tie at the edge of top-p those with
    the lower ids stay. The largest logit is made 0 first, so that no temperature leads out of the numbers.
    """
    scaled = logits.double()
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        least = scaled.topk(sampling.top_k, dim=-1).values[..., -1:]  # [..., 1]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    p = scaled.softmax(-1)
    if sampling.top_p < 1:
        ordered, places = p.sort(dim=-1, descending=True, stable=True)
        is_behind = ordered.cumsum(-1) - ordered >= sampling.top_p  # the likelier tokens alone are enough
        p = torch.zeros_like(p).scatter(-1, places, ordered.masked_fill(is_behind, 0.0))
        p = p / p.sum(-1, keepdim=True)
    return p


def draw(p: Tensor, numbers: Tensor) -> Tensor:
    """A token of each distribution [..., V] by its uniform number [...]: ids [...]; never one of probability 0.

    p need not add up to 1, but to more than 0.
    """
    steps = p.cumsum(-1)
    total = steps[..., -1]
    reached = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(steps, reached[..., None], right=True)[..., 0]


def is_accepted(p: Tensor, q: Tensor, drafts: Tensor, numbers: Tensor) -> Tensor:
    """bool [...]: drafts [...] drawn from q [..., V] stand with probability min(1, p/q), by uniform numbers [...]."""
    p_draft, q_draft = (table.gather(-1, drafts[..., None])[..., 0] for table in (p, q))
    return numbers * q_draft < p_draft


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What replaces a refused draft, not normalised: max(p - q, 0), or p where that is empty: [..., V]."""
    rest = (p - q).clamp(min=0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def settle(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """How many leading drafts stand [...], and the token behind them [...].

    p [..., k+1, V] the target's distributions, q [..., k, V] those that drafts [..., k] were drawn from, uniform
    numbers accept [..., k] and last [...]. Behind refused drafts the token is drawn from `residual`, behind k
    accepted ones from the last p.
    """
    stands = is_accepted(p[..., :-1, :], q, drafts, accept)
    leading = stands.long().cumprod(-1).sum(-1)  # [...]
    options = torch.cat([residual(p[..., :-1, :], q), p[..., -1:, :]], dim=-2)  # [..., k+1, V]
    row = leading[..., None, None].expand(*leading.shape, 1, p.shape[-1])
    return leading, draw(options.gather(-2, row)[..., 0, :], last)
