"""Decoding with a target's cache: one text with roll-back, or many prompts greedily.

Knows transformers' DynamicCache and nothing of drafters. Needs a target with a model,
facts and a decoder; it is `hf.HfTarget`.

A recurrent layer (Gated DeltaNet) keeps one running state, from which no token can be taken
back; transformers' `crop` leaves that state as it is (huggingface/transformers #49036). Such
layers are therefore copied before each forward, put back by a roll-back, and the tokens that
stay are run again.
"""

import copy
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ... import UserError

if TYPE_CHECKING:
    from .hf import HfTarget

CACHE_TOLERANCE = {"float32": 1e-2, "bfloat16": 0.1}  # median over positions; fast kernels use TF32 in float32


class Session:
    """Batch-1 decoding with a KV cache; `length` tokens are in the cache."""

    def __init__(self, target: "HfTarget", tap_layers: tuple[int, ...]) -> None:
        self.target = target
        self.tap_layers = tap_layers
        self._forget()

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return len(self._tokens)

    @property
    def cache(self) -> Any:
        """The text's cache, of transformers."""
        return self._cache

    @torch.no_grad()
    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends ids [m]; gives logits [m, V] fp32 and taps [m, Lt*H] in the order of the list."""
        layers = self.target.decoder.layers
        is_needed = self.length > 0 and self.target.facts.is_recurrent  # others are cropped
        self._kept = kept_layers(self._cache) if is_needed else {}
        self._kept_length = self.length
        caught: dict[int, torch.Tensor] = {}
        handles = [layers[layer].register_forward_hook(catcher(caught, layer)) for layer in self.tap_layers]
        try:
            output = run(self.target.model, ids.to(self.target.device)[None], self._cache)
        finally:
            for handle in handles:
                handle.remove()
        self._tokens += ids.tolist()
        taps = torch.cat([caught[layer] for layer in self.tap_layers], dim=-1)  # [m, Lt*H]
        return output.logits[0].float(), taps

    def roll_back(self, length: int) -> None:
        """Forgets every token from `length` on, recurrent states included.

        Costs a forward over the tokens that stay since the last `forward` where layers are
        recurrent, and over all that stay where that reaches behind it.
        """
        assert 0 <= length <= self.length, f"roll back to {length} of {self.length} tokens"
        if length == self.length:
            return
        tokens = self._tokens[:length]
        if self.target.facts.is_recurrent:
            self._read_again(tokens)
        elif length == 0:
            self._forget()
        else:
            self._cache.crop(length - self.length)
            self._tokens = tokens

    @torch.no_grad()
    def _read_again(self, tokens: list[int]) -> None:
        """Brings the cache to the state after `tokens`, from the kept copy or from nothing."""
        if 0 < self._kept_length <= len(tokens):
            surplus = self.length - self._kept_length
            for i, layer in enumerate(self._cache.layers):
                if i in self._kept:
                    self._cache.layers[i] = copied_layer(self._kept[i])
                else:
                    layer.crop(-surplus)
            self._tokens = tokens[: self._kept_length]
        else:
            self._forget()
        missing = torch.tensor(tokens[self.length :], dtype=torch.long, device=self.target.device)
        if len(missing):
            run(self.target.model, missing[None], self._cache, **last_logits_only(self.target.model))
        self._tokens = tokens

    def _forget(self) -> None:
        self._cache = new_cache(self.target)
        self._tokens: list[int] = []
        self._kept: dict[int, Any] = {}
        self._kept_length = 0


def kept_layers(cache: Any) -> dict[int, Any]:
    """Copies of the cache layers that cannot be cropped, by number; none where all keep every token."""
    from transformers.cache_utils import DynamicLayer

    return {i: copied_layer(layer) for i, layer in enumerate(cache.layers) if type(layer) is not DynamicLayer}


def copied_layer(layer: Any) -> Any:
    """The same layer with tensors of its own, whatever its class calls them."""
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            setattr(twin, name, value.clone())
        elif isinstance(value, dict):
            setattr(twin, name, {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in value.items()})
        elif isinstance(value, list):
            setattr(twin, name, [v.clone() if isinstance(v, torch.Tensor) else v for v in value])
    return twin


@torch.no_grad()
def require_right_cache(target: "HfTarget") -> None:
    """Refuses a target whose cached forwards, rolled back, are not the forward over the whole text.

    Some recurrent families of transformers read several tokens wrongly into a filled cache, or have a cache
    of their own; nothing else would show it. Raises UserError with the error and the tolerance.
    """
    tokens = min(target.facts.tokenizer_size, target.facts.vocab_size)
    ids = (torch.arange(21) * 37 + 11) % tokens  # [21]
    expected = "a cache of transformers that reads several tokens at once and can be rolled back"
    advice = "evaluate offline on the store, which needs no target, and report this architecture"
    try:
        session = Session(target, (0,))
        session.forward(ids[:9])
        session.forward(torch.cat([ids[9:11], ids[:3]]))
        session.roll_back(11)
        logits, _ = session.forward(ids[11:])  # [10, V]
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, RuntimeError) as error:
        happened = f"target {target.facts.name!r} cannot decode with a cache: {type(error).__name__}: {error}"
        raise UserError(happened.replace("\n", " ")[:300], expected, advice) from error
    whole = target.model(input_ids=ids.to(target.device)[None], use_cache=False).logits[0, 11:].float()  # [10, V]
    errors = torch.linalg.vector_norm(logits - whole, dim=-1) / torch.linalg.vector_norm(whole, dim=-1)  # [10]
    error = float(errors.median())
    if not error <= CACHE_TOLERANCE[target.facts.dtype]:
        raise UserError(
            f"target {target.facts.name!r} decodes wrongly with a cache: relative error {error:.2g} of its logits",
            f"{expected}, within {CACHE_TOLERANCE[target.facts.dtype]:g}",
            advice,
        )


def catcher(caught: dict[int, torch.Tensor], layer: int) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        caught[layer] = (output[0] if isinstance(output, tuple) else output)[0]  # [m, H]

    return hook


def new_cache(target: "HfTarget") -> Any:
    """An empty cache. Sliding layers keep everything, as a window cannot be rolled back."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache(config=target.model.config.get_text_config(decoder=True))
    if not target.facts.is_recurrent:
        cache.layers = [DynamicLayer() if getattr(one, "is_sliding", False) else one for one in cache.layers]
    return cache


def run(model: Any, ids: torch.Tensor, cache: Any, **options: Any) -> Any:
    """One forward of ids [n, m] that extends the cache.

    The argument is called `cache` since transformers 5.24 and past_key_values before; delete
    the choice when the lowest version is 5.24.
    """
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(input_ids=ids, use_cache=True, **{name: cache}, **options)


def last_logits_only(model: Any) -> dict[str, int]:
    """The option that spares the head all positions but the last, where the model has it."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def greedy_answers(target: "HfTarget", ids: torch.Tensor, max_new_tokens: int) -> Sequence[list[int]]:
    """Greedy continuations of ids [n, length]; finished rows leave the batch."""
    stops = torch.tensor(target.facts.eos_ids, dtype=torch.long, device=ids.device)
    answers: list[list[int]] = [[] for _ in range(ids.shape[0])]
    running = torch.arange(ids.shape[0], device=ids.device)
    cache, step = new_cache(target), ids
    options = last_logits_only(target.model)
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
