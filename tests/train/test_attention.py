"""The attention paths: pieces of a dense mask against the whole, and the refusals."""

import pytest
import torch
from dflash_offline.train.attention import attend, cut_mask, visible_keys
from dflash_offline.train.blocks import flex_mask
from dflash_offline.train.slot import RowShape

CPU = torch.device("cpu")


def random_keys(num_context: int, num_own: int) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(2, n, 16, generator=rng).requires_grad_() for n in (num_context, num_context, num_own, num_own)
    )


@pytest.mark.parametrize("density", [0.001, 0.05, 1.0])
@pytest.mark.parametrize(("num_queries", "num_context"), [(256, 384), (200, 77), (128, 1)])
def test_pieces_equal_the_whole_mask(density: float, num_queries: int, num_context: int) -> None:
    rng = torch.Generator().manual_seed(1)
    mask = torch.rand(num_queries, num_context + num_queries, generator=rng) < density
    mask[torch.arange(num_queries), num_context + torch.arange(num_queries)] = True
    queries = torch.randn(4, num_queries, 16, generator=rng).requires_grad_()
    keys, values, own_keys, own_values = inputs = random_keys(num_context, num_queries)
    push = torch.randn(4, num_queries, 16, generator=rng)

    def run(visible) -> list[torch.Tensor]:
        out = attend(queries, (keys, values), (own_keys, own_values), visible)
        return [out, *torch.autograd.grad((out * push).sum(), [queries, *inputs])]

    scores = queries @ torch.cat([keys, own_keys], 1).repeat_interleave(2, 0).mT / 4.0
    shares = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    plain = shares @ torch.cat([values, own_values], 1).repeat_interleave(2, 0)
    slow = [plain, *torch.autograd.grad((plain * push).sum(), [queries, *inputs])]
    for fast in (run(cut_mask(mask, num_context)), run(mask)):
        for one, other in zip(fast, slow):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_pieces_leave_out_what_no_query_of_a_tile_sees() -> None:
    mask = torch.zeros(256, 512 + 256, dtype=torch.bool)
    mask[3, 40] = mask[90, 60] = mask[200, 300] = True
    mask[torch.arange(256), 512 + torch.arange(256)] = True
    first, second = cut_mask(mask, 512)
    assert (first.context, first.own, first.mask.shape) == (slice(40, 61), slice(0, 128), (128, 149))
    assert (second.context, second.own, second.mask.shape) == (slice(300, 301), slice(128, 256), (128, 129))


def test_every_other_path_is_refused() -> None:
    shape = RowShape(row_tokens=128, anchors=16, block_size=8)
    zeros = torch.zeros(16, dtype=torch.int64)
    tiles, dense = flex_mask(zeros, zeros.clone(), shape), torch.ones(128, 256, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="on a CPU the drafter takes the dense mask"):
        visible_keys(tiles, 128, CPU)
    with pytest.raises(RuntimeError, match="a dense attention step is never run there"):
        visible_keys(dense, 128, torch.device("cuda"))
    with pytest.raises(RuntimeError, match=r"under torch\.compile"):
        visible_keys(tiles, 128, torch.device("cuda"))
    with pytest.raises(RuntimeError, match="no attention path for device mps"):
        visible_keys(dense, 128, torch.device("mps"))
