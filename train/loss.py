"""The loss of block slots through the target's frozen head, with d loss / d hidden formed on the way.

Both are formed chunk by chunk of whole blocks, so no logits are kept and the head is multiplied twice, not three
times (dflash-spec 6.1); a target's own distribution takes one more. Sums are un-normalised: whoever holds the sums
of a whole step divides once. Knows tensors only: no drafter, no store.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .config import LossConfig
from .objectives import LABEL_OBJECTIVES, OBJECTIVES, Drafted
from .slot import equal_chunk
from .slot_weights import dynamic_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The target's frozen output layer: logits = softcap(multiplier * hidden @ weight.T)."""

    weight: Tensor  # [V, H]
    multiplier: float = 1.0
    softcap: float | None = None  # softcap(z) = softcap * tanh(z / softcap)

    def products(self, hidden: Tensor) -> Tensor:
        """hidden [n, H] @ weight.T: [n, V] in the head's dtype."""
        return hidden @ self.weight.t()


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the target itself says at each slot: its head's inputs, one token before the slot's own.

    Rows of `hidden` that no valid slot names may hold anything, NaN included.
    """

    hidden: Tensor  # [T, H], the row's last states after the target's final norm
    places: Tensor  # [A, B-1] i64, row index a+k-1 of slot k


class SlotNumbers(NamedTuple):
    """What a chunk of blocks gave, [a, B-1] each, fp32 or wider; their names are those of `BlockLoss`."""

    weights: Tensor
    value: Tensor
    nll: Tensor
    hit: Tensor  # bool
    alpha: Tensor | None


@dataclass(frozen=True, slots=True)
class BlockLoss:
    """What one row's blocks gave; slots k = 1..B-1, slot 0 does not exist here."""

    loss: Tensor  # scalar, sum of weight * value
    weights: Tensor  # [A, B-1], as used; their sum is the loss's denominator
    value: Tensor  # [A, B-1], the objective of every slot, valid or not
    nll: Tensor  # [A, B-1], -log probability of the label
    hit: Tensor  # [A, B-1] bool, True = the label has the largest logit
    alpha: Tensor | None  # [A, B-1], sum of min(p, q): expected acceptance; None without a teacher
    gradient: Tensor  # [Q, H], d loss / d hidden


ChunkFunction = Callable[[Tensor, Tensor | None, Tensor, Tensor], tuple[SlotNumbers, Tensor]]


def make_chunk_loss(config: LossConfig, head: Head) -> ChunkFunction:
    """The arithmetic of one chunk as a function of tensors alone, which torch.compile takes as one graph.

    It takes the products hidden @ weight.T [a*(B-1), V] of the drafter, those of the target (None where the objective
    reads none), labels i64 [a, B-1] and the slots' static weights [a, B-1], 0 where a slot is not valid. Beside the
    slots' numbers it gives d loss / d products [a*(B-1), V] in their dtype, which may lie where the drafter's products
    lay.
    """
    objective, multiplier, softcap = OBJECTIVES[config.objective], head.multiplier, head.softcap

    def capped(products: Tensor) -> Tensor:
        """Logits, fp32 or wider."""
        out = products.to(torch.promote_types(products.dtype, torch.float32))
        out = out if multiplier == 1.0 else out * multiplier
        return out if softcap is None else softcap * torch.tanh(out / softcap)

    def slope(logits: Tensor) -> Tensor | float:
        """d logits / d products, from the logits themselves."""
        return multiplier if softcap is None else multiplier * (1.0 - (logits / softcap) ** 2)

    def chunk_loss(
        products: Tensor, teacher: Tensor | None, labels: Tensor, weights: Tensor
    ) -> tuple[SlotNumbers, Tensor]:
        logits = capped(products)
        label = labels.reshape(-1, 1)  # [n, 1]
        at_label = logits.gather(1, label)
        log_sum = torch.logsumexp(logits, dim=-1, keepdim=True)
        nll = log_sum - at_label
        hit = logits.argmax(-1, keepdim=True) == label
        log_p = None if teacher is None else torch.log_softmax(capped(teacher), dim=-1)
        judged = objective(Drafted(logits - log_sum, nll[:, 0], log_p), config)
        shape = labels.shape
        factor = dynamic_weights(config, nll.view(shape), hit.view(shape), weights > 0)
        used = weights.to(nll.dtype)
        used = used if factor is None else used * factor
        scale = used.reshape(-1, 1)
        gradient = judged.error.mul_(scale * slope(logits)).to(products.dtype)
        if judged.label_error is not None:
            exact = judged.label_error[:, None] * (scale * slope(at_label))
            gradient.scatter_(1, label, exact.to(products.dtype))
        alpha = None if judged.alpha is None else judged.alpha.view(shape)
        return SlotNumbers(used, judged.value.view(shape), nll.view(shape), hit.view(shape), alpha), gradient

    return chunk_loss


