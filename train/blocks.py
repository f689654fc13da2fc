"""What a slot of a block may see: the dense rule, and its tiles by arithmetic.

Queries are A blocks of `stride` slots laid end to end, keys the T context tokens and then the blocks'
own slots. Slot k of a block with anchor a and sample start s sees context token t iff s <= t < a and,
with a window W, t > a + k - W; of the block tokens only its own block's, where causal only up to k
(dflash-spec 2.3). Slots from B on are padding: nobody sees them, and they see what slot B-1 sees, so
that no query is ever without a key.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .kinds import AttentionKind
from .slot import TILE, RowShape

FULL_KIND = AttentionKind()


class RowMasks:
    """The masks of a row, one for each kind of attention, in memory that stays where it is.

    `anchors` [A] are row indices, `starts` [A] the first row index of each anchor's sample; both are kept,
    not copied, unless they are strided. After their owner wrote others into them, `refill` brings the masks up
    to date in place: a compiled step sees the same tensors for every row, a CUDA graph the same addresses.
    All kinds share the two, as a compiled step guards. `is_tiled` takes BlockMasks, as CUDA needs, in place
    of dense masks; it is decided by the device where it is None.
    """

    def __init__(
        self,
        anchors: Tensor,
        starts: Tensor,
        shape: RowShape,
        kinds: Sequence[AttentionKind],
        *,
        is_tiled: bool | None = None,
    ) -> None:
        self.anchors, self.starts = anchors.contiguous(), starts.contiguous()
        self.shape, self.kinds = shape, tuple(kinds)
        make = flex_mask if (anchors.is_cuda if is_tiled is None else is_tiled) else dense_mask
        self.masks = tuple(make(self.anchors, self.starts, shape, kind) for kind in self.kinds)

    def refill(self) -> None:
        """Makes every mask that of the present anchors; nothing is allocated that outlives the call."""
        for mask, kind in zip(self.masks, self.kinds):
            if isinstance(mask, Tensor):
                mask[:, : self.shape.row_tokens] = context_mask(self.anchors, self.starts, self.shape, kind.window)
            else:
                refill_tiles(mask, *tiles(self.anchors, self.starts, self.shape, kind.window))

    def tensors(self) -> tuple[Tensor, ...]:
        """All memory that the masks read."""
        held = [self.anchors, self.starts]
        for mask in self.masks:
            held += [mask] if isinstance(mask, Tensor) else [*tile_places(mask)[0], *tile_places(mask)[1]]
        return tuple(held)


def dense_mask(anchors: Tensor, starts: Tensor, shape: RowShape, kind: AttentionKind = FULL_KIND) -> Tensor:
    """bool [Q, T+Q], True = visible; the rule itself, and the mask of the CPU path."""
    context = context_mask(anchors, starts, shape, kind.window)
    return torch.cat([context, own_mask(shape, kind.is_causal, anchors.device)], dim=1)


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

    Exact for anchors in any order; sorted ones skip the most. Holds with and without causality, since
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


def flex_mask(anchors: Tensor, starts: Tensor, shape: RowShape, kind: AttentionKind = FULL_KIND) -> BlockMask:
    """The same rule as a BlockMask; keeps `anchors` and `starts`, evaluates the rule in partial tiles only.

    A compiled step guards the strides of both, so they must be contiguous: a column of a table would be a recompile.
    """
    assert anchors.is_contiguous()
    assert starts.is_contiguous()
    partial, full = tiles(anchors, starts, shape, kind.window)
    row_tokens, stride, last_slot = shape.row_tokens, shape.stride, shape.block_size - 1
    window, causal = kind.window, kind.is_causal

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
        *compressed(partial),
        *compressed(full),
        BLOCK_SIZE=TILE,
        mask_mod=rule,
        seq_lengths=(shape.num_queries, shape.num_keys),
    )


def refill_tiles(mask: BlockMask, partial: Tensor, full: Tensor) -> None:
    """Writes other tiles of the same shape into a mask of `flex_mask`, into the very tensors that it has.

    Those are count and columns for each row of queries and, for the backward, count and rows for each column of keys.
    """
    for place, (one, other) in zip(tile_places(mask), ((partial, full), (partial.T, full.T))):
        for held, fresh in zip(place, (*compressed(one), *compressed(other))):
            held.copy_(fresh)


def tile_places(mask: BlockMask) -> tuple[list[Tensor], list[Tensor]]:
    """The index tensors of a mask, by rows of queries and by columns of keys: partial tiles, then full ones."""
    rows = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    columns = (mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices)
    found = [tensor for tensor in (*rows, *columns) if tensor is not None]
    assert len(found) == 2 * len(rows)
    return found[: len(rows)], found[len(rows) :]


def compressed(marked: Tensor) -> tuple[Tensor, Tensor]:
    """Count and columns of the marked tiles of each row, marked ones first: i32 [1, 1, rows(, columns)]."""
    counts = marked.sum(1, dtype=torch.int32)
    columns = torch.argsort(marked.to(torch.int8), dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], columns[None, None].contiguous()
