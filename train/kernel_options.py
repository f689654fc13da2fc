"""How flex attention cuts its tiles on a card: the library's own way where that fits, else one that does.

A kernel whose tiles are larger than the shared memory of a block does not start: an H100 has 227 KiB, an A100 163, a
96 GB workstation card 99. Pure arithmetic, but for the one question to the device.
"""

from typing import NamedTuple

import torch

from .. import UserError
from .slot import TILE

Options = dict[str, int]
SCRATCH_BYTES = 1024  # of a block's shared memory, for reductions
LEAST_HEAD_DIM = 16  # of the products on a card; torch refuses narrower heads in the midst of compiling (2.11, 2.13)


class Forward(NamedTuple):
    """Queries and keys of a tile, and how many tiles of keys and values are under way at once."""

    block_m: int
    block_n: int
    num_stages: int

    def size_bytes(self, head_dim: int, itemsize: int) -> int:
        """A tile of queries, and of each stage one of keys and one of values."""
        return (self.block_m + 2 * self.num_stages * self.block_n) * head_dim * itemsize


class Backward(NamedTuple):
    """The same of the two kernels of the backward: 1 for keys and values, walking queries; 2 the other way round."""

    block_m1: int
    block_n1: int
    block_m2: int
    block_n2: int
    num_stages: int

    def size_bytes(self, head_dim: int, itemsize: int) -> int:
        """The larger kernel's.

        It holds two tiles (keys and values, or queries and the output's gradients), walks over two others, of each
        stage one, and puts the gradient of their scores down once.
        """
        first = (2 * self.block_n1 + 2 * self.num_stages * self.block_m1) * head_dim + self.block_m1 * self.block_n1
        second = (2 * self.block_m2 + 2 * self.num_stages * self.block_n2) * head_dim + self.block_m2 * self.block_n2
        return max(first, second) * itemsize


# The largest tiles that torch chooses by itself, those for an H100 (torch 2.13, _inductor/template_heuristics), by
# bytes of a number and head width; wider heads take the last ones.
OWN = {
    (2, 64): (Forward(128, 128, 3), Backward(64, 128, 128, 64, 3)),
    (2, 128): (Forward(128, 64, 3), Backward(64, 128, 128, 64, 3)),
    (2, 256): (Forward(64, 64, 3), Backward(64, 64, 64, 64, 2)),
    (4, 64): (Forward(128, 32, 3), Backward(16, 16, 16, 16, 1)),
    (4, 128): (Forward(64, 64, 3), Backward(16, 16, 16, 16, 1)),
    (4, 256): (Forward(32, 32, 3), Backward(16, 16, 16, 16, 1)),
}
# What is tried in their place, the largest first; all divide the block mask's tiles. In fp32 torch takes the last
# backward on every card.
FORWARD = [Forward(128, 64, stages) for stages in (3, 2)] + [
    Forward(m, n, stages) for m, n in ((64, 64), (64, 32), (32, 32), (16, 16)) for stages in (3, 2, 1)
]
HOPPER = (9, 0)
HOPPER_FORWARD: dict[tuple[int, int], Options] = {
    (2, 128): {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_stages": 3, "fwd_num_warps": 4},
}
"""By bytes of a number and head width, where other tiles than the library's own were measured to be faster under the
masks of a row: one forward at an 8B target's widths in 2.97 ms for 3.30 (H200, torch 2.11)."""
BACKWARD = [
    Backward(m, n, n, m, stages) for m, n in ((64, 64), (32, 64), (32, 32), (16, 32), (16, 16)) for stages in (2, 1)
]


def kernel_options(
    shared_bytes: int, head_dim: int, itemsize: int, capability: tuple[int, int] | None = None
) -> Options | None:
    """flex_attention's `kernel_options` for a block's shared memory; None leaves the tiles to the library.

    Where the library's own fit, a card of a `capability` that was measured may get others for the forward. Sizes are
    upper bounds, since a tile that stays in registers is counted too; where none fits, it is the smallest.
    """
    width = max(1 << (head_dim - 1).bit_length(), LEAST_HEAD_DIM)  # as the kernels round it
    room = shared_bytes - SCRATCH_BYTES
    own = OWN[itemsize, next((known for known in (64, 128) if width <= known), 256)]
    if all(tiles.size_bytes(width, itemsize) <= room for tiles in own):
        return HOPPER_FORWARD.get((itemsize, head_dim)) if capability == HOPPER else None
    forward = next((tiles for tiles in FORWARD if tiles.size_bytes(width, itemsize) <= room), FORWARD[-1])
    tried = BACKWARD if itemsize == 2 else BACKWARD[-1:]
    backward = next((tiles for tiles in tried if tiles.size_bytes(width, itemsize) <= room), BACKWARD[-1])
    return {  # warps as torch gives them to such tiles
        "fwd_BLOCK_M": forward.block_m,
        "fwd_BLOCK_N": forward.block_n,
        "fwd_num_stages": forward.num_stages,
        "fwd_num_warps": 8 if forward.block_m == TILE and width >= TILE else 4,
        "bwd_BLOCK_M1": backward.block_m1,
        "bwd_BLOCK_N1": backward.block_n1,
        "bwd_BLOCK_M2": backward.block_m2,
        "bwd_BLOCK_N2": backward.block_n2,
        "bwd_num_stages": backward.num_stages,
        "bwd_num_warps": 4,
    }


def require_head_dim(head_dim: int, device_type: str, to_do: str) -> None:
    """Raises UserError, with what to do, for heads that are too narrow for the kernels of a card."""
    if device_type == "cuda" and head_dim < LEAST_HEAD_DIM:
        raise UserError(
            f"drafter.head_dim = {head_dim} on a CUDA device",
            f"heads of a width of at least {LEAST_HEAD_DIM}, which flex attention takes there",
            to_do,
        )


def options_on(device: torch.device, head_dim: int, itemsize: int) -> Options | None:
    """The options for a device; None where it is no CUDA device."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    return kernel_options(properties.shared_memory_per_block_optin, head_dim, itemsize, capability)
