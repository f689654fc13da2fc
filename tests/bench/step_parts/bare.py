"""The matrix products and attention calls of a step, each alone: what the step would take with nothing around them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .flops import Gemm, step_gemms
from .ours import Ours
from .timing import median_ms


@dataclass(frozen=True, slots=True)
class Bare:
    """Milliseconds of all calls of one sort in a step."""

    name: str
    count: int
    ms: float  # of all `count`
    tflops: float | None


def gemm_ms(gemm: Gemm, device: torch.device, dtype: torch.dtype) -> float:
    """One product, its operands as autograd lays them out."""
    left = (gemm.k, gemm.m) if gemm.layout == "tn" else (gemm.m, gemm.k)
    right = (gemm.n, gemm.k) if gemm.layout == "nt" else (gemm.k, gemm.n)
    a, b = (torch.randn(axes, device=device, dtype=dtype) for axes in (left, right))
    a, b = a.t() if gemm.layout == "tn" else a, b.t() if gemm.layout == "nt" else b
    return median_ms(lambda: torch.mm(a, b), device)


def bare_gemms(ours: Ours, chunk_blocks: int) -> list[Bare]:
    found = []
    for gemm in step_gemms(ours.spec, ours.case.shape, chunk_blocks):
        ms = gemm_ms(gemm, ours.device, ours.dtype) * gemm.count
        found.append(Bare(gemm.name, gemm.count, ms, gemm.flops / ms / 1e9))
    return found


def bare_attention(ours: Ours) -> list[Bare]:
    """Compiled flex attention under the masks of the row that is loaded, in the step's own tiles; backward is both less
    forward."""
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    found = []
    layers = Counter(ours.spec.attention)
    for kind, mask in zip(ours.spec.kinds, ours.batch.masks, strict=True):
        assert isinstance(mask, BlockMask)
        forward_ms, both_ms = attention_ms(compiled, ours, mask)
        count = layers[kind]
        found.append(Bare(f"flex forward, {kind}", count, forward_ms * count, None))
        found.append(Bare(f"flex backward, {kind}", count, (both_ms - forward_ms) * count, None))
    return found


def attention_ms(compiled: Callable[..., Any], ours: Ours, mask: BlockMask) -> tuple[float, float]:
    """One forward, and one forward with its backward."""
    queries, keys, values, outer = attention_tensors(ours)
    options = ours.drafter.layers[0].self_attn.kernel_options

    def forward() -> Tensor:
        return compiled(queries, keys, values, block_mask=mask, enable_gqa=True, kernel_options=options)

    def both() -> object:
        return torch.autograd.grad(forward(), (queries, keys, values), outer)

    both()  # compiles
    return median_ms(forward, ours.device), median_ms(both, ours.device)


def attention_tensors(ours: Ours) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and the outer gradient; queries and gradient lie as the projections leave them."""
    spec, shape = ours.spec, ours.case.shape

    def heads_last(rows: int, heads: int) -> Tensor:
        drawn = torch.randn(rows, heads, spec.head_dim, device=ours.device, dtype=ours.dtype)
        return drawn.transpose(0, 1)[None]  # [1, heads, rows, d]

    queries, outer = (heads_last(shape.num_queries, spec.num_heads) for _ in range(2))
    keys, values = (heads_last(shape.num_keys, spec.num_kv_heads).contiguous() for _ in range(2))
    return queries.requires_grad_(), keys.requires_grad_(), values.requires_grad_(), outer
