"""How much each slot of a block counts: known beforehand, or found in the pass that computes the loss.

A row's weights are a static part (`static_weights`, times the slots' validity) and a factor of the drafter's own
present answers (`dynamic_weights`), always without gradient. One rule is chosen; rules do not multiply. Knows tensors
only.
"""

import torch
from torch import Tensor

from .config import LossConfig

GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}  # decay lengths of the paper, by block size (dflash-spec 2.6)


def static_weights(config: LossConfig, block_size: int) -> Tensor:
    """Weights of slots 1..B-1 that no drafter changes, [B-1] fp32; ones where the pass finds its own."""
    if config.weights != "decay":
        return torch.ones(block_size - 1)
    return decay_weights(block_size, config.gamma or default_gamma(block_size))


def dynamic_weights(config: LossConfig, nll: Tensor, hit: Tensor, valid: Tensor) -> Tensor | None:
    """The factor [A, B-1] that this pass gives the slots, from nll, hit and validity; None for a static rule."""
    if config.weights == "dpace":
        return dpace_weights(nll, valid, config.dpace_alpha)
    if config.weights == "first_error":
        return first_error_weights(hit, valid)
    return None


def default_gamma(block_size: int) -> float:
    """The paper's decay length where it states one, else half a block; slots."""
    return GAMMAS.get(block_size, block_size / 2)


def decay_weights(block_size: int, gamma: float) -> Tensor:
    """exp(-(k-1) / gamma) for slots k = 1..B-1: [B-1] fp32 (dflash-spec 2.6)."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / gamma)


def dpace_weights(nll: Tensor, valid: Tensor, alpha: float) -> Tensor:
    """D-PACE's weights [A, B-1] from the slots' nll (arXiv 2605.18810; dflash-spec 2.6), without gradient.

    q = exp(-nll), q~ = alpha + (1-alpha) q, C_k = product of q~ up to k, w_k = sum of C_m over m >= k; an
    invalid slot has the factor 1 and adds nothing to the sum.
    """
    factor = alpha + (1.0 - alpha) * torch.exp(-nll.detach())
    reach = torch.cumprod(torch.where(valid, factor, 1.0), dim=-1) * valid
    return torch.flip(torch.cumsum(torch.flip(reach, [-1]), dim=-1), [-1])


def first_error_weights(hit: Tensor, valid: Tensor) -> Tensor:
    """1 up to and including the first valid slot whose likeliest token is not the label, 0 behind: [A, B-1] fp32.

    The slots that decoding would reach (Spec-AUF, arXiv 2607.01893; dflash-spec 9). `hit` and `valid` are bool.
    """
    right = (hit | ~valid).to(torch.float32)
    before = torch.cat([torch.ones_like(right[..., :1]), right[..., :-1]], dim=-1)
    return torch.cumprod(before, dim=-1)
