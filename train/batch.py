"""One row on the device: what the drafter reads and what its slots are held to.

Static buffers of constant shape, refilled from a loader's slot; knows no store and no loss.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..store.codecs import Codec
from .blocks import RowMasks
from .int8_rows import decode
from .slot import RowArrays, RowShape
from .spec import DrafterSpec


@dataclass(frozen=True, slots=True)
class RowTensors:
    """The arrays of `RowArrays` as tensors, wherever they lie; whoever makes them owns the memory."""

    codec: Codec
    taps: Tensor
    ids: Tensor
    loss_mask: Tensor
    sample_ids: Tensor
    positions: Tensor
    anchors: Tensor
    keep: Tensor
    last: Tensor | None = None


class RowBatch:
    """Buffers of one row of `shape`, allocated once on `device` and owned here.

    taps [T, Lt*H] and, with `has_last`, last [T, H] in `dtype`; ids, loss_mask, sample_ids [T+B] and positions [T]
    of the context; anchors, keep and starts [A] (row indices, True = counts, first row index of the anchor's
    sample); block_ids and block_positions [Q]; labels and valid [A, B-1] for slots 1..B-1; masks, one for each of
    `spec.kinds`, as the device's attention takes them.
    """

    def __init__(
        self, spec: DrafterSpec, shape: RowShape, device: torch.device, dtype: torch.dtype, *, has_last: bool = False
    ) -> None:
        if spec.block_size != shape.block_size:
            raise ValueError(f"a drafter of block size {spec.block_size} in rows of block size {shape.block_size}")
        self.spec, self.shape = spec, shape

        def buffer(*axes: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(axes, dtype=dtype, device=device)

        tokens, ahead = shape.row_tokens, shape.row_tokens + shape.block_size
        slots = (shape.anchors, shape.block_size - 1)
        self.taps = buffer(tokens, spec.num_taps * spec.hidden_size, dtype=dtype)
        self.last = buffer(tokens, spec.hidden_size, dtype=dtype) if has_last else None
        self.ids, self.loss_mask = buffer(ahead), buffer(ahead, dtype=torch.bool)
        self.sample_ids, self.positions = buffer(ahead), buffer(tokens)
        self.anchors, self.starts = buffer(shape.anchors), buffer(shape.anchors)
        self.keep = buffer(shape.anchors, dtype=torch.bool)
        self.block_ids, self.block_positions = buffer(shape.num_queries), buffer(shape.num_queries)
        self.labels, self.valid = buffer(*slots), buffer(*slots, dtype=torch.float32)
        self.slot_numbers = torch.arange(shape.stride, device=device)
        self.row_masks = RowMasks(self.anchors, self.starts, shape, spec.kinds)
        self.masks = self.row_masks.masks

    def load(self, row: RowArrays | RowTensors) -> None:
        """Fills the buffers from a row of the loader, in its slot or staged on the device."""
        self.load_taps(torch.as_tensor(row.taps), row.codec)
        if self.last is not None:
            assert row.last is not None, "a row without last states"
            load_plane(torch.as_tensor(row.last), row.codec, self.last)
        tokens = self.shape.row_tokens
        for own, array in (
            (self.ids, row.ids),
            (self.loss_mask, row.loss_mask),
            (self.sample_ids[:tokens], row.sample_ids),
            (self.positions, row.positions),
            (self.anchors, row.anchors),
            (self.keep, row.keep),
        ):
            own.copy_(torch.as_tensor(array), non_blocking=True)
        self.sample_ids[tokens:] = -1
        self.derive_blocks()
        self.derive_labels()
        self.row_masks.refill()

    def buffers(self) -> tuple[Tensor, ...]:
        """Every tensor that the step reads; they stay where they are for the batch's life."""
        own = (self.taps, self.positions, self.anchors, self.block_ids, self.block_positions, self.labels, self.valid)
        return own + (() if self.last is None else (self.last,)) + self.row_masks.tensors()

    def load_taps(self, encoded: Tensor, codec: Codec) -> None:
        """encoded [Lt, T, row_bytes] u8 to taps [T, Lt*H], decoded on the device."""
        num_taps, tokens, _ = encoded.shape
        taps = self.taps.view(tokens, num_taps, self.spec.hidden_size).transpose(0, 1)  # [Lt, T, H]
        for own, plane in zip(taps, encoded):  # tap by tap: only one of a host's is on the device twice
            load_plane(plane, codec, own)

    def derive_blocks(self) -> None:
        """Sample starts; ids (slot 0 the anchor's token, masks behind it and in spare blocks) and positions."""
        tokens = self.shape.row_tokens
        samples = self.sample_ids[:tokens]
        begins = torch.zeros_like(samples)
        begins[1:] = torch.where(samples[1:] != samples[:-1], torch.arange(1, tokens, device=samples.device), 0)
        self.starts.copy_(torch.cummax(begins, dim=0).values[self.anchors])
        self.block_ids.fill_(self.spec.mask_token_id)
        first = torch.where(self.keep, self.ids[self.anchors], self.spec.mask_token_id)
        self.block_ids.view(-1, self.shape.stride)[:, 0] = first
        self.block_positions.copy_((self.positions[self.anchors][:, None] + self.slot_numbers).view(-1))

    def derive_labels(self) -> None:
        """Slot k is held to the token at a+k while every token after the anchor is trained on and of its sample."""
        place = self.anchors[:, None] + self.slot_numbers[1 : self.shape.block_size]  # [A, B-1]
        self.labels.copy_(self.ids[place])
        same_sample = self.sample_ids[place] == self.sample_ids[self.anchors][:, None]
        valid = same_sample & self.loss_mask[place] & self.keep[:, None]
        self.valid.copy_(torch.cumprod(valid.to(torch.float32), dim=1))


def load_plane(encoded: Tensor, codec: Codec, own: Tensor) -> None:
    """encoded [T, row_bytes] u8 to own [T, H], decoded on the device; one on the host is copied there first."""
    rows = encoded.to(own.device, non_blocking=True)
    if codec.outliers is None:
        own.copy_(rows.view(torch.bfloat16))
    elif own.dtype == torch.bfloat16:
        decode(rows, own.shape[-1], codec.outliers, out=own)
    else:
        own.copy_(decode(rows, own.shape[-1], codec.outliers))
