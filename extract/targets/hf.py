"""A target behind transformers: records taps, hands out its frozen parts, writes answers.

Knows the layout that causal language models of transformers share (a decoder with `layers`
and a norm, an embedding, a head; what differs stands in an adapter). Knows nothing of stores, samples or drafters.
"""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ... import UserError
from .adapter import adapter_of
from .base import TargetFacts, check_taps
from .batch_session import BatchSession, require_right_batch, single_reason
from .compiled import CompiledLayers
from .configs import config_of, is_quantized, text_config
from .facts import facts_of, load_tokenizer, read_facts, resolve_dtype, tokenizer_facts, tokenizer_of
from .frozen_parts import frozen_parts, logits_from, parts_of
from .kernels import distributions, hide_gpu_kernels, kernel_note, kernels_of, mute_fallbacks, slow_kernels
from .layers import copied_outputs, find_decoder, first_layers, unpacked_rows
from .loading import from_pretrained, require_whole
from .session import Session, greedy_answers, require_right_cache
from .source import locate
from .spread import require_on_devices, spread_over

__all__ = [
    "HfTarget",
    "load_target",
    "load_tokenizer",
    "read_facts",
    "resolve_name",
    "tokenizer_facts",
]


def resolve_name(name: str) -> Path:
    """The folder of a target; a hub id is downloaded. Raises UserError for an unknown name."""
    return locate(name, weights=True).folder


def load_target(name: str, *, device: str = "cpu", dtype: str = "auto", beside: Sequence[str] = ()) -> "HfTarget":
    """Loads the weights onto one device, or onto it and those `beside` it (CUDA, by accelerate), frozen, in eval mode.

    Raises UserError for an unknown target, for weights that leave a parameter unset (it would
    be random) or have tensors of the decoder that it does not take, and for a decoder whose layers cannot be found.
    """
    hide_gpu_kernels(device)
    mute_fallbacks()
    source = locate(name, weights=True)
    config, tokenizer = config_of(source), tokenizer_of(source)
    facts = facts_of(source, config, tokenizer, resolve_dtype(dtype, device))
    spread = spread_over((device, *beside)) if beside else {}
    model, info = from_pretrained(source, config, device, getattr(torch, facts.dtype), spread)
    require_whole(source, model, facts, info)
    if beside:
        require_on_devices(model, source.name)
    elif not is_quantized(config):  # those lie on the device already, and some cannot be moved
        model = model.to(device)
    return HfTarget(model.eval().requires_grad_(False), tokenizer, facts, device)


