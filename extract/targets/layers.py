"""A target's decoder, its layers and the states that they give: found, cut off, caught; run without a question.

Knows the layout that an adapter describes. Knows nothing of facts other than the number of layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import masking_utils

from ... import UserError
from .adapter import Adapter
from .base import TargetFacts


def find_decoder(model: Any, adapter: Adapter, facts: TargetFacts) -> Any:
    """The module whose `layers` are the decoder layers that tap ids count.

    Raises UserError, naming the class, where its layers or its final norm are not to be found.
    """
    decoder = adapter.decoder(model)
    layers: Any = getattr(decoder, "layers", None)
    if isinstance(layers, nn.ModuleList) and len(layers) == facts.num_layers and hasattr(decoder, adapter.norm):
        return decoder
    raise UserError(
        f"target {facts.name!r} ({facts.architecture}): its decoder is a {type(decoder).__name__}",
        f"a decoder of transformers with {facts.num_layers} modules in `layers`, and a `{adapter.norm}`",
        "choose another target, or write an adapter for this family (docs/targets.md)",
    )


@contextmanager
def first_layers(decoder: Any, count: int) -> Iterator[None]:
    """Inside, the decoder has only its first `count` layers."""
    whole = decoder.layers
    decoder.layers = whole[:count]
    try:
        yield
    finally:
        decoder.layers = whole


@contextmanager
def unpacked_rows() -> Iterator[None]:
    """Inside, transformers takes no row for several packed texts, and so does not ask the device whether it is one.

    Without a mask and a cache it looks at the positions of each forward, on the device (since pull request 39194 of
    huggingface/transformers): the host would wait there for all that it sent before, with nothing sent behind it. A
    row of ours is one text, its positions are 0, 1, 2, ... To be deleted when a forward can be told so; 5.24's cannot.
    """
    asked = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = asked


@contextmanager
def copied_outputs(decoder: Any, adapter: Adapter, places: dict[int, torch.Tensor]) -> Iterator[None]:
    """Inside, the state after each named layer is copied to its place [N, S, H].

    A forward raises UserError for a layer whose states are not one for each token, H wide.
    """

    def hook_for(layer: int, place: torch.Tensor) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            state = adapter.state(output)
            if state.shape != place.shape:
                raise UserError(
                    f"layer {layer} of the target ({type(module).__name__}) gives states {list(state.shape)}",
                    f"{list(place.shape)}: one state for each token, as wide as the embedding",
                    "choose another target; a family with several residual streams has no tap (docs/targets.md)",
                )
            place.copy_(state)

        return hook

    handles = [decoder.layers[layer].register_forward_hook(hook_for(layer, place)) for layer, place in places.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
