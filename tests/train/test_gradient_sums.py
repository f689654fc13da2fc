"""Gradients of many rows are summed in fp32, whatever the drafter's own number format."""

import torch
from dflash_offline.train.batch import RowBatch
from dflash_offline.train.config import LossConfig
from dflash_offline.train.slot import RowShape
from dflash_offline.train.step import TrainStep
from torch import Tensor

NUM_ROWS = 24
BOUND = 0.0015  # of the gradient's norm
SHAPE = RowShape(row_tokens=128, anchors=16, block_size=8)


def error_of(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def test_24_rows_of_a_bf16_drafter_add_up_as_in_float64(tiny_spec, tiny_drafter, random_sample, fill_row) -> None:
    rng = torch.Generator().manual_seed(5)
    embedding, head = (torch.randn(48, 32, generator=rng) for _ in range(2))
    drafter = tiny_drafter(tiny_spec()).to(torch.bfloat16)
    step = TrainStep(drafter, embedding, head / 3, SHAPE, LossConfig())
    batch = RowBatch(drafter.spec, SHAPE, torch.device("cpu"), torch.bfloat16)
    rows = [fill_row(SHAPE, [random_sample(seed, 120)], range(3, 115, 7)) for seed in range(NUM_ROWS)]

    exact = torch.zeros_like(step.gradient_sum, dtype=torch.float64)
    for row in rows:  # each by itself
        step.reset()
        batch.load(row)
        step.accumulate(batch)
        exact += step.gradient_sum.double()
    step.reset()
    for row in rows:
        batch.load(row)
        step.accumulate(batch)
    assert error_of(step.gradient_sum, exact) < BOUND

    for row in rows:  # autograd's own sums, in the format of the weights
        batch.load(row)
        inputs = batch.taps, step.block_embeds(batch), batch.positions, batch.block_positions, batch.masks
        hidden = drafter(*inputs)
        hidden.backward(step.loss(hidden.detach(), batch).gradient)
    plain = torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None])
    print(f"fp32 sums: {error_of(step.gradient_sum, exact):.2e}, bf16 sums: {error_of(plain, exact):.2e}")
    assert error_of(plain, exact) > 2 * BOUND
