"""Our own drafter with one fact altered: what goes wrong between training and serving, one at a time.

Each gives a `Drafting` to replay; weights are shared or copied, never changed. Knows no engine.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..drafter import Drafter
from ..kinds import AttentionKind
from ..spec import DrafterSpec
from .replay import EMBEDDING_LAYER, Drafting

THETAS = (10_000.0, 1_000_000.0)  # what transformers and vLLM take where a config names none


@dataclass(frozen=True, slots=True)
class Alteration:
    """A fact in words, and our drafting with it."""

    fact: str
    make: Callable[[Drafting], Drafting]


def alterations(drafting: Drafting, target: Mapping[str, Any]) -> list[Alteration]:
    """All that would change this drafter, each alone and together with the norm that an engine is known to mistake.

    `target` is a TargetFacts as a dict.
    """
    spec = drafting.drafter.spec
    single = [
        *shifted_taps(spec),
        *other_masks(spec, target),
        *other_rotations(spec),
        *other_attention(spec),
        *other_ends(drafting),
        Alteration(
            "slots: each is taken to predict the position behind its own (sample from anchor)",
            lambda own: replace(own, first_slot=0),
        ),
    ]
    if spec.num_layers == 1:
        return single
    return [*single, FIRST_NORM, *(both(one, FIRST_NORM) for one in single)]


def both(first: Alteration, second: Alteration) -> Alteration:
    return Alteration(f"{first.fact}; and {second.fact}", lambda own: second.make(first.make(own)))


def shifted_taps(spec: DrafterSpec) -> Iterator[Alteration]:
    """Each tap one layer earlier or later, where there are such layers."""
    for by, word in ((-1, "earlier"), (1, "later")):
        layers = tuple(layer + by for layer in spec.tap_layers)
        if min(layers) >= EMBEDDING_LAYER and max(layers) < spec.num_target_layers - 1:  # the last is no tap
            yield Alteration(f"taps: layers {list(layers)}, one {word} than {list(spec.tap_layers)}", with_taps(layers))


def with_taps(layers: tuple[int, ...]) -> Callable[[Drafting], Drafting]:
    return lambda own: replace(own, tap_layers=layers)


def other_masks(spec: DrafterSpec, target: Mapping[str, Any]) -> Iterator[Alteration]:
    """The tokens that a mask is easily taken for."""
    eos_ids = target.get("eos_ids") or ()
    named = [("pad", target.get("pad_id")), ("bos", target.get("bos_id")), *(("eos", token) for token in eos_ids[:1])]
    seen = {spec.mask_token_id}
    for word, token in [*named, ("the first", 0)]:
        if token is not None and token not in seen:
            seen.add(token)
            yield Alteration(f"mask token: {token} ({word}), not {spec.mask_token_id}", with_mask(token))


def with_mask(token: int) -> Callable[[Drafting], Drafting]:
    return lambda own: replace(own, mask_token_id=token)


def other_rotations(spec: DrafterSpec) -> Iterator[Alteration]:
    for theta in THETAS:
        if theta != spec.rope_theta:
            yield Alteration(f"rope: theta {theta:g}, not {spec.rope_theta:g}", with_spec(rope_theta=theta))
    yield Alteration("rope: frequencies rounded to bfloat16", rounded_rotation)


def rounded_rotation(own: Drafting) -> Drafting:
    drafter = copy.copy(own.drafter)
    drafter.inv_freq = own.drafter.inv_freq.to(torch.bfloat16).to(torch.float32)
    return replace(own, drafter=drafter, reader=drafter)


def other_attention(spec: DrafterSpec) -> Iterator[Alteration]:
    """Windows, and which layers are causal inside the block."""
    kinds = spec.attention
    others = {
        "attention: windows ignored": tuple(AttentionKind(None, kind.is_causal) for kind in kinds),
        "attention: no layer causal inside the block": tuple(AttentionKind(kind.window, False) for kind in kinds),
        "attention: sliding layers causal inside the block, full ones not": tuple(
            AttentionKind(kind.window, kind.window is not None) for kind in kinds
        ),
        "attention: all layers causal inside the block": tuple(AttentionKind(kind.window, True) for kind in kinds),
    }
    seen = {kinds}
    for fact, attention in others.items():
        if attention not in seen:
            seen.add(attention)
            yield Alteration(fact, with_spec(attention=attention))


def first_norm(own: Drafting) -> Drafting:
    reader = copy.deepcopy(own.reader)
    weight = own.reader.layers[0].self_attn.k_norm.weight
    with torch.no_grad():
        for layer in reader.layers:
            layer.self_attn.k_norm.weight.copy_(weight)
    return replace(own, reader=reader)


FIRST_NORM = Alteration("context keys: normed by layer 0's k_norm in every layer (vLLM on a CPU does so)", first_norm)
"""vLLM 0.32.0 norms the keys of all layers in one call, and on a CPU that call reads the first layer's weight alone.

The same fault on XPU: vllm-project/vllm #56431, vllm-xpu-kernels #573. Other builds have it not.
"""


def other_ends(drafting: Drafting) -> Iterator[Alteration]:
    """The embedding and the head, which the drafter takes from its target."""
    is_tied = torch.equal(drafting.embedding, drafting.head)
    if not is_tied:
        yield Alteration("head: the target's embedding in its place", lambda own: replace(own, head=own.embedding))
    yield Alteration("head: none, every draft is token 0", lambda own: replace(own, head=torch.zeros_like(own.head)))
    if drafting.scale != 1.0:
        yield Alteration(f"embedding scale: 1, not {drafting.scale:g}", lambda own: replace(own, scale=1.0))


def with_spec(**changes: Any) -> Callable[[Drafting], Drafting]:
    """The same weights under a spec with other values."""

    def make(own: Drafting) -> Drafting:
        weight = own.drafter.fc.weight
        drafter = Drafter(replace(own.drafter.spec, **changes)).to(weight.device, weight.dtype).eval()
        drafter.load_state_dict(own.drafter.state_dict())
        return replace(own, drafter=drafter, reader=drafter)

    return make
