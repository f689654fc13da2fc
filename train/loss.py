"""Cross-entropy of block slots through the target's frozen head, and the weights of the slots.

The gradient of the hidden states is formed in the forward, chunk by chunk of whole blocks, so no logits
are kept and the head is multiplied twice, not three times (dflash-spec 6.1). Sums are un-normalised:
whoever holds the sums of a whole step divides once. Knows tensors only: no drafter, no store.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}  # decay lengths of the paper, by block size (dflash-spec 2.6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The target's frozen output layer: logits = softcap(multiplier * hidden @ weight.T)."""

    weight: Tensor  # [V, H]
    multiplier: float = 1.0
    softcap: float | None = None  # softcap(z) = softcap * tanh(z / softcap)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [n, V] of hidden [n, H]."""
        out = (hidden @ self.weight.t()).to(torch.float32)
        if self.multiplier != 1.0:
            out = out * self.multiplier
        return out if self.softcap is None else self.softcap * torch.tanh(out / self.softcap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """d logits / d (hidden @ weight.T), from the logits themselves."""
        if self.softcap is None:
            return self.multiplier
        return self.multiplier * (1.0 - (logits / self.softcap) ** 2)


@dataclass(frozen=True, slots=True)
class BlockLoss:
    """What one row's blocks gave; slots k = 1..B-1, slot 0 does not exist here."""

    loss: Tensor  # scalar fp32, sum of weight * nll; carries the gradient
    weights: Tensor  # [A, B-1] fp32, as used; their sum is the loss's denominator
    nll: Tensor  # [A, B-1] fp32, of every slot, valid or not
    hit: Tensor  # [A, B-1] bool, True = the label has the largest logit


def frozen_head_loss(
    hidden: Tensor, head: Head, labels: Tensor, weights: Tensor, *, chunk_blocks: int, dpace_alpha: float | None = None
) -> BlockLoss:
    """Weighted cross-entropy of hidden [Q, H] against labels [A, B-1] with weights [A, B-1].

    `hidden` holds A blocks of Q/A slots; slots 0 and from B on are cut away before the head. With
    `dpace_alpha` the weights (0 or 1 then) are multiplied by D-PACE's, taken from this very pass.
    Gradients reach `hidden` only.
    """
    loss, used, nll, hit = FrozenHeadLoss.apply(hidden, head, labels, weights, chunk_blocks, dpace_alpha)
    return BlockLoss(loss, used, nll, hit)


class FrozenHeadLoss(torch.autograd.Function):
    """The loss of all chunks, with d loss / d hidden formed on the way."""

    @staticmethod
    def forward(ctx, hidden, head, labels, weights, chunk_blocks, dpace_alpha):
        num_blocks, num_slots = labels.shape
        blocks = hidden.view(num_blocks, -1, hidden.shape[-1])  # [A, stride, H]
        gradient = torch.zeros_like(blocks) if ctx.needs_input_grad[0] else None
        used = torch.empty_like(weights)
        nll = torch.empty_like(weights)
        hit = torch.empty_like(labels, dtype=torch.bool)
        size = equal_chunk(num_blocks, chunk_blocks)
        for begin in range(0, num_blocks, size):
            part = slice(begin, begin + size)
            inputs = blocks[part, 1 : num_slots + 1].reshape(size * num_slots, -1)  # [size*(B-1), H]
            logits = head.logits(inputs)  # [size*(B-1), V] fp32
            log_sum = torch.logsumexp(logits, dim=-1)
            target = labels[part].reshape(-1, 1)
            nll[part] = (log_sum - logits.gather(1, target)[:, 0]).view(size, num_slots)
            hit[part] = (logits.argmax(-1) == target[:, 0]).view(size, num_slots)
            used[part] = weights[part]
            if dpace_alpha is not None:
                used[part] *= dpace_weights(nll[part], weights[part] > 0, dpace_alpha)
            if gradient is not None:
                scale = used[part].reshape(-1, 1) * head.slope(logits)
                error = torch.exp(logits - log_sum[:, None])
                error.scatter_add_(1, target, torch.full_like(log_sum, -1.0)[:, None])
                formed = (error * scale).to(hidden.dtype) @ head.weight
                gradient[part, 1 : num_slots + 1] = formed.view(size, num_slots, -1)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(used, nll, hit)
        return (used * nll).sum(), used, nll, hit

    @staticmethod
    def backward(ctx, *outer):
        (gradient,) = ctx.saved_tensors
        hidden_gradient = (gradient * outer[0].to(gradient.dtype)).view(-1, gradient.shape[-1])
        return hidden_gradient, None, None, None, None, None


def equal_chunk(num_blocks: int, chunk_blocks: int) -> int:
    """The largest divisor of `num_blocks` up to `chunk_blocks`: all chunks get one shape."""
    return next(size for size in range(min(chunk_blocks, num_blocks), 0, -1) if num_blocks % size == 0)


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
