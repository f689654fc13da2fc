"""The one shape of every row, and the bytes in which a loader hands a row over.

Knows numbers and numpy only: the loader process fills a slot and never imports torch,
`batch.py` reads it on the trainer's side.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .. import UserError
from ..store.codecs import Codec, get_codec

TILE = 128  # edge of an attention tile, tokens (flex-attention's block size; dflash-spec 2.3)
ALIGNMENT = 64  # every array of a slot starts on a multiple of this many bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RowShape:
    """T tokens, A anchors and blocks of B slots: constant over a run.

    A block takes `stride` query slots, the smallest power of two that holds B, so that blocks
    never straddle tiles; slots from B on are padding without a label. Raises UserError where
    T or Q is no multiple of 128 or B is outside 2..128.
    """

    row_tokens: int
    anchors: int
    block_size: int

    def __post_init__(self) -> None:
        if not 2 <= self.block_size <= TILE:
            raise UserError(f"block_size = {self.block_size}", f"2 to {TILE} tokens", "choose another block size")
        if self.row_tokens < TILE or self.row_tokens % TILE:
            rounded = max(-(-self.row_tokens // TILE), 1) * TILE
            raise UserError(f"row_tokens = {self.row_tokens}", f"a multiple of {TILE}", f"set row_tokens = {rounded}")
        if self.anchors < 1 or self.anchors % self.unit:
            rounded = max(-(-self.anchors // self.unit), 1) * self.unit
            raise UserError(
                f"anchors = {self.anchors} with blocks of {self.block_size}",
                f"a multiple of {self.unit}, so that whole tiles of {TILE} slots are filled",
                f"set anchors = {rounded}",
            )

    @property
    def stride(self) -> int:
        """Query slots of one block: the smallest power of two that holds B."""
        return block_stride(self.block_size)

    @property
    def unit(self) -> int:
        """Blocks in one tile of queries."""
        return TILE // self.stride

    @property
    def num_queries(self) -> int:
        """Q, query slots of a row."""
        return self.anchors * self.stride

    @property
    def num_keys(self) -> int:
        """T + Q: the context's keys, then the blocks' own."""
        return self.row_tokens + self.num_queries


def block_stride(block_size: int) -> int:
    """The smallest power of two that holds a block; it divides a tile of 128."""
    return 1 << (block_size - 1).bit_length()


def default_anchors(row_tokens: int, block_size: int) -> int:
    """One anchor for every eight tokens, rounded up to whole tiles."""
    unit = TILE // block_stride(block_size)
    return -(-max(row_tokens // 8, 1) // unit) * unit


def equal_chunk(num_blocks: int, chunk_blocks: int) -> int:
    """The largest divisor of `num_blocks` up to `chunk_blocks`: all chunks get one shape."""
    return next(size for size in range(min(chunk_blocks, num_blocks), 0, -1) if num_blocks % size == 0)


@dataclass(frozen=True, slots=True)
class RowArrays:
    """Numpy views into one slot; the slot owns the memory.

    The writer fills every array each time. Rows of `taps` and `last` that hold no recorded state (padding,
    and the last token of a sample) must be zeros, which every codec decodes to zeros: a masked NaN
    still spreads through attention.
    """

    codec: Codec
    taps: np.ndarray  # [Lt, T, row_bytes] u8, encoded as the store holds them; raw and zstd: bits of bfloat16
    ids: np.ndarray  # [T+B] i64; zeros behind the last sample
    loss_mask: np.ndarray  # [T+B] bool, True = trained on; False behind the last sample
    sample_ids: np.ndarray  # [T] i32, any number that differs between neighbours; -1 = padding
    positions: np.ndarray  # [T] i32, position inside the sample; 0 = padding
    anchors: np.ndarray  # [A] i32, sorted row indices
    keep: np.ndarray  # [A] bool, False = spare slot
    last: np.ndarray | None = None  # [T, row_bytes] u8, as `taps`; the target's last states, where the run reads them


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSlot:
    """Where each array of a row lies in a slot of bytes."""

    shape: RowShape
    num_taps: int
    hidden_size: int
    codec_name: str
    has_last: bool = False

    @property
    def codec(self) -> Codec:
        return get_codec(self.codec_name)

    def fields(self) -> list[tuple[str, tuple[int, ...], np.dtype]]:
        """(name, shape, dtype) of each array, in the order of their bytes."""
        tokens, block_size = self.shape.row_tokens, self.shape.block_size
        row_bytes = self.codec.row_bytes(self.hidden_size)
        last = [("last", (tokens, row_bytes), np.dtype(np.uint8))] if self.has_last else []
        return [
            ("taps", (self.num_taps, tokens, row_bytes), np.dtype(np.uint8)),
            *last,
            ("ids", (tokens + block_size,), np.dtype(np.int64)),
            ("loss_mask", (tokens + block_size,), np.dtype(np.bool_)),
            ("sample_ids", (tokens,), np.dtype(np.int32)),
            ("positions", (tokens,), np.dtype(np.int32)),
            ("anchors", (self.shape.anchors,), np.dtype(np.int32)),
            ("keep", (self.shape.anchors,), np.dtype(np.bool_)),
        ]

    def places(self) -> Iterator[tuple[str, slice, tuple[int, ...], np.dtype]]:
        """(name, bytes of the slot, shape, dtype) of each array."""
        offset = 0
        for name, shape, dtype in self.fields():
            yield name, slice(offset, offset + num_bytes(shape, dtype)), shape, dtype
            offset += padded_bytes(shape, dtype)

    @property
    def size_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(padded_bytes(shape, dtype) for _, shape, dtype in self.fields())

    def view(self, memory: np.ndarray) -> RowArrays:
        """Views into `memory` (u8, at least `size_bytes` long)."""
        if memory.dtype != np.uint8 or memory.size < self.size_bytes:
            raise ValueError(f"slot of {memory.size} {memory.dtype}, expected at least {self.size_bytes} uint8")
        arrays = {name: memory[place].view(dtype).reshape(shape) for name, place, shape, dtype in self.places()}
        return RowArrays(codec=self.codec, **arrays)

    def allocate(self) -> RowArrays:
        """A row of its own, all zeros and padding; for a caller without a ring."""
        arrays = self.view(np.zeros(self.size_bytes, np.uint8))
        arrays.sample_ids[:] = -1
        return arrays


def num_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return int(np.prod(shape)) * dtype.itemsize


def padded_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return -(-num_bytes(shape, dtype) // ALIGNMENT) * ALIGNMENT
