"""What the Triton kernels of the label losses are held to; run as a script it does so by Triton's interpreter.

TRITON_INTERPRET=1 python label_loss_side.py
"""

import itertools

import torch
from dflash_offline.train.config import TOKEN_OBJECTIVES, WEIGHT_NAMES, LossConfig
from dflash_offline.train.loss import Head, SlotNumbers, make_chunk_loss
from torch import Tensor

BLOCKS, SLOTS = 6, 5
ROUNDING = {"cuda": 2.0**-8, "cpu": 2.0**-7}  # of a gradient in bfloat16; the interpreter cuts digits off
DYNAMIC = 1e-4  # of weights that are products of chances: their exponents are float32 sums, in the hundreds at most
CAPS = [(1.0, None), (0.3, None), (1.0, 2.0), (2.5, 4.0)]


def drawn(head: Head, width: int, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Products [n, V], labels of which the first half are the likeliest tokens, and static weights with zeros.

    Under a cap the largest stay where float32 tells them apart: equal ones are likeliest in other places in float64,
    and a weighting that looks at hits then differs in whole blocks. One lies at the cap's lower end.
    """
    rng = torch.Generator().manual_seed(seed)
    spread = 3.0 if head.softcap is None else 0.5 * head.softcap / head.multiplier
    products = spread * torch.randn(BLOCKS * SLOTS, width, generator=rng)
    products[:, 0] = -20 * spread
    products = products.to(dtype)
    labels = torch.randint(0, width, (BLOCKS, SLOTS), generator=rng)
    labels[: BLOCKS // 2] = products.argmax(-1).view(BLOCKS, SLOTS)[: BLOCKS // 2]
    valid = torch.arange(SLOTS) < torch.randint(0, SLOTS + 1, (BLOCKS, 1), generator=rng)
    weights = torch.rand(BLOCKS, SLOTS, generator=rng) * valid
    return products.to(device), labels.to(device), weights.to(device)


def close(fast: Tensor, slow: Tensor, tolerance: float) -> bool:
    """Whether they differ by less than that share."""
    return float((fast.cpu().double() - slow).norm()) <= tolerance * float(slow.norm())


def compare(config: LossConfig, head: Head, width: int, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """The kernels against the plain arithmetic in float64, in all that both give."""
    from dflash_offline.train.label_loss import make_label_loss

    products, labels, weights = drawn(head, width, dtype, device, seed)
    inputs = products.cpu().double(), None, labels.cpu(), weights.cpu().double()
    slow, slow_gradient = make_chunk_loss(config, head)(*inputs)
    fast, gradient = make_label_loss(config, head)(products, None, labels, weights)
    assert gradient.data_ptr() == products.data_ptr(), "the gradient lies elsewhere"
    tolerance = DYNAMIC if dtype == torch.float32 else ROUNDING[device.type]
    assert close(gradient, slow_gradient, tolerance), (config, width, dtype)
    for name, most in (("weights", DYNAMIC), ("value", 1e-5), ("nll", 1e-5)):
        assert close(getattr(fast, name), getattr(slow, name), most), (name, config, width)
    assert torch.equal(fast.hit.cpu(), slow.hit)
    assert not gradient.view(BLOCKS, SLOTS, -1)[weights == 0].any()


def compare_all(device: torch.device, widths: tuple[int, ...]) -> int:
    """Every objective, weighting, cap, format and width; how many were compared."""
    choices = list(itertools.product(TOKEN_OBJECTIVES, WEIGHT_NAMES, CAPS, (torch.float32, torch.bfloat16), widths))
    for seed, (objective, weights, (multiplier, softcap), dtype, width) in enumerate(choices):
        head = Head(weight=torch.zeros(1), multiplier=multiplier, softcap=softcap)
        compare(LossConfig(objective=objective, weights=weights), head, width, dtype, device, seed)
    return len(choices)


def label_loss(products: Tensor, labels: Tensor, weights: Tensor) -> tuple[SlotNumbers, Tensor]:
    from dflash_offline.train.label_loss import make_label_loss

    return make_label_loss(LossConfig(weights="uniform"), Head(weight=products))(products, None, labels, weights)


def look_at_edges(device: torch.device) -> None:
    """Ties, infinities, a slot that does not count, and what must not go unseen: NaN, and a label that is no token."""
    products = torch.zeros(1, 7, device=device)
    products[0, 3:5] = 2.0  # the first of two is the likeliest
    products = products.repeat(8, 1)
    products[2, :6] = -float("inf")  # leaves one token
    products[4, 6] = float("nan")
    labels = torch.tensor([[3, 4, 6, 0, 0, -1, 7, 2**40]], device=device)
    weights = torch.ones(1, 8, device=device)
    weights[0, 3] = 0.0
    numbers, gradient = label_loss(products, labels, weights)
    assert numbers.hit[0, :3].tolist() == [True, False, True]
    assert float(numbers.nll[0, 2]) == 0.0
    assert not gradient[2:4].any()
    assert numbers.nll[0, 4:].isnan().all()
    assert torch.isfinite(gradient[:4]).all()


if __name__ == "__main__":
    cpu = torch.device("cpu")
    look_at_edges(cpu)
    print(f"{compare_all(cpu, (5, 4096, 4500))} comparisons")
