"""What a drafter keeps of several texts while they are decoded together: keys and values of their contexts.

Knows tensors and what the layers see; no model and no weights.
"""

from collections.abc import Sequence

import torch

from .attention import KeysValues, Piece, Visible
from .kinds import AttentionKind
from .spec import DrafterSpec

FIRST_CAPACITY = 256  # tokens of a row before it grows


class ContextRows:
    """Contexts of several sequences, one a row, each of its own length, at positions 0 .. length - 1.

    Rows have one capacity, which doubles; what lies behind a row's length is never looked at. A row that was dropped
    is given to the next sequence.
    """

    def __init__(self, spec: DrafterSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.spec = spec
        self.lengths: list[int] = []
        self.free: list[int] = []
        shape = (2, spec.num_kv_heads, 0, FIRST_CAPACITY, spec.head_dim)
        # each [2 (keys, values), nkv, rows, capacity, d]
        self.layers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]

    @property
    def capacity(self) -> int:
        return self.layers[0].shape[3]

    def add(self) -> int:
        """The number of an empty row."""
        if self.free:
            return self.free.pop()
        self.lengths.append(0)
        self.grow(self.capacity)
        return len(self.lengths) - 1

    def drop(self, number: int) -> None:
        """Forgets a row's sequence."""
        self.lengths[number] = 0
        self.free.append(number)

    def grow(self, capacity: int) -> None:
        """Room for all rows of this capacity; what is held stays."""
        for i, held in enumerate(self.layers):
            larger = held.new_empty(*held.shape[:2], len(self.lengths), capacity, held.shape[4])
            larger[:, :, : held.shape[2], : held.shape[3]] = held
            self.layers[i] = larger

    def append(self, numbers: Sequence[int], counts: Sequence[int], layers: list[KeysValues]) -> None:
        """Adds counts[i] tokens to each row; `layers` hold the keys and values [nkv, sum of counts, d] of all."""
        longest = max(self.lengths[number] + count for number, count in zip(numbers, counts))
        if longest > self.capacity:
            self.grow(max(longest, 2 * self.capacity))
        for held, new in zip(self.layers, layers):
            for kept, parts in zip(held, new):  # keys, then values
                for number, part in zip(numbers, parts.split(list(counts), dim=1)):
                    kept[:, number, self.lengths[number] : self.lengths[number] + part.shape[1]] = part
        for number, count in zip(numbers, counts):
            self.lengths[number] += count

    def context(self, layer: int) -> KeysValues:
        """Keys and values of a layer, all rows end to end: two views of [nkv, rows * capacity, d]."""
        held = self.layers[layer].flatten(2, 3)
        return held[0], held[1]

    def visible(self, numbers: Sequence[int], block_size: int) -> list[Visible]:
        """What blocks right behind these rows see, for each kind of attention in the order of `spec.kinds`."""
        return [
            [self.piece(kind, place, number, block_size) for place, number in enumerate(numbers)]
            for kind in self.spec.kinds
        ]

    def piece(self, kind: AttentionKind, place: int, number: int, block_size: int) -> Piece:
        """The block at `place` among the blocks, behind row `number`: its own slots and its own row's context."""
        length, begin, device = self.lengths[number], number * self.capacity, self.layers[0].device
        slots, tokens = torch.arange(block_size, device=device), torch.arange(length, device=device)
        context = torch.ones(block_size, length, dtype=torch.bool, device=device)
        own = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
        if kind.window is not None:
            context = length + slots[:, None] - tokens < kind.window
        if kind.is_causal:
            own = slots[:, None] >= slots
        queries = slice(place * block_size, (place + 1) * block_size)
        return Piece(queries, slice(begin, begin + length), queries, torch.cat([context, own], dim=1))
