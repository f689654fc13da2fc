"""Layers compiled by torch.compile for a few shapes of a batch, which every batch is padded up to.

torch.compile makes its kernels for one shape; a store has thousands. So a batch [N, S] is run as [rows, edge]: its
lengths up to the next of a few edges, its samples up to the most that the token budget allows at such lengths. Both
follow from the edge alone, so there are no more shapes than edges. Knows modules and shapes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

FIRST_EDGE = 64
PARTS = 4  # edges from one power of two to the next: at most a quarter of a length is added, an eighth on average
MOST_SHAPES = 64
"""Batches in any further shape run without it. 29 edges reach 8,192 tokens; a halved budget makes others of them."""


def edges_up_to(longest: int) -> list[int]:
    """64, 80, 96, 112, 128, 160, 192, 224, 256, 320, ... up to the first that is not below `longest`."""
    edges = [FIRST_EDGE]
    while edges[-1] < longest:
        octave = 1 << (edges[-1].bit_length() - 1)
        edges.append(edges[-1] + octave // PARTS)
    return edges


class CompiledLayers:
    """A decoder's layers, compiled; the hooks that catch states stay outside."""

    def __init__(self, decoder: Any, *, backend: Any = "inductor") -> None:
        self.decoder = decoder
        self.backend = backend
        self.shapes: set[tuple[int, int]] = set()
        """Those that were run so far."""
        self.forwards: dict[torch.nn.Module, Callable[..., Any]] = {}

    def shape_for(self, num_samples: int, longest: int, token_budget: int) -> tuple[int, int] | None:
        """The shape (rows, edge) that a batch is padded to, at most a quarter above the token budget.

        None where it is run as it is, without compiling: many samples far below the first edge, and shapes beyond
        the most. A sample longer than the budget goes alone.
        """
        *before, edge = edges_up_to(longest)
        shortest = before[-1] + 1 if before else edge * PARTS // (PARTS + 1)  # whose rows fill the budget
        shape = (max(1, token_budget // shortest), edge)
        is_known = shape in self.shapes or len(self.shapes) < MOST_SHAPES
        return shape if is_known and num_samples <= shape[0] else None

    @contextmanager
    def used(self, shape: tuple[int, int]) -> Iterator[None]:
        """Inside, the decoder's layers run compiled for this shape; after it as before.

        A layer may have a `forward` of its own: that with the hooks of accelerate, where several GPUs hold a target.
        """
        self.shapes.add(shape)
        layers = list(self.decoder.layers)
        limits = {"recompile_limit": 2 * MOST_SHAPES, "accumulated_recompile_limit": 2 * MOST_SHAPES * len(layers)}
        before = [vars(layer).get("forward") for layer in layers]
        with torch._dynamo.config.patch(limits):
            for layer in layers:
                layer.forward = self.compiled(layer)
            try:
                yield
            finally:
                for layer, own in zip(layers, before):
                    if own is None:
                        del layer.forward
                    else:
                        layer.forward = own

    def compiled(self, layer: torch.nn.Module) -> Callable[..., Any]:
        if layer not in self.forwards:
            self.forwards[layer] = torch.compile(layer.forward, dynamic=False, backend=self.backend)
        return self.forwards[layer]