def chunk_loss_on(device: torch.device, config: LossConfig, head: Head) -> ChunkFunction:
    """The function of `make_chunk_loss` as this device runs it.

    On CUDA an objective that knows the label alone has kernels of its own, the others are compiled.
    """
    if device.type != "cuda":
        return make_chunk_loss(config, head)
    if config.objective in LABEL_OBJECTIVES:
        from .label_loss import make_label_loss  # imports Triton, which a CPU need not have

        return make_label_loss(config, head)
    return torch.compile(make_chunk_loss(config, head), fullgraph=True, dynamic=False)


@torch.no_grad()
def frozen_head_loss(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    weights: Tensor,
    *,
    chunk_blocks: int,
    chunk_loss: ChunkFunction,
    teacher: Teacher | None = None,
) -> BlockLoss:
    """The weighted loss of hidden [Q, H] against labels [A, B-1] with static weights [A, B-1].

    `hidden` holds A blocks of Q/A slots; slots 0 and from B on are cut away before the head and get no gradient.
    Outside of autograd: the caller goes on with `hidden.backward(result.gradient)`.
    """
    num_blocks, num_slots = labels.shape
    blocks = hidden.view(num_blocks, -1, hidden.shape[-1])  # [A, stride, H]
    gradient = torch.empty_like(blocks)
    gradient[:, 0] = 0
    gradient[:, num_slots + 1 :] = 0
    size = equal_chunk(num_blocks, chunk_blocks)
    chunks: list[SlotNumbers] = []
    for begin in range(0, num_blocks, size):
        part = slice(begin, begin + size)
        inputs = blocks[part, 1 : num_slots + 1].reshape(size * num_slots, -1)  # [size*(B-1), H]
        told = None if teacher is None else head.products(teacher_rows(teacher, part, weights[part]))
        numbers, error = chunk_loss(head.products(inputs), told, labels[part], weights[part])
        gradient[part, 1 : num_slots + 1] = (error @ head.weight).view(size, num_slots, -1)
        del told, error  # before the next chunk's are made
        chunks.append(numbers)
    used, value, nll, hit = (joined(column) for column in list(zip(*chunks))[:-1])
    alphas = [chunk.alpha for chunk in chunks if chunk.alpha is not None]
    return BlockLoss(
        loss=(used * value).sum(),
        weights=used,
        value=value,
        nll=nll,
        hit=hit,
        alpha=joined(alphas) if alphas else None,
        gradient=gradient.view_as(hidden),
    )


def joined(parts: Sequence[Tensor]) -> Tensor:
    """All parts as one; a single one as it is, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def teacher_rows(teacher: Teacher, part: slice, weights: Tensor) -> Tensor:
    """The head's inputs [a*(B-1), H] of a chunk; zeros for slots without a weight, whatever lies there."""
    rows = teacher.hidden[teacher.places[part].reshape(-1)]
    return torch.where(weights.reshape(-1, 1) > 0, rows, 0.0)


def final_norm(last: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The target's final RMSNorm of its last states [T, H], in fp32 or wider, given back in their dtype.

    `weight` [H] is the factor as the store holds it: 1 + w where the family's norm multiplies by that.
    """
    wide = last.to(torch.promote_types(last.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(last.dtype)
