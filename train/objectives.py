"""What a slot is held to: the values of the objectives and their gradients by the logits, in closed form.

p is the target's distribution, q the drafter's, alpha = sum over tokens of min(p, q) the expected acceptance. An
objective takes the drafter's log-probabilities and gives its value and d value / d logits, so that no logits are
kept for autograd. Pure functions of tensors, which torch.compile takes whole; knows no head, no weights.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .config import LossConfig


class Drafted(NamedTuple):
    """n slots as the drafter answered them; an objective may write over `log_q`."""

    log_q: Tensor  # [n, V], the drafter's log-probabilities
    nll: Tensor  # [n], -log q of the label
    log_p: Tensor | None  # [n, V], the target's log-probabilities, where the objective reads them


class Judged(NamedTuple):
    """The objective of n slots."""

    value: Tensor  # [n]
    error: Tensor  # [n, V], d value / d logits, its own memory or that of `log_q`
    label_error: Tensor | None = None  # [n], takes the place of `error` at the label
    alpha: Tensor | None = None  # [n], expected acceptance, where the target's distribution is known


class FromLabel(NamedTuple):
    """An objective that knows the label alone, of n slots: its gradient is q times a factor, but for the label's."""

    value: Tensor  # [n]
    factor: Tensor  # [n], d value / d logits = factor * q at every other token
    label_error: Tensor  # [n], and this at the label


def cross_entropy(nll: Tensor) -> FromLabel:
    """-log q(label); gradient q - onehot. At the label q - 1 is expm1(-nll), exact also where q is near 1."""
    return FromLabel(nll, torch.ones_like(nll), torch.expm1(-nll))


def token_variation(nll: Tensor) -> FromLabel:
    """Total variation against the label as a one-hot target: 1 - q(label); gradient q(label) * (q - onehot)."""
    chance, miss = torch.exp(-nll), -torch.expm1(-nll)
    return FromLabel(miss, chance, -chance * miss)


LABEL_OBJECTIVES: dict[str, Callable[[Tensor], FromLabel]] = {"ce": cross_entropy, "tv_tokens": token_variation}
"""The objectives that need the text alone, as functions of nll [n]."""


def over_all_tokens(objective: Callable[[Tensor], FromLabel]) -> "Objective":
    """An objective of the label with its gradient by every logit."""

    def judge(drafted: Drafted, _config: LossConfig) -> Judged:
        told = objective(drafted.nll)
        return Judged(told.value, drafted.log_q.exp_().mul_(told.factor[:, None]), told.label_error)

    return judge


def divergence(drafted: Drafted, _config: LossConfig) -> Judged:
    """Forward KL(p || q) = sum p (log p - log q); gradient q - p."""
    value, error = divergence_parts(drafted)
    return Judged(value, error, alpha=overlap(drafted)[1].exp())


def variation(drafted: Drafted, _config: LossConfig) -> Judged:
    """Total variation 1 - alpha; gradient alpha * d(-log alpha)."""
    log_alpha, error = acceptance_parts(drafted)
    alpha = log_alpha.exp()
    return Judged(1.0 - alpha, error * alpha[:, None], alpha=alpha)


def log_acceptance(drafted: Drafted, _config: LossConfig) -> Judged:
    """-log alpha (LK losses, arXiv 2602.23881); with a one-hot target it would be cross-entropy."""
    log_alpha, error = acceptance_parts(drafted)
    return Judged(-log_alpha, error, alpha=log_alpha.exp())


def hybrid(drafted: Drafted, config: LossConfig) -> Judged:
    """c KL + (1-c) TV with c = exp(-eta alpha), c without gradient (arXiv 2602.23881, the adaptive mix; eta 3 there).

    c is each slot's own, as in vllm-project/speculators #673: an alpha averaged over a batch would make the loss
    depend on how rows are dealt.
    """
    log_alpha, away = acceptance_parts(drafted)
    alpha = log_alpha.exp()
    share = torch.exp(-config.hybrid_eta * alpha)
    kl, error = divergence_parts(drafted)
    value = share * kl + (1.0 - share) * (1.0 - alpha)
    return Judged(value, error * share[:, None] + away * ((1.0 - share) * alpha)[:, None], alpha=alpha)


Objective = Callable[[Drafted, LossConfig], Judged]
OBJECTIVES: dict[str, Objective] = {
    **{name: over_all_tokens(objective) for name, objective in LABEL_OBJECTIVES.items()},
    "kl": divergence,
    "tv": variation,
    "lk": log_acceptance,
    "lk_hybrid": hybrid,
}


def target_of(drafted: Drafted) -> Tensor:
    assert drafted.log_p is not None, "this objective reads the target's distribution"
    return drafted.log_p


def overlap(drafted: Drafted) -> tuple[Tensor, Tensor]:
    """log min(p, q) [n, V] and log alpha [n], at most 0."""
    lower = torch.minimum(target_of(drafted), drafted.log_q)
    return lower, torch.logsumexp(lower, dim=-1).clamp(max=0.0)


def divergence_parts(drafted: Drafted) -> tuple[Tensor, Tensor]:
    """KL(p || q) [n] and its gradient q - p [n, V]."""
    log_p, log_q = target_of(drafted), drafted.log_q
    p = log_p.exp()
    return (p * (log_p - log_q)).sum(-1).clamp(min=0.0), log_q.exp() - p


def acceptance_parts(drafted: Drafted) -> tuple[Tensor, Tensor]:
    """log alpha [n] and d(-log alpha) / d logits [n, V].

    Moving q changes alpha only through tokens with q < p. With w = min(p, q) / alpha there and 0 elsewhere, and M =
    sum of w, the gradient is M q - w: every term at most 1, however small alpha is, so it is formed from logarithms.
    Where q = p for a token the one-sided derivative is taken.
    """
    lower, log_alpha = overlap(drafted)
    w = torch.where(drafted.log_q < target_of(drafted), torch.exp(lower - log_alpha[:, None]), 0.0)
    return log_alpha, drafted.log_q.exp() * w.sum(-1, keepdim=True) - w
