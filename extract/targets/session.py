"""Decoding with a target's cache: one text with roll-back, or many prompts greedily.

Knows transformers' DynamicCache and nothing of drafters. Needs a target with a model,
facts and a decoder; it is `hf.HfTarget`.
"""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ... import UserError

if TYPE_CHECKING:
    from .hf import HfTarget


class Session:
    """Batch-1 decoding with a KV cache; `length` tokens are in the cache."""

    def __init__(self, target: "HfTarget", tap_layers: tuple[int, ...]) -> None:
        if target.facts.is_recurrent:
            raise UserError(
                f"target {target.facts.name!r} has recurrent layers, whose state cannot be rolled back",
                "a target with attention layers only",
                "evaluate offline on the store, which needs no target",
            )
        self.target = target
        self.tap_layers = tap_layers
        self.length = 0
        self._cache = new_cache(target)

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends ids [m]; gives logits [m, V] fp32 and taps [m, Lt*H] in the order of the list."""
        layers = self.target.decoder.layers
        caught: dict[int, torch.Tensor] = {}
        handles = [layers[layer].register_forward_hook(catcher(caught, layer)) for layer in self.tap_layers]
        try:
            output = run(self.target.model, ids.to(self.target.device)[None], self._cache)
        finally:
            for handle in handles:
                handle.remove()
        self.length += ids.shape[0]
        taps = torch.cat([caught[layer] for layer in self.tap_layers], dim=-1)  # [m, Lt*H]
        return output.logits[0].float(), taps

    def roll_back(self, length: int) -> None:
        """Forgets every token from `length` on."""
        assert 0 <= length <= self.length, f"roll back to {length} of {self.length} tokens"
        if length == 0:
            self._cache = new_cache(self.target)
        elif length < self.length:
            self._cache.crop(length - self.length)
        self.length = length


def catcher(caught: dict[int, torch.Tensor], layer: int) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        caught[layer] = (output[0] if isinstance(output, tuple) else output)[0]  # [m, H]

    return hook


def new_cache(target: "HfTarget") -> Any:
    """An empty cache. Sliding layers keep everything, as a window cannot be rolled back."""
    from transformers import DynamicCache

    config = target.model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    keeps_all = not target.facts.is_recurrent and kinds != {"full_attention"}
    return DynamicCache() if keeps_all else DynamicCache(config=config)


def run(model: Any, ids: torch.Tensor, cache: Any, **options: Any) -> Any:
    """One forward of ids [n, m] that extends the cache.

    The argument is called `cache` since transformers 5.24 and past_key_values before; delete
    the choice when the lowest version is 5.24.
    """
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(input_ids=ids, use_cache=True, **{name: cache}, **options)


def greedy_answers(target: "HfTarget", ids: torch.Tensor, max_new_tokens: int) -> Sequence[list[int]]:
    """Greedy continuations of ids [n, length]; finished rows leave the batch."""
    stops = torch.tensor(target.facts.eos_ids, dtype=torch.long, device=ids.device)
    answers: list[list[int]] = [[] for _ in range(ids.shape[0])]
    running = torch.arange(ids.shape[0], device=ids.device)
    cache, step = new_cache(target), ids
    last_only = "logits_to_keep" in inspect.signature(target.model.forward).parameters
    options = {"logits_to_keep": 1} if last_only else {}
    for _ in range(max_new_tokens):
        chosen = run(target.model, step, cache, **options).logits[:, -1].argmax(-1)  # [n]
        for row, token in zip(running.tolist(), chosen.tolist()):
            answers[row].append(token)
        keep = (~torch.isin(chosen, stops)).nonzero()[:, 0]
        if keep.numel() == 0:
            break
        if keep.numel() < running.numel():
            # reorder_cache, not batch_select_indices: recurrent layers know only the former (transformers 5.24)
            cache.reorder_cache(keep)
            running, chosen = running[keep], chosen[keep]
        step = chosen[:, None]
    return answers
