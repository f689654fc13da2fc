"""The drafter's attention: one path per device, chosen by name and never by chance.

Training takes compiled flex attention on CUDA and explicit masks on a CPU (where flex attention has no
backward, torch 2.13); decoding takes one small dense call on both. Knows tensors only.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .kernel_options import Options
from .slot import TILE

KeysValues = tuple[Tensor, Tensor]  # each [nkv, n, d]


@dataclass(frozen=True, slots=True)
class Piece:
    """A tile of queries and the keys that any of them sees."""

    queries: slice
    context: slice
    own: slice
    mask: Tensor  # bool [queries, context + own], True = visible


Visible = BlockMask | list[Piece] | Tensor | None  # a Tensor is bool [Q, K]; None means everything


def visible_keys(mask: Tensor | BlockMask, num_context: int, device: torch.device) -> BlockMask | list[Piece]:
    """What a training forward on `device` hands to `attend`.

    Raises RuntimeError where it would leave its device's only path: a dense step on CUDA, an uncompiled
    flex attention (dense as well), a BlockMask on a CPU, another device.
    """
    if device.type == "cpu":
        if not isinstance(mask, Tensor):
            raise RuntimeError("on a CPU the drafter takes the dense mask: flex_attention has no backward there")
        return cut_mask(mask, num_context)
    if device.type != "cuda":
        raise RuntimeError(f"the drafter has no attention path for device {device}, only for cpu and cuda")
    if not isinstance(mask, BlockMask):
        raise RuntimeError("on CUDA the drafter takes a BlockMask: a dense attention step is never run there")
    if not torch.compiler.is_compiling():
        raise RuntimeError("on CUDA the drafter runs under torch.compile: uncompiled flex_attention is dense")
    return mask


def cut_mask(mask: Tensor, num_context: int) -> list[Piece]:
    """A dense mask [Q, K] in tiles of 128 queries, without the outer key columns that a whole tile does not see.

    Sorted anchors leave each tile a short span of the context and its own slots: a step of the demo's drafter
    takes 1.3 (B=8) to 1.7 (B=16) times less time (2026-11, one core of an AMD EPYC). Which columns fall away
    depends on all anchors of the tile, so a block's output moves with its neighbours' anchors by rounding.
    """
    pieces: list[Piece] = []
    for begin in range(0, len(mask), TILE):
        part = mask[begin : begin + TILE]
        seen = part.any(0)
        context, own = span(seen[:num_context]), span(seen[num_context:])
        columns = (part[:, context], part[:, own.start + num_context : own.stop + num_context])
        pieces.append(Piece(slice(begin, begin + len(part)), context, own, torch.cat(columns, dim=1)))
    return pieces


def span(seen: Tensor) -> slice:
    """From the first to behind the last True of bool [n]; empty where there is none."""
    places = seen.nonzero()
    return slice(int(places[0]), int(places[-1]) + 1) if len(places) else slice(0, 0)


def attend(
    queries: Tensor, context: KeysValues, own: KeysValues, visible: Visible, options: Options | None = None
) -> Tensor:
    """Attention of [nq, Q, d] over context and own keys, scale d^-0.5, grouped heads: [nq, Q, d].

    `options` are flex attention's, see `kernel_options`.
    """
    if isinstance(visible, list):
        return torch.cat([attend_piece(queries, context, own, piece) for piece in visible], dim=1)
    keys, values = (torch.cat(both, dim=1)[None] for both in zip(context, own))
    if isinstance(visible, BlockMask):
        named: Any = options  # torch's own type leaves the prefixed names out
        out = flex_attention(queries[None], keys, values, block_mask=visible, enable_gqa=True, kernel_options=named)
        assert isinstance(out, Tensor)
        return out[0]
    return F.scaled_dot_product_attention(queries[None], keys, values, attn_mask=visible, enable_gqa=True)[0]


def attend_piece(queries: Tensor, context: KeysValues, own: KeysValues, piece: Piece) -> Tensor:
    """Attention of one tile of queries over the keys it sees."""
    keys, values = (torch.cat([c[:, piece.context], o[:, piece.own]], dim=1)[None] for c, o in zip(context, own))
    part = queries[None, :, piece.queries]
    return F.scaled_dot_product_attention(part, keys, values, attn_mask=piece.mask, enable_gqa=True)[0]
