"""Floating-point operations of a row, by the formulas of dflash-spec 6.1. Plain arithmetic; no tensor, no device."""

from collections.abc import Sequence

import numpy as np

from .kinds import AttentionKind
from .slot import RowArrays, RowShape
from .spec import DrafterSpec


def row_flops(spec: DrafterSpec, row: RowArrays, shape: RowShape, *, has_teacher: bool = False) -> float:
    """Operations of this row's forward, loss and backward; spare anchors are computed like others and count."""
    behind = tokens_behind(row)
    visible = {kind: mean_visible(behind, shape.block_size, kind) for kind in set(spec.attention)}
    parts = step_flops(spec, shape, [visible[kind] for kind in spec.attention], has_teacher=has_teacher)
    return float(sum(parts.values()))


def tokens_behind(row: RowArrays) -> np.ndarray:
    """Tokens of its own sample that lie in the row before each anchor: [A]."""
    begins = np.flatnonzero(np.diff(row.sample_ids, prepend=row.sample_ids[0] - 1))
    return row.anchors - begins[np.searchsorted(begins, row.anchors, side="right") - 1]


def mean_visible(behind: np.ndarray, block_size: int, kind: AttentionKind) -> float:
    """Mean keys that a slot sees, c + kappa of dflash-spec 6.1; `behind` [A] context tokens before each anchor.

    With a window W slot k sees the last W - 1 - k of them (dflash-spec 2.3).
    """
    context = np.repeat(behind[:, None], block_size, axis=1)  # [A, B]
    if kind.window is not None:
        context = np.minimum(context, np.maximum(kind.window - 1 - np.arange(block_size), 0))
    own = (block_size + 1) / 2 if kind.is_causal else block_size
    return float(context.mean()) + own


def step_flops(
    spec: DrafterSpec, shape: RowShape, visible: Sequence[float], *, has_teacher: bool = False
) -> dict[str, float]:
    """Floating-point operations of one row, forward and backward, by part; `visible` is `mean_visible` of each layer.

    Multiply and add are two; P = A(B-1) positions go through the head, which is multiplied twice and not trained, and
    with `has_teacher` once more for the target's own distribution; padding slots of a block count for nothing.
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
        "head": (3 if has_teacher else 2) * 2 * positions * hidden * spec.vocab_size,
    }
