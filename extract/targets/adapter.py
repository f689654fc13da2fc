"""How a family differs from the layout that most decoders of transformers share.

An adapter is one small file, `adapter_MODELTYPE.py` beside this one, that sets `ADAPTER`; it is found by the
`model_type` of the text config. docs/targets.md says how to write one. Knows no target, no hook and no store.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ... import UserError


def decoder_of(model: Any) -> Any:
    """The module that takes input_ids and runs `layers`."""
    return model.get_decoder()


def only_state(output: Any) -> torch.Tensor:
    """A layer's output, or the first tensor of a tuple in which no other could be half of it.

    Raises UserError for two tensors of one shape: such a layer may leave hidden states and residual unadded.
    """
    if not isinstance(output, tuple):
        return output
    rest = [part for part in output[1:] if isinstance(part, torch.Tensor) and part.shape == output[0].shape]
    if rest:
        raise UserError(
            f"a layer of the target gives {1 + len(rest)} tensors of shape {list(output[0].shape)}",
            "the residual stream after the layer, one tensor",
            "write an adapter that adds what belongs together (docs/targets.md)",
        )
    return output[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """Where the parts of a causal language model lie; the defaults are what most families do."""

    decoder: Callable[[Any], Any] = decoder_of
    """From the model to the module with `layers` and the final norm."""
    norm: str = "norm"
    """The decoder's attribute that holds the final norm."""
    state: Callable[[Any], torch.Tensor] = only_state
    """From what a layer gives back to the residual stream after it [N, S, H], the sum of all branches."""


COMMON = Adapter()


def adapter_of(model_type: str) -> Adapter:
    """The family's own adapter where it has a file, else the common layout."""
    name = f"{__package__}.adapter_{model_type}"
    if not re.fullmatch(r"\w+", model_type) or find_spec(name) is None:
        return COMMON
    return import_module(name).ADAPTER