class HfTarget:
    """One frozen target on one device."""

    def __init__(self, model: Any, tokenizer: Any, facts: TargetFacts, device: str) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.facts = facts
        self.device = torch.device(device)
        self.dtype = getattr(torch, facts.dtype)
        self.adapter = adapter_of(text_config(model.config).model_type)
        self.decoder = find_decoder(model, self.adapter, facts)
        self.norm = getattr(self.decoder, self.adapter.norm)
        self.kernels = kernels_of(self.decoder) if facts.is_recurrent else ()
        self.has_right_cache = not facts.is_recurrent  # else looked at before the first decoding
        self.has_right_batch = False  # looked at before the first batch
        if self.device.type == "cpu" and any(kernel.is_fast for kernel in self.kernels):
            raise UserError(
                f"target {facts.name!r} on a CPU, in a process that loaded {', '.join(distributions(self.kernels))}",
                "one kind of device in a process: transformers chooses the kernels of recurrent layers once",
                "run the CPU's part as a command of its own",
            )

    @property
    def kernel_note(self) -> str | None:
        """What the recurrent layers run on, in one line; None for a target without any."""
        if not self.facts.is_recurrent:
            return None
        return kernel_note(self.facts.name, self.kernels, str(self.device))

    def require_fast_kernels(self) -> None:
        """Raises UserError where recurrent layers run in plain torch on CUDA, which no user means to do for days."""
        slow = slow_kernels(self.kernels) if self.device.type == "cuda" else []
        if slow:
            missing = distributions(slow)
            raise UserError(
                f"target {self.facts.name!r} runs {', '.join(kernel.function for kernel in slow)} in plain torch on "
                f"{self.device}: {', '.join(missing)} is not installed or cannot be imported",
                "the fast kernels of its recurrent layers (docs/benchmarks.md has the difference)",
                f"pip install {' '.join(missing)}, or give --slow-kernels to record slowly",
            )

    @torch.no_grad()
    def record(
        self,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        tap_layers: Sequence[int],
        *,
        last: bool = False,
        shape: tuple[int, int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Taps [Lt, N, S, H] and, when asked, the last state [N, S, H] before the final norm.

        `ids` [N, S] long is padded on the right, `lengths` [N] counts the real tokens; what the
        result holds from position lengths[i] on is undefined. No attention mask is needed: a
        causal layer at a real position sees no padding, and neither does a recurrent one, which
        reads from left to right. Layers after the deepest tap and the head run only with `last`. With
        `shape` (rows, edge) the batch is padded up to it and run through compiled layers. Nothing waits for the device.
        """
        check_taps(tap_layers, self.facts.num_layers)
        assert lengths.shape == ids.shape[:1], f"{len(lengths)} lengths for {len(ids)} samples"
        counts = lengths.tolist()
        assert 1 <= min(counts) <= max(counts) <= ids.shape[1], f"lengths {counts}"
        num_samples, longest = ids.shape
        ids = ids.to(self.device, non_blocking=True)
        if shape is not None:
            ids = F.pad(ids, (0, shape[1] - longest, 0, shape[0] - num_samples))
        size = (*ids.shape, self.facts.hidden_size)
        taps = torch.zeros((len(tap_layers), *size), dtype=self.dtype, device=self.device)  # [Lt, N, S, H]
        final = torch.zeros(size, dtype=self.dtype, device=self.device) if last else None  # [N, S, H]
        places = {layer: taps[index] for index, layer in enumerate(tap_layers)}
        depth = max(tap_layers) + 1
        if final is not None:
            depth = self.facts.num_layers
            places[depth - 1] = final
        layers = nullcontext() if shape is None else self.compiled.used(shape)
        caught, shortened = copied_outputs(self.decoder, self.adapter, places), first_layers(self.decoder, depth)
        with caught, shortened, unpacked_rows(), layers:
            self.decoder(input_ids=ids, use_cache=False)
        taps = taps[:, :num_samples, :longest]
        return taps, None if final is None else final[:num_samples, :longest]

    @cached_property
    def compiled(self) -> CompiledLayers:
        """The layers as `record` runs them with a shape."""
        return CompiledLayers(self.decoder)

    @torch.no_grad()
    def frozen(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors embedding [V, H], norm [H], head [V, H] (absent when tied), and the facts as a dict.

        Checked on a short forward: the parts give the target's own logits. Raises UserError when
        they do not, as for a family with a head that is not norm, matrix, scale and soft cap.
        """
        return frozen_parts(self.model, self.decoder, self.norm, self.facts), self.facts.as_plain()

    @torch.no_grad()
    def run_whole(
        self, ids: torch.Tensor, tap_layers: Sequence[int], places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One sample through the whole model: taps [Lt, n, H], last state [n, H], logits [m, V] fp32 at `places` [m].

        `ids` [n] long, `places` on the CPU. The slow reference for `record`: unpadded, through every layer, with
        the model's own norm and head.
        """
        shape = (1, len(ids), self.facts.hidden_size)
        states = torch.zeros((len(tap_layers) + 1, *shape), dtype=self.dtype, device=self.device)  # [Lt + 1, 1, n, H]
        layers = [*tap_layers, self.facts.num_layers - 1]
        takes_places = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        options = {"logits_to_keep": places} if takes_places else {}
        with copied_outputs(self.decoder, self.adapter, dict(zip(layers, states))):
            logits = self.model(input_ids=ids.to(self.device)[None], use_cache=False, **options).logits[0]
        return states[:-1, 0], states[-1, 0], (logits if takes_places else logits[places]).float()

    @cached_property
    def parts(self) -> dict[str, torch.Tensor]:
        """Embedding, norm and head, see `frozen_parts.parts_of`."""
        return parts_of(self.model, self.norm, self.facts)

    @torch.no_grad()
    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] fp32 of states before the final norm [n, H], by the parts that training uses."""
        return logits_from(self.parts, self.facts, last)

    def open(self, tap_layers: Sequence[int]) -> Session:
        """A decoding session of batch 1.

        Raises UserError for a recurrent target whose cache cannot be decoded with: before the first session it is
        compared with a forward without cache.
        """
        check_taps(tap_layers, self.facts.num_layers)
        if not self.has_right_cache:
            require_right_cache(self)
            self.has_right_cache = True
        return Session(self, tuple(tap_layers))

    @property
    def single_reason(self) -> str | None:
        """Why texts can be decoded one at a time only, see `batch_session.single_reason`; None where a batch can be."""
        return single_reason(self)

    def open_batch(self, tap_layers: Sequence[int]) -> BatchSession:
        """A decoding session of several texts, for a target without a `single_reason`.

        Raises UserError where a batch does not compute what `open` does: compared before the first one.
        """
        check_taps(tap_layers, self.facts.num_layers)
        assert self.single_reason is None, f"{self.facts.name!r}: {self.single_reason}"
        if not self.has_right_batch:
            require_right_batch(self)
            self.has_right_batch = True
        return BatchSession(self, tuple(tap_layers))

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Greedy answers, token ids without the prompt, each ending with its eos id or cut.

        Prompts of one length run as one batch; the caller bounds the batch.
        """
        answers: list[list[int]] = [[] for _ in prompts]
        for length in sorted({len(prompt) for prompt in prompts}):
            places = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
            ids = torch.tensor([list(prompts[i]) for i in places], device=self.device)  # [n, length]
            for place, answer in zip(places, greedy_answers(self, ids, max_new_tokens)):
                answers[place] = answer
        return answers
