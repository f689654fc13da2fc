"""Blocks whose size is no power of two lie in wider strides: loss and gradients are those of the blocks alone.

The reference lays out nothing: each block by itself, its own context and its own slots, plain softmax attention, full
logits and autograd, in float64.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from dflash_offline.train.batch import RowBatch
from dflash_offline.train.config import LossConfig
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.slot import RowArrays, RowShape
from dflash_offline.train.slot_weights import decay_weights, default_gamma
from dflash_offline.train.step import TrainStep
from torch import Tensor

BLOCK_SIZES = [7, 10, 12]
KINDS = [
    (AttentionKind(), AttentionKind()),
    (AttentionKind(9, True), AttentionKind()),
    (AttentionKind(5), AttentionKind(None, True)),
]
ANCHORS = [0, 3, 4, 17, 40, 55, 58, 60, 71, 93, 98]  # overlapping blocks, two samples of 60 and 40 tokens
SPLIT, END = 60, 100


def frozen() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(5)
    return torch.randn(48, 32, generator=rng), torch.randn(48, 32, generator=rng) / 3


def plain_block(drafter: Drafter, taps: Tensor, embeds: Tensor, start: int) -> Tensor:
    """Output [B, H] of a block [B, H] at position `start`, right behind its context of taps [start, Lt*H]."""
    spec, weights = drafter.spec, dict(drafter.named_parameters())
    positions = torch.arange(start + len(embeds))

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + spec.rms_norm_eps) * weights[f"{name}.weight"]

    def heads(x: Tensor, name: str) -> Tensor:
        return (x @ weights[f"{name}.weight"].T).view(len(x), -1, spec.head_dim).transpose(0, 1)  # [heads, n, d]

    def turned(x: Tensor, places: Tensor) -> Tensor:
        frequencies = spec.rope_theta ** (-torch.arange(0, spec.head_dim, 2).double() / spec.head_dim)
        spins = torch.polar(torch.ones(len(places), len(frequencies)).double(), places[:, None] * frequencies)
        first, second = x.chunk(2, dim=-1)
        spun = torch.complex(first, second) * spins
        return torch.cat([spun.real, spun.imag], dim=-1)

    context, h = norm(taps @ weights["fc.weight"].T, "hidden_norm"), embeds
    for i, kind in enumerate(spec.attention):
        layer, attention = f"layers.{i}", f"layers.{i}.self_attn"
        u = norm(h, f"{layer}.input_layernorm")
        both = torch.cat([context, u])
        queries = turned(norm(heads(u, f"{attention}.q_proj"), f"{attention}.q_norm"), positions[start:])
        keys = turned(norm(heads(both, f"{attention}.k_proj"), f"{attention}.k_norm"), positions)
        keys, values = (
            x.repeat_interleave(spec.num_heads // spec.num_kv_heads, 0)
            for x in (keys, heads(both, f"{attention}.v_proj"))
        )
        distance = positions[start:, None] - positions  # [B, start + B]
        hidden = (
            (distance < 0) & (positions >= start) if kind.is_causal else torch.zeros_like(distance, dtype=torch.bool)
        )
        if kind.window is not None:
            hidden = hidden | ((distance >= kind.window) & (positions < start))
        scores = (queries @ keys.mT / math.sqrt(spec.head_dim)).masked_fill(hidden, -math.inf)
        mixed = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
        h = h + mixed @ weights[f"{attention}.o_proj.weight"].T
        u = norm(h, f"{layer}.post_attention_layernorm")
        gate, up = (u @ weights[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        h = h + (F.silu(gate) * up) @ weights[f"{layer}.mlp.down_proj.weight"].T
    return norm(h, "norm")


def plain_loss(drafter: Drafter, row: RowArrays) -> tuple[Tensor, float]:
    """Sum of weight * cross-entropy over the slots of all blocks, and the sum of the weights."""
    size, mask = drafter.spec.block_size, drafter.spec.mask_token_id
    embedding, head = (x.double() for x in frozen())
    taps = torch.cat(list(torch.from_numpy(row.taps).view(torch.bfloat16).double()), dim=1)
    ids, loss, total = torch.from_numpy(row.ids), torch.zeros((), dtype=torch.float64), 0.0
    for anchor in ANCHORS:
        first, end = (0, SPLIT) if anchor < SPLIT else (SPLIT, END)
        embeds = embedding[torch.tensor([int(ids[anchor])] + [mask] * (size - 1))]
        out = plain_block(drafter, taps[first:anchor], embeds, anchor - first)
        weights = decay_weights(size, default_gamma(size)).tolist()
        for k in range(1, size):
            if anchor + k >= end or not row.loss_mask[anchor + k]:
                break
            loss = loss + weights[k - 1] * F.cross_entropy(head @ out[k], ids[anchor + k])
            total += weights[k - 1]
    return loss, total


@pytest.mark.parametrize("attention", KINDS, ids=[f"{one}, {other}" for one, other in KINDS])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_loss_and_gradients_are_those_of_each_block_alone(
    block_size, attention, tiny_spec, tiny_drafter, random_sample, fill_row
) -> None:
    step, batch, row = loaded(block_size, attention, tiny_spec, tiny_drafter, random_sample, fill_row)
    step.accumulate(batch)
    slow = tiny_drafter(step.drafter.spec).double()
    loss, total = plain_loss(slow, row)
    loss.backward()
    assert float(step.sums.values[0]) == pytest.approx(loss.item(), rel=1e-5)
    assert float(step.sums.weight) == pytest.approx(total, rel=1e-5)
    for (name, parameter), gradient in zip(slow.named_parameters(), step.gradients):
        assert parameter.grad is not None
        assert (gradient - parameter.grad).norm() / parameter.grad.norm() < 1e-5, name


@pytest.mark.parametrize("attention", KINDS, ids=[f"{one}, {other}" for one, other in KINDS])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_slots_behind_a_block_may_hold_anything(
    block_size, attention, tiny_spec, tiny_drafter, random_sample, fill_row
) -> None:
    step, batch, _ = loaded(block_size, attention, tiny_spec, tiny_drafter, random_sample, fill_row)
    step.accumulate(batch)
    before = step.gradient_sum.clone(), step.sums.values.clone()
    stride = batch.shape.stride
    assert stride > block_size
    batch.block_ids.view(-1, stride)[:, block_size:] = torch.arange(stride - block_size)
    batch.block_positions.view(-1, stride)[:, block_size:] += 100
    step.reset()
    step.accumulate(batch)
    assert torch.equal(step.gradient_sum, before[0])
    assert torch.equal(step.sums.values, before[1])
    batch.block_ids.view(-1, stride)[:, block_size - 1] = 3  # but the last slot of a block does count
    step.reset()
    step.accumulate(batch)
    assert not torch.equal(step.gradient_sum, before[0])


def loaded(
    block_size, attention, tiny_spec, tiny_drafter, random_sample, fill_row
) -> tuple[TrainStep, RowBatch, RowArrays]:
    """A step on a row of two samples, the first with a question in the middle of its answer."""
    spec = tiny_spec(block_size=block_size, attention=attention)
    shape = RowShape(row_tokens=128, anchors=16, block_size=block_size)
    sample = random_sample(0, SPLIT)
    sample.loss_mask[24:28] = False
    row = fill_row(shape, [sample, random_sample(1, END - SPLIT)], ANCHORS)
    batch = RowBatch(spec, shape, torch.device("cpu"), torch.float32)
    batch.load(row)
    return TrainStep(tiny_drafter(spec), *frozen(), shape, LossConfig()), batch, row
