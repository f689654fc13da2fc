"""The int8 encoder in torch: states become packed rows on their device, before they are copied off it; and its error.

The same bytes as `store.int8.encode`, the reference, on a CPU and on CUDA. Static shapes, no wait for the device.
Knows tensors only.
"""

import torch
from torch import Tensor

from ..store import int8


def encode_states(states: Tensor, outliers: int | None) -> Tensor:
    """Rows u8 [Lt, ..., row_bytes] of states [Lt, ..., H] bf16: their bits without `outliers`, else packed.

    Packed tap by tap, so that only one tap's keys and float32 copies are in memory.
    """
    if outliers is None:
        return states.view(torch.uint8)
    return torch.stack([encode(plane, outliers) for plane in states])


def encode(states: Tensor, outliers: int) -> Tensor:
    """Packed rows u8 [..., H + 2 + 4k] of states [..., H] bf16; ValueError unless 0 < k < H <= 65,536.

    Of non-finite values up to k are kept as they are; in a row with more, the others become NaN.
    """
    hidden = states.shape[-1]
    if not int8.fits(hidden, outliers):
        raise ValueError(f"{outliers} exact values of a row of {hidden}")
    bits = states.view(torch.int16)
    channels = largest_channels(bits, outliers)  # [..., k]
    rest = states.float().scatter_(-1, channels, 0.0)
    largest = rest.abs().amax(-1, keepdim=True)  # [..., 1]
    is_finite = largest.isfinite()
    scale = (largest * (1 / int8.CODES)).clamp_(*int8.SCALES).bfloat16()
    codes = rest.div_(scale.float()).masked_fill_(~is_finite, 0.0)
    scale_bits = scale.view(torch.int16).masked_fill_(~is_finite, int8.NAN_BITS)  # a cast NaN's bits differ by device
    rows = torch.empty(*states.shape[:-1], int8.row_bytes(hidden, outliers), dtype=torch.uint8, device=states.device)
    rows[..., :hidden].view(torch.int8).copy_(codes.round_().clamp_(-int8.CODES, int8.CODES))
    exact = bits.gather(-1, channels)
    tail = torch.cat([scale_bits, channels.to(torch.int16), exact], dim=-1)  # [..., 1 + 2k]
    rows[..., hidden:] = tail.view(torch.uint8)
    return rows


def decode(rows: Tensor, hidden: int, outliers: int) -> Tensor:
    """States [..., H] bf16 of packed rows u8 [..., H + 2 + 4k], to see what encoding changed."""
    tail = rows[..., hidden:].contiguous().view(torch.int16)  # [..., 1 + 2k]
    scale, channels, exact = tail.split([1, outliers, outliers], dim=-1)
    states = (rows[..., :hidden].view(torch.int8) * scale.view(torch.bfloat16).float()).bfloat16()
    states.view(torch.int16).scatter_(-1, channels.long() & int8.LAST_CHANNEL, exact)
    return states


def errors(states: Tensor, rows: Tensor, outliers: int) -> Tensor:
    """Relative L2 errors [...] fp64 of packed rows against their states [..., H] bf16, finite and not zero."""
    before = states.double()
    after = decode(rows, states.shape[-1], outliers).double()
    return torch.linalg.vector_norm(after - before, dim=-1) / torch.linalg.vector_norm(before, dim=-1)


def largest_channels(bits: Tensor, count: int) -> Tensor:
    """Channels [..., k] i64, ascending, of the largest magnitudes of bits [..., H] i16; of equal ones the lower.

    torch.topk leaves open which of equal values it takes, so the channel is the low half of each key.
    """
    last = int8.LAST_CHANNEL
    order = torch.arange(last, last - bits.shape[-1], -1, dtype=torch.int32, device=bits.device)
    keys = (bits & int8.MAGNITUDE).to(torch.int32).bitwise_left_shift_(16).bitwise_or_(order)
    kept = torch.topk(keys, count, dim=-1, sorted=False).values
    return (last - (kept & last)).long().sort(dim=-1).values
