"""What a step must multiply: the formulas of dflash-spec 6.1, and every matrix product of it by itself."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.slot import RowShape
from dflash_offline.train.spec import DrafterSpec


@dataclass(frozen=True, slots=True)
class Gemm:
    """`count` products [m, k] @ [k, n]; `layout` says which operand lies transposed in memory.

    nt: x [m, k] times a weight [n, k], as a linear layer goes forward. nn: a gradient times a weight [k, n], its
    input's gradient. tn: a gradient [k, m] times an input [k, n], its weight's gradient.
    """

    name: str
    layout: str
    m: int
    k: int
    n: int
    count: int = 1

    @property
    def flops(self) -> int:
        """Of all `count`."""
        return 2 * self.m * self.k * self.n * self.count


def linear(name: str, rows: int, inputs: int, outputs: int, count: int = 1, *, has_dx: bool = True) -> list[Gemm]:
    """Forward and backward of a linear layer that is applied to `rows` rows."""
    products = [
        Gemm(f"{name} forward", "nt", rows, inputs, outputs, count),
        Gemm(f"{name} weight gradient", "tn", outputs, rows, inputs, count),
    ]
    return products + ([Gemm(f"{name} input gradient", "nn", rows, outputs, inputs, count)] if has_dx else [])


def step_gemms(spec: DrafterSpec, shape: RowShape, chunk_blocks: int) -> list[Gemm]:
    """Every matrix product of one row's forward, loss and backward; the head's in chunks of `chunk_blocks` blocks."""
    hidden, layers = spec.hidden_size, spec.num_layers
    tokens, queries = shape.row_tokens, shape.num_queries
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    gemms = linear("fc", tokens, spec.num_taps * hidden, hidden, has_dx=False)
    gemms += linear("context k, v", tokens, hidden, kv_width, 2 * layers)
    gemms += linear("block q", queries, hidden, q_width, layers)
    gemms += linear("block k, v", queries, hidden, kv_width, 2 * layers)
    gemms += linear("block o", queries, q_width, hidden, layers)
    gemms += linear("gate, up", queries, hidden, spec.intermediate_size, 2 * layers)
    gemms += linear("down", queries, spec.intermediate_size, hidden, layers)
    rows, chunks = chunk_blocks * (shape.block_size - 1), shape.anchors // chunk_blocks
    gemms.append(Gemm("head forward", "nt", rows, hidden, spec.vocab_size, chunks))
    gemms.append(Gemm("head input gradient", "nn", rows, spec.vocab_size, hidden, chunks))
    return gemms


def mean_visible(behind: np.ndarray, block_size: int, kind: AttentionKind) -> float:
    """Mean keys that a slot sees, c + kappa of dflash-spec 6.1; `behind` [A] context tokens before each anchor.

    With a window W slot k sees the last W - 1 - k of them (dflash-spec 2.3).
    """
    context = np.repeat(behind[:, None], block_size, axis=1)  # [A, B]
    if kind.window is not None:
        context = np.minimum(context, np.maximum(kind.window - 1 - np.arange(block_size), 0))
    own = (block_size + 1) / 2 if kind.is_causal else block_size
    return float(context.mean()) + own


def step_flops(spec: DrafterSpec, shape: RowShape, visible: Sequence[float]) -> dict[str, float]:
    """Floating-point operations of one row, forward and backward, by part; `visible` is `mean_visible` of each layer.

    Multiply and add are two; P = A(B-1) positions go through the head, which is multiplied twice and not trained;
    padding slots of a block count for nothing.
    """
    hidden, layers, width = spec.hidden_size, spec.num_layers, spec.head_dim
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    tokens, queries = shape.row_tokens, shape.anchors * shape.block_size
    positions = shape.anchors * (shape.block_size - 1)
    return {
        "fc": 2 * 2 * tokens * spec.num_taps * hidden**2,
        "context k, v": 3 * 4 * tokens * hidden * kv_heads * width * layers,
        "block q, k, v, o": 3 * 4 * queries * hidden * (heads + kv_heads) * width * layers,
        "attention": 3.5 * 4 * queries * heads * width * sum(visible),
        "mlp": 3 * 6 * queries * hidden * spec.intermediate_size * layers,
        "head": 2 * 2 * positions * hidden * spec.vocab_size,
    }
