"""Tiny drafters, rows filled by hand, and the drafter's mathematics written out slowly."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.slot import RowArrays, RowShape, RowSlot
from dflash_offline.train.spec import DrafterSpec
from torch import Tensor

VOCABULARY, HIDDEN, TAPS, MASK = 48, 32, 3, 47


@dataclass
class Sample:
    """ids [S], loss_mask [S] bool, taps [Lt, S, H] u16 (bfloat16 bits)."""

    ids: np.ndarray
    loss_mask: np.ndarray
    taps: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


def random_bits(rng: np.random.Generator, *shape: int) -> np.ndarray:
    states = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
    return states.to(torch.bfloat16).view(torch.uint16).numpy()


@pytest.fixture
def tiny_spec() -> Callable[..., DrafterSpec]:
    """A spec small enough to check by loops, all layers full; keyword arguments change fields."""

    def make(**changes) -> DrafterSpec:
        fields = {
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "num_taps": TAPS,
            "vocab_size": VOCABULARY,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "block_size": 8,
            "mask_token_id": MASK,
            "tap_layers": (0, 2, 3),
            "num_target_layers": 6,
            "max_positions": 512,
        }
        fields |= changes
        return DrafterSpec(**({"attention": (AttentionKind(),) * fields["num_layers"]} | fields))

    return make


@pytest.fixture
def tiny_drafter() -> Callable[..., Drafter]:
    """A drafter whose every weight is random and matters, norms included."""

    def make(spec: DrafterSpec, seed: int = 0) -> Drafter:
        drafter = Drafter(spec)
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in drafter.parameters():
                spread = 1.0 / math.sqrt(parameter.shape[-1]) if parameter.dim() == 2 else 0.3
                parameter.normal_(0.0, spread, generator=rng)
                if parameter.dim() == 1:
                    parameter.add_(1.0)
        return drafter

    return make


@pytest.fixture
def random_sample() -> Callable[..., Sample]:
    """A sample of S tokens whose answer starts at `answer`."""

    def make(seed: int, tokens: int, answer: int = 3) -> Sample:
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, MASK, tokens)
        loss_mask = np.arange(tokens) >= answer
        return Sample(ids, loss_mask, random_bits(rng, TAPS, tokens, HIDDEN))

    return make


@pytest.fixture
def fill_row() -> Callable[..., RowArrays]:
    """A row with the samples one after another and anchors given as row indices (or None: a spare block)."""

    def make(shape: RowShape, samples: Sequence[Sample], anchors: Sequence[int | None]) -> RowArrays:
        row = RowSlot(shape=shape, num_taps=TAPS, hidden_size=HIDDEN, codec_name="raw").allocate()
        place = 0
        for number, sample in enumerate(samples):
            part = slice(place, place + len(sample))
            row.ids[part], row.loss_mask[part] = sample.ids, sample.loss_mask
            row.taps[:, part] = row.codec.encode(sample.taps)
            row.sample_ids[part], row.positions[part] = number, np.arange(len(sample))
            place += len(sample)
        known = [a for a in anchors if a is not None]
        spare = known[-1] if known else 0
        padded = list(anchors) + [None] * (shape.anchors - len(anchors))
        row.anchors[:] = [spare if a is None else a for a in padded]
        row.keep[:] = [a is not None for a in padded]
        return row

    return make


@pytest.fixture
def slow_block() -> Callable[..., Tensor]:
    """One block by the formulas of dflash-spec 1.1 and 2.3, a query, a head and a pair at a time."""
    return block_by_loops


@torch.no_grad()
def block_by_loops(
    drafter: Drafter,
    taps: Tensor,
    embeds: Tensor,
    context_positions: Sequence[int],
    block_positions: Sequence[int],
) -> Tensor:
    """taps [c, Lt*H] of exactly the tokens before the anchor, embeds [B, H]: output [B, H]."""
    spec, weights = drafter.spec, dict(drafter.named_parameters())

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + spec.rms_norm_eps) * weights[f"{name}.weight"]

    def heads(x: Tensor, name: str, count: int) -> Tensor:
        return (x @ weights[f"{name}.weight"].T).view(len(x), count, spec.head_dim)

    context = norm(taps @ weights["fc.weight"].T, "hidden_norm")
    positions = [*context_positions, *block_positions]
    h = embeds.clone()
    for i in range(spec.num_layers):
        layer = f"layers.{i}"
        attention = f"{layer}.self_attn"
        u = norm(h, f"{layer}.input_layernorm")
        queries = norm(heads(u, f"{attention}.q_proj", spec.num_heads), f"{attention}.q_norm")
        both = torch.cat([context, u])
        keys = norm(heads(both, f"{attention}.k_proj", spec.num_kv_heads), f"{attention}.k_norm")
        values = heads(both, f"{attention}.v_proj", spec.num_kv_heads)
        mixed = mixed_values(spec, spec.attention[i], queries, keys, values, positions, len(context))
        h = h + mixed.reshape(len(h), -1) @ weights[f"{attention}.o_proj.weight"].T
        u = norm(h, f"{layer}.post_attention_layernorm")
        gate = u @ weights[f"{layer}.mlp.gate_proj.weight"].T
        up = u @ weights[f"{layer}.mlp.up_proj.weight"].T
        h = h + (gate * torch.sigmoid(gate) * up) @ weights[f"{layer}.mlp.down_proj.weight"].T
    return norm(h, "norm")


def mixed_values(
    spec: DrafterSpec,
    kind: AttentionKind,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Sequence[int],
    num_context: int,
) -> Tensor:
    """Attention of queries [B, nq, d] over keys and values [c+B, nkv, d] at positions [c+B]."""
    mixed = torch.zeros_like(queries)
    for k, query_position in enumerate(positions[num_context:]):
        seen = [j for j, p in enumerate(positions) if is_seen(kind, j, num_context, p, query_position)]
        for head in range(spec.num_heads):
            group = head // (spec.num_heads // spec.num_kv_heads)
            query = turn(spec, queries[k, head], query_position)
            scores = [float(query @ turn(spec, keys[j, group], positions[j])) / math.sqrt(spec.head_dim) for j in seen]
            shares = torch.softmax(torch.tensor(scores), 0)
            mixed[k, head] = sum(share * values[j, group] for share, j in zip(shares, seen))
    return mixed


def turn(spec: DrafterSpec, x: Tensor, position: int) -> Tensor:
    """The rotary embedding of one head [d]."""
    half = spec.head_dim // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position * spec.rope_theta ** (-2 * i / spec.head_dim)
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def is_seen(kind: AttentionKind, key: int, num_context: int, key_position: int, query_position: int) -> bool:
    if key < num_context:
        return kind.window is None or query_position - key_position < kind.window
    return not kind.is_causal or key_position <= query_position
