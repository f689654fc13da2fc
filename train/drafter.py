"""The DFlash drafter: a block of masked slots reads the target's recorded states.

Mathematics and weight names of dflash-spec 1.1 and 1.2 (z-lab's format). Knows no store, no loss
and no optimizer; embedding and head stay with the target and are passed in from outside.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from .attention import KeysValues, Visible, attend, visible_keys
from .context_rows import ContextRows
from .kernel_options import Options, options_on
from .kinds import AttentionKind
from .spec import DrafterSpec

Rotation = tuple[Tensor, Tensor]  # cos, sin: [n, d/2] fp32


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Queries from the block; keys and values from the context and the block, by the same weights."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        hidden, width = spec.hidden_size, spec.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, width
        self.q_proj = nn.Linear(hidden, spec.num_heads * width, bias=False)
        self.k_proj = nn.Linear(hidden, spec.num_kv_heads * width, bias=False)
        self.v_proj = nn.Linear(hidden, spec.num_kv_heads * width, bias=False)
        self.o_proj = nn.Linear(spec.num_heads * width, hidden, bias=False)
        self.q_norm = RMSNorm(width, spec.rms_norm_eps)
        self.k_norm = RMSNorm(width, spec.rms_norm_eps)
        self.kernel_options: Options | None = None  # of the device that the weights are on

    def keys_values(self, x: Tensor, rotation: Rotation) -> KeysValues:
        """Rotated keys and values of x [n, H]: two of [nkv, n, d]."""
        keys = rotate(self.k_norm(self.k_proj(x).view(-1, self.num_kv_heads, self.head_dim)), rotation)
        values = self.v_proj(x).view(-1, self.num_kv_heads, self.head_dim)
        return keys.transpose(0, 1), values.transpose(0, 1)

    def forward(self, x: Tensor, rotation: Rotation, context: KeysValues, visible: Visible) -> Tensor:
        queries = rotate(self.q_norm(self.q_proj(x).view(-1, self.num_heads, self.head_dim)), rotation)
        own = self.keys_values(x, rotation)
        out = attend(queries.transpose(0, 1), context, own, visible, self.kernel_options)  # [nq, Q, d]
        return self.o_proj(out.transpose(0, 1).reshape(-1, self.num_heads * self.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A pre-norm Qwen3 layer over the block's residual stream."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor, rotation: Rotation, context: KeysValues, visible: Visible) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, context, visible)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """Fuses the taps once, then runs L layers over the blocks.

    `inv_freq` is a plain fp32 attribute: it follows the weights to their device and never
    takes their dtype (dflash-spec 2.4). With `is_checkpointed` a layer keeps only its input for the
    backward and runs a second time there: less memory, the same gradients.
    """

    def __init__(self, spec: DrafterSpec, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.spec, self.is_checkpointed = spec, is_checkpointed
        self.layer_kinds = tuple(spec.kinds.index(kind) for kind in spec.attention)
        self.fc = nn.Linear(spec.num_taps * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        layers = nn.ModuleList(Layer(spec) for _ in range(spec.num_layers))
        self.layers: Sequence[Layer] = layers  # pyright: ignore[reportAttributeAccessIssue]
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        pairs = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device="cpu")
        self.inv_freq = 1.0 / spec.rope_theta ** (pairs / spec.head_dim)  # [d/2] fp32

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        weight = self.fc.weight
        if weight.device.type != "meta":
            self.inv_freq = self.inv_freq.to(weight.device)
        options = options_on(weight.device, self.spec.head_dim, weight.itemsize)
        for layer in self.layers:
            layer.self_attn.kernel_options = options
        return self

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Matrices ~ N(0, 0.02), norms 1; the same numbers on every device and in every dtype's rounding."""
        rng = torch.Generator("cpu").manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, 0.02, generator=rng))
            else:
                parameter.fill_(1.0)

    def forward(
        self,
        taps: Tensor,
        block_embeds: Tensor,
        context_positions: Tensor,
        block_positions: Tensor,
        masks: Sequence[Tensor | BlockMask],
    ) -> Tensor:
        """Output of all blocks of a row, after the final norm: [Q, H].

        taps [T, Lt*H], block_embeds [Q, H] (already scaled), positions [T] and [Q]; one of `masks` for each
        of `spec.kinds`, in that order. On a CPU a mask is dense, bool [Q, T+Q], True = visible; on CUDA it is a
        BlockMask and the call is inside torch.compile. Anything else raises RuntimeError: no path is ever
        chosen silently.
        """
        return self.rotated(taps, block_embeds, self.rotation(context_positions), self.rotation(block_positions), masks)

    def rotated(
        self,
        taps: Tensor,
        block_embeds: Tensor,
        context_rotation: Rotation,
        block_rotation: Rotation,
        masks: Sequence[Tensor | BlockMask],
    ) -> Tensor:
        """The same from the rotary angles of both kinds of positions, see `rotation`.

        A training step compiles this: angles formed inside of its graph would be formed again, by way of sine and
        cosine, in each kernel that rotates, forward and backward.
        """
        if len(masks) != len(self.spec.kinds):
            raise ValueError(f"{len(masks)} masks for the kinds of attention {[str(k) for k in self.spec.kinds]}")
        visible = [visible_keys(mask, len(taps), taps.device) for mask in masks]
        context = self.hidden_norm(self.fc(taps))  # [T, H]
        x = block_embeds
        for layer, kind in zip(self.layers, self.layer_kinds):
            inputs = layer, x, context, block_rotation, context_rotation, visible[kind]
            if self.is_checkpointed and torch.is_grad_enabled():
                x = checkpoint(run_layer, *inputs, use_reentrant=False, preserve_rng_state=False)
                assert isinstance(x, Tensor)
            else:
                x = run_layer(*inputs)
        return self.norm(x)

    def rotation(self, positions: Tensor) -> Rotation:
        """cos and sin of the rotary angles of positions [n]: two of [n, d/2] fp32."""
        angles = positions.to(torch.float32)[:, None] * self.inv_freq  # [n, d/2]
        return angles.cos(), angles.sin()

    def new_cache(self) -> "ContextCache":
        """An empty context for one sequence."""
        return ContextCache(self.spec, self.fc.weight.device, self.fc.weight.dtype)

    def new_rows(self) -> ContextRows:
        """Contexts for several sequences, none yet."""
        return ContextRows(self.spec, self.fc.weight.device, self.fc.weight.dtype)

    @torch.no_grad()
    def extend(self, cache: "ContextCache", taps: Tensor, positions: Tensor) -> None:
        """Appends the context of taps [m, Lt*H] at positions [m]; they depend on nothing before them."""
        context = self.hidden_norm(self.fc(taps.to(self.fc.weight.dtype)))  # [m, H]
        rotation = self.rotation(positions)
        cache.append([layer.self_attn.keys_values(context, rotation) for layer in self.layers], positions)

    @torch.no_grad()
    def propose(self, cache: "ContextCache", block_embeds: Tensor, positions: Tensor) -> Tensor:
        """Output of one block [m, H] at positions [m], m <= B, after the final norm; leaves the cache as it was.

        Dense attention of m queries on every device: its scores are m x (context + m), not a training step's.
        """
        rotation = self.rotation(positions)
        masks = cache.masks(positions)
        x = block_embeds.to(self.fc.weight.dtype)
        for i, (layer, kind) in enumerate(zip(self.layers, self.layer_kinds)):
            x = layer(x, rotation, cache.context(i), masks[kind])
        return self.norm(x)

    @torch.no_grad()
    def extend_rows(self, rows: ContextRows, numbers: Sequence[int], taps: Sequence[Tensor]) -> None:
        """Appends to each of these rows the context of its taps [m_i, Lt*H], at the positions behind its last one."""
        parts = torch.cat(list(taps)).to(self.fc.weight.dtype)  # [M, Lt*H]
        begins = [rows.lengths[number] for number in numbers]
        ranges = [torch.arange(begin, begin + len(part)) for begin, part in zip(begins, taps)]
        context = self.hidden_norm(self.fc(parts))  # [M, H]
        rotation = self.rotation(torch.cat(ranges).to(parts.device))
        layers = [layer.self_attn.keys_values(context, rotation) for layer in self.layers]
        rows.append(numbers, [len(part) for part in taps], layers)

    @torch.no_grad()
    def propose_rows(self, rows: ContextRows, numbers: Sequence[int], block_embeds: Tensor) -> Tensor:
        """Output of one block [n, B, H] right behind each of these n rows, after the final norm; leaves the rows as
        they were."""
        count, size, width = block_embeds.shape
        starts = torch.tensor([rows.lengths[number] for number in numbers], device=block_embeds.device)
        rotation = self.rotation((starts[:, None] + torch.arange(size, device=starts.device)).flatten())
        visible = rows.visible(numbers, size)
        x = block_embeds.reshape(count * size, width).to(self.fc.weight.dtype)  # [n*B, H]
        for i, (layer, kind) in enumerate(zip(self.layers, self.layer_kinds)):
            x = layer(x, rotation, rows.context(i), visible[kind])
        return self.norm(x).view(count, size, width)


