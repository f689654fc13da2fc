"""The operations of a row against its dense masks and against sums written out."""

import numpy as np
import pytest
import torch
from dflash_offline.train.blocks import dense_mask
from dflash_offline.train.flops import mean_visible, row_flops, step_flops, tokens_behind
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.slot import RowShape

KINDS = [AttentionKind(), AttentionKind(40, True), AttentionKind(10), AttentionKind(None, True)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_mean_visible_counts_the_keys_of_the_dense_mask(kind: AttentionKind) -> None:
    shape = RowShape(row_tokens=256, anchors=16, block_size=16)
    anchors = np.sort(np.random.default_rng(0).integers(0, 256, 16))
    starts = anchors // 100 * 100
    mask = dense_mask(torch.from_numpy(anchors), torch.from_numpy(starts), shape, kind)
    assert mean_visible(anchors - starts, 16, kind) == pytest.approx(float(mask.sum(1).double().mean()))


def test_a_row_counts_the_keys_of_each_of_its_layers(tiny_spec, random_sample, fill_row) -> None:
    """Attention is 4 nq d (times 3.5 with its backward) for each pair of slot and key that its mask lets see."""
    spec = tiny_spec(attention=(AttentionKind(7, True), AttentionKind()))
    shape = RowShape(row_tokens=128, anchors=16, block_size=8)
    row = fill_row(shape, [random_sample(0, 40), random_sample(1, 23), random_sample(2, 37, 0)], [3, 9, 41, 60, 99])
    starts = torch.tensor([0, 0, 40, 40, 63] + [63] * 11)
    anchors = torch.from_numpy(row.anchors).long()
    assert tokens_behind(row).tolist() == (anchors - starts).tolist()
    masks = [dense_mask(anchors, starts, shape, kind) for kind in spec.attention]
    pairs = sum(int(mask.sum()) for mask in masks)
    rest = sum(step_flops(spec, shape, [0, 0]).values())
    assert row_flops(spec, row, shape) - rest == pytest.approx(3.5 * 4 * spec.num_heads * spec.head_dim * pairs)
    product = 2 * 16 * 7 * spec.hidden_size * spec.vocab_size
    assert row_flops(spec, row, shape, has_teacher=True) - row_flops(spec, row, shape) == pytest.approx(product)
