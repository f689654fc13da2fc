"""What a slot of a block may see: the dense rule, and its tiles by arithmetic.

Queries are A blocks of `stride` slots laid end to end, keys the T context tokens and then the blocks'
own slots. Slot k of a block with anchor a and sample start s sees context token t iff s <= t < a and,
with a window W, t > a + k - W; of the block tokens only its own block's, with `causal` only up to k
(dflash-spec 2.3). Slots from B on are padding: nobody sees them, and they see what slot B-1 sees, so
that no query is ever without a key.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .slot import TILE, RowShape


def dense_mask(
    anchors: Tensor, starts: Tensor, shape: RowShape, window: int | None = None, causal: bool = False
) -> Tensor:
    """bool [Q, T+Q], True = visible; the rule itself, and the mask of the CPU path.

    `anchors` [A] are row indices, `starts` [A] the first row index of each anchor's sample.
    """
    return torch.cat([context_mask(anchors, starts, shape, window), own_mask(shape, causal, anchors.device)], dim=1)


def context_mask(anchors: Tensor, starts: Tensor, shape: RowShape, window: int | None = None) -> Tensor:
    """bool [Q, T]: which context tokens each slot sees."""
    context = torch.arange(shape.row_tokens, device=anchors.device)
    anchor, start = anchors[:, None, None], starts[:, None, None]  # [A, 1, 1]
    seen = (context >= start) & (context < anchor)  # [A, 1, T]
    if window is not None:
        slot = torch.arange(shape.stride, device=anchors.device).clamp(max=shape.block_size - 1)[None, :, None]
        seen = seen & (context > anchor + slot - window)  # [A, stride, T]
    return seen.expand(shape.anchors, shape.stride, shape.row_tokens).reshape(shape.num_queries, shape.row_tokens)


def own_mask(shape: RowShape, causal: bool, device: torch.device) -> Tensor:
    """bool [Q, Q]: which block tokens each slot sees; the same for every row."""
    query, key = (torch.arange(shape.num_queries, device=device).view(*axes) for axes in ((-1, 1), (1, -1)))
    slot = (query % shape.stride).clamp(max=shape.block_size - 1)
    last = slot if causal else shape.block_size - 1
    return (query // shape.stride == key // shape.stride) & (key % shape.stride <= last)


def tiles(anchors: Tensor, starts: Tensor, shape: RowShape, window: int | None = None) -> tuple[Tensor, Tensor]:
    """(partial, full): bool [Q/128, (T+Q)/128] each; a full tile is visible as a whole.

    Exact for anchors in any order; sorted ones skip the most. Holds with and without `causal`, since
    a block's own tile is always partial.
    """
    num_rows, num_columns = shape.num_queries // TILE, shape.num_keys // TILE
    first, last = starts, starts  # leftmost key that any slot, and that every slot of the block sees
    if window is not None:
        first = torch.maximum(starts, anchors - window + 1)
        last = torch.maximum(starts, anchors + shape.block_size - window)
    anchor, first, last = (x.view(num_rows, shape.unit) for x in (anchors, first, last))
    column = torch.arange(num_columns, device=anchors.device)[None]
    begin, end = column * TILE, (column + 1) * TILE
    in_context = begin < shape.row_tokens
    touched = in_context & (end > first.amin(1, keepdim=True)) & (begin < anchor.amax(1, keepdim=True))
    full = touched & (last.amax(1, keepdim=True) <= begin) & (anchor.amin(1, keepdim=True) >= end)
    own_column = shape.row_tokens // TILE + torch.arange(num_rows, device=anchors.device)[:, None]
    return (touched & ~full) | (column == own_column), full


def flex_mask(
    anchors: Tensor, starts: Tensor, shape: RowShape, window: int | None = None, causal: bool = False
) -> BlockMask:
    """The same rule as a BlockMask; keeps `anchors` and `starts`, evaluates the rule in partial tiles only.

    A compiled step guards the strides of both, so they are kept contiguous: a column of a table would be a recompile.
    """
    anchors, starts = anchors.contiguous(), starts.contiguous()
    partial, full = tiles(anchors, starts, shape, window)
    partial_counts, partial_columns = compressed(partial)
    full_counts, full_columns = compressed(full)
    row_tokens, stride, last_slot = shape.row_tokens, shape.stride, shape.block_size - 1

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // stride
        slot = (query % stride).clamp(max=last_slot)
        anchor = anchors[block]
        context = (key < row_tokens) & (key < anchor) & (key >= starts[block])
        if window is not None:
            context = context & (key > anchor + slot - window)
        own_slot = (key - row_tokens) % stride
        own = (key >= row_tokens) & ((key - row_tokens) // stride == block)
        return context | (own & (own_slot <= (slot if causal else last_slot)))

    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_columns,
        full_counts,
        full_columns,
        BLOCK_SIZE=TILE,
        mask_mod=rule,
        seq_lengths=(shape.num_queries, shape.num_keys),
    )


def compressed(marked: Tensor) -> tuple[Tensor, Tensor]:
    """Count and columns of the marked tiles of each row, marked ones first: i32 [1, 1, rows(, columns)]."""
    counts = marked.sum(1, dtype=torch.int32)
    columns = torch.argsort(marked.to(torch.int8), dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], columns[None, None].contiguous()
