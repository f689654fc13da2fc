"""The arithmetic of a chunk of the loss on CUDA, for objectives that know the label alone: two Triton kernels.

The first reads the products once and gives each slot's numbers; the second reads them once more and writes the
gradient over them. So a chunk's logits exist once, in the products' own dtype, and are moved three times; what
`make_chunk_loss` says of them is the reference. Needs Triton.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from .config import LossConfig
from .loss import ChunkFunction, Head, SlotNumbers
from .objectives import LABEL_OBJECTIVES
from .slot_weights import dynamic_weights

BLOCK = 4096  # tokens that a program looks at together
REACH = 8  # neighbours of which a lane takes the largest first
NUM_WARPS = 8


def make_label_loss(config: LossConfig, head: Head) -> ChunkFunction:
    """The function of `make_chunk_loss` for an objective of LABEL_OBJECTIVES; products are [n, V] bf16 or fp32 on CUDA.

    The gradient it gives is the products' memory. A label that is no token gives a loss that is not finite.
    """
    objective = LABEL_OBJECTIVES[config.objective]

    def chunk_loss(
        products: Tensor, _teacher: Tensor | None, labels: Tensor, weights: Tensor
    ) -> tuple[SlotNumbers, Tensor]:
        shape, label = labels.shape, labels.reshape(-1).contiguous()
        nll, log_sum, best = slot_numbers(products, label, head)
        told, hit = objective(nll), best == label
        factor = dynamic_weights(config, nll.view(shape), hit.view(shape), weights > 0)
        used = weights if factor is None else weights * factor
        scale = used.reshape(-1)
        write_gradient(products, label, log_sum, scale * told.factor, scale * told.label_error, head)
        return SlotNumbers(used, told.value.view(shape), nll.view(shape), hit.view(shape), None), products

    return chunk_loss


def slot_numbers(products: Tensor, label: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of products [n, V]: -log q(label) and log sum exp of the logits, fp32, and the likeliest token, i64.

    The first of several that are the likeliest, as torch's argmax.
    """
    assert products.is_contiguous()
    num_rows, width = products.shape
    nll, log_sum = (torch.empty(num_rows, dtype=torch.float32, device=products.device) for _ in range(2))
    best = torch.empty(num_rows, dtype=torch.int64, device=products.device)
    launch(slot_kernel, num_rows, products, label, nll, log_sum, best, width, *cap_of(head), REACH)
    return nll, log_sum, best


def write_gradient(
    products: Tensor, label: Tensor, log_sum: Tensor, factor: Tensor, label_error: Tensor, head: Head
) -> None:
    """Writes d loss / d products over products [n, V].

    By the logits it is factor * q, and `label_error` at the label ([n] each): a row where both are 0 is not read.
    """
    assert products.is_contiguous()
    num_rows, width = products.shape
    num_programs = num_rows * triton.cdiv(width, BLOCK)
    launch(gradient_kernel, num_programs, products, label, log_sum, factor, label_error, width, *cap_of(head))


def launch(kernel: Any, num_programs: int, *arguments: Any) -> None:
    """Starts one of the kernels below, whose last argument is BLOCK."""
    kernel[(num_programs,)](*arguments, BLOCK, num_warps=NUM_WARPS)


def cap_of(head: Head) -> tuple[float, float, bool]:
    """Multiplier, soft cap (any number where there is none), and whether there is one."""
    return float(head.multiplier), float(head.softcap or 1.0), head.softcap is not None


@triton.jit
def logits_of(products, multiplier, softcap, has_cap: tl.constexpr):
    """softcap(multiplier * products), fp32; tanh by way of exp, exact at both ends."""
    out = products.to(tl.float32) * multiplier
    if has_cap:
        out = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * out / softcap)))
    return out


@triton.jit
def slot_kernel(
    products,
    labels,
    nll,
    log_sum,
    best,
    width,
    multiplier,
    softcap,
    has_cap: tl.constexpr,
    reach: tl.constexpr,
    block: tl.constexpr,
):
    """One row a program: every lane keeps its largest logit, its first place, and the sum of exponentials below it."""
    row = tl.program_id(0).to(tl.int64)
    own = products + row * width
    lanes = tl.arange(0, block // reach) * reach
    columns = lanes[:, None] + tl.arange(0, reach)[None, :]  # a lane's neighbours lie in one thread
    top = tl.full([block // reach], -float("inf"), tl.float32)
    total = tl.zeros([block // reach], tl.float32)
    place = tl.zeros([block // reach], tl.int32)
    for begin in range(0, width, block):
        here = begin + columns < width
        logit = logits_of(tl.load(own + begin + columns, mask=here, other=0.0), multiplier, softcap, has_cap)
        logit = tl.where(here, logit, -float("inf"))
        high, first = tl.max(logit, 1, return_indices=True)
        higher = tl.maximum(top, high)
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # no infinity less infinity
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(logit - shift[:, None]), 1)
        place = tl.where(high > top, begin + lanes + first, place)
        top = higher
    peak = tl.max(top, 0)
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    log_total = tl.log(tl.sum(total * tl.exp(top - shift), 0))
    label = tl.load(labels + row)
    is_token = (label >= 0) & (label < width)
    at_label = logits_of(tl.load(own + label, mask=is_token, other=float("nan")), multiplier, softcap, has_cap)
    tl.store(nll + row, log_total + (shift - at_label))
    tl.store(log_sum + row, log_total + shift)
    tl.store(best + row, tl.min(tl.where(top == peak, place, width), 0).to(tl.int64))


@triton.jit
def gradient_kernel(
    products,
    labels,
    log_sum,
    factor,
    label_error,
    width,
    multiplier,
    softcap,
    has_cap: tl.constexpr,
    block: tl.constexpr,
):
    """One piece of a row a program."""
    pieces = tl.cdiv(width, block)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    column = (tl.program_id(0) % pieces) * block + tl.arange(0, block)
    here = column < width
    own = products + row * width + column
    times, at_label = tl.load(factor + row), tl.load(label_error + row)
    out = tl.zeros([block], tl.float32)
    if (times != 0.0) | (at_label != 0.0):
        logit = logits_of(tl.load(own, mask=here, other=0.0), multiplier, softcap, has_cap)
        chance = tl.exp(logit - tl.load(log_sum + row))
        out = tl.where(column == tl.load(labels + row), at_label, chance * times) * multiplier
        if has_cap:
            share = logit / softcap
            out = out * (1.0 - share * share)
    tl.store(own, out.to(products.dtype.element_ty), mask=here)
