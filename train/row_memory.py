"""Bytes of a row's tensors and of a drafter's weights, from their shapes alone.

Plain arithmetic; knows no device, no tensor and no store. Letters are those of the project: T row tokens, A anchors,
Q query slots, H, I, V widths, L layers. What is kept for the backward was read off torch 2.13's partitioner at the 8B
and 27B widths; a test does it again.
"""

from dataclasses import dataclass
from math import prod

from .slot import TILE, RowShape
from .spec import DrafterSpec

WIDTHS = {"bfloat16": 2, "float32": 4}  # bytes of a number in the run's dtype
WIDE = 4  # bytes of a number that is float32 whatever the run's dtype
INDEX = 8  # bytes of a token id, a position or a place


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Bytes of the tensors of one row that many formulas name."""

    spec: DrafterSpec
    shape: RowShape
    width: int

    @property
    def blocks(self) -> int:
        """[Q, H]: the residual stream, a normed input, the hidden states, or a gradient of one."""
        return self.shape.num_queries * self.spec.hidden_size * self.width

    @property
    def context(self) -> int:
        """[T, H]: the fused taps."""
        return self.shape.row_tokens * self.spec.hidden_size * self.width

    @property
    def taps(self) -> int:
        """[T, Lt*H]."""
        return self.spec.num_taps * self.context

    @property
    def queries(self) -> int:
        """[nq, Q, d]."""
        return self.shape.num_queries * self.spec.num_heads * self.spec.head_dim * self.width

    @property
    def keys(self) -> int:
        """[nkv, T + Q, d]."""
        return self.shape.num_keys * self.spec.num_kv_heads * self.spec.head_dim * self.width

    @property
    def gated(self) -> int:
        """[Q, I]: gate, up, or their product."""
        return self.shape.num_queries * self.spec.intermediate_size * self.width

    @property
    def fused_taps(self) -> int:
        """Kept once a row: the fused taps before and after their norm, and its factors."""
        return 2 * self.context + WIDE * self.shape.row_tokens

    @property
    def attention(self) -> int:
        """Kept for the backward of a layer's attention.

        Its input and normed input; queries before their norm, rotated queries and the output; keys before their norm,
        rotated keys and values; in fp32 the factors of three norms and flex attention's logarithms of sums.
        """
        queries, spec = self.shape.num_queries, self.spec
        factors = queries + 2 * queries * spec.num_heads + self.shape.num_keys * spec.num_kv_heads
        return 2 * self.blocks + 3 * self.queries + 3 * self.keys + WIDE * factors

    @property
    def mlp(self) -> int:
        """Kept for the backward of a layer's MLP: its input and normed input, gate, up and their product."""
        return 2 * self.blocks + 3 * self.gated + WIDE * self.shape.num_queries

    def kept(self, is_checkpointed: bool) -> int:
        """Kept from the forward to the backward, the blocks' embeddings counted (the first layer's input).

        With checkpointing the layers keep their inputs alone; without it also what the last norm read.
        """
        layers, queries = self.spec.num_layers, self.shape.num_queries
        if is_checkpointed:
            return self.fused_taps + layers * self.blocks + WIDE * queries
        return self.fused_taps + layers * (self.attention + self.mlp) + self.blocks + WIDE * queries


def attention_matrices(spec: DrafterSpec) -> list[tuple[int, int]]:
    """Shapes of the four projections of a layer's attention, the one of its output last."""
    hidden, queries, keys = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]


def mlp_matrices(spec: DrafterSpec) -> list[tuple[int, int]]:
    """Shapes of gate, up and down projection."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return [(inner, hidden), (inner, hidden), (hidden, inner)]


def matrices(spec: DrafterSpec) -> list[tuple[int, int]]:
    """Shapes of all matrices of the drafter (dflash-spec 1.2)."""
    fused = (spec.hidden_size, spec.num_taps * spec.hidden_size)
    return [fused] + (attention_matrices(spec) + mlp_matrices(spec)) * spec.num_layers


def num_norm_weights(spec: DrafterSpec) -> int:
    """Weights of all norms: two of the drafter, and four of each layer."""
    return 2 * spec.hidden_size + spec.num_layers * 2 * (spec.hidden_size + spec.head_dim)


def row_buffers(sizes: RowSizes, has_last: bool) -> int:
    """Bytes of a RowBatch on CUDA: states, ids, masks, labels, and the tiles of each kind's block mask.

    A block mask lists, for rows of queries and for columns of keys, partial and full tiles: counts and places in i32.
    """
    shape = sizes.shape
    ahead, slots = shape.row_tokens + shape.block_size, shape.anchors * (shape.block_size - 1)
    numbers = 2 * ahead + shape.row_tokens + 2 * shape.anchors + 2 * shape.num_queries + slots + shape.stride
    rows, columns = shape.num_queries // TILE, shape.num_keys // TILE
    tiles = len(sizes.spec.kinds) * 4 * (2 * rows + 2 * columns + 4 * rows * columns)
    states = sizes.taps + (sizes.context if has_last else 0)
    return states + INDEX * numbers + ahead + shape.anchors + WIDE * slots + tiles


def num_weights(spec: DrafterSpec) -> int:
    """All weights of the drafter."""
    return sum(map(prod, matrices(spec))) + num_norm_weights(spec)
