"""The int8 decoder in torch: packed rows become bfloat16 states on the trainer's device.

The same bits as `store.int8.decode`, the reference, for finite values, on a CPU and on CUDA. Static shapes, no wait
for the device, so that it can stand in a CUDA graph. Knows tensors only.
"""

import torch
from torch import Tensor

from ..store import int8


def decode(rows: Tensor, hidden: int, outliers: int, out: Tensor | None = None) -> Tensor:
    """States [..., H] bf16 of packed rows u8 [..., H + 2 + 4k], into `out` where it is given; zero bytes give zeros."""
    if rows.dtype != torch.uint8 or rows.shape[-1] != int8.row_bytes(hidden, outliers):
        raise ValueError(f"rows of {rows.shape[-1]} {rows.dtype}, expected {int8.row_bytes(hidden, outliers)} uint8")
    if out is None:
        out = torch.empty(*rows.shape[:-1], hidden, dtype=torch.bfloat16, device=rows.device)
    tail = rows[..., hidden:].contiguous().view(torch.int16)  # [..., 1 + 2k]
    scale, channels, exact = tail.split([1, outliers, outliers], dim=-1)
    torch.mul(rows[..., :hidden].view(torch.int8), scale.view(torch.bfloat16).float(), out=out)  # in float32
    channels = channels.long() & int8.LAST_CHANNEL  # stored without a sign
    out.view(torch.int16).scatter_(-1, channels, exact)  # as bits: a float's NaN may change on its way
    return out
