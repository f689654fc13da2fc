"""Every matrix product of a step by itself; their sum is that of the formulas in train/flops.py."""

from dataclasses import dataclass

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