def run_layer(
    layer: Layer, x: Tensor, context: Tensor, rotation: Rotation, context_rotation: Rotation, visible: Visible
) -> Tensor:
    """A layer over the blocks x [Q, H], with keys and values of its own from the context [T, H]."""
    return layer(x, rotation, layer.self_attn.keys_values(context, context_rotation), visible)


class ContextCache:
    """Keys and values of the context of one sequence, per layer; grows by doubling."""

    def __init__(self, spec: DrafterSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.spec = spec
        self.length = 0
        self.positions = torch.empty(0, dtype=torch.int64, device=device)
        empty = torch.empty(2, spec.num_kv_heads, 0, spec.head_dim, dtype=dtype, device=device)
        self.layers = [empty for _ in range(spec.num_layers)]  # each [2 (keys, values), nkv, capacity, d]

    def append(self, layers: list[KeysValues], positions: Tensor) -> None:
        """Adds the keys and values [nkv, m, d] of each layer at positions [m]."""
        end = self.length + len(positions)
        for i, (keys, values) in enumerate(layers):
            self.layers[i] = held = grown(self.layers[i], end)
            held[0, :, self.length : end] = keys
            held[1, :, self.length : end] = values
        self.positions = torch.cat([self.positions, positions.to(self.positions)])
        self.length = end

    def context(self, layer: int) -> KeysValues:
        """Keys and values of a layer: two views of [nkv, length, d]."""
        held = self.layers[layer][:, :, : self.length]
        return held[0], held[1]

    def masks(self, positions: Tensor) -> list[Tensor | None]:
        """What a block at positions [m] sees, for each kind of attention in the order of `spec.kinds`."""
        keys = torch.cat([self.positions, positions.to(self.positions)])
        distance = positions.to(keys)[:, None] - keys[None]  # [m, length+m]
        return [self.mask(kind, distance) for kind in self.spec.kinds]

    def mask(self, kind: AttentionKind, distance: Tensor) -> Tensor | None:
        """bool [m, length+m], True = visible, from the keys' distance before each slot; None where all is seen."""
        if kind == AttentionKind():
            return None
        seen = torch.ones_like(distance, dtype=torch.bool)
        if kind.window is not None:
            seen[:, : self.length] = distance[:, : self.length] < kind.window
        if kind.is_causal:
            seen[:, self.length :] = distance[:, self.length :] >= 0
        return seen


def grown(held: Tensor, length: int) -> Tensor:
    """`held` itself, or a copy with at least twice its capacity, so that `length` entries fit."""
    capacity = held.shape[2]
    if length <= capacity:
        return held
    larger = held.new_empty(*held.shape[:2], max(length, 2 * capacity), held.shape[3])
    larger[:, :, :capacity] = held
    return larger


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotary embedding of x [n, heads, d] in pairs (i, i + d/2), computed in fp32, back in x's dtype."""
    cos, sin = rotation[0][:, None], rotation[1][:, None]
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
