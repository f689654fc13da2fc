"""The block mask: pairs by loops, tiles against the dense rule, flex against dense attention."""

import itertools
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from dflash_offline import UserError
from dflash_offline.train.blocks import dense_mask, flex_mask, tiles
from dflash_offline.train.slot import TILE, RowShape, default_anchors
from torch.nn.attention.flex_attention import flex_attention

Case = tuple[torch.Tensor, torch.Tensor, RowShape, int | None, bool]


def random_case(rng: random.Random, row_tokens: int, block_sizes: list[int]) -> Case:
    block_size = rng.choice(block_sizes)
    unit = RowShape(row_tokens=TILE, anchors=TILE, block_size=block_size).unit
    shape = RowShape(row_tokens=row_tokens, anchors=unit * rng.choice([1, 2, 3]), block_size=block_size)
    cuts = sorted(rng.sample(range(8, row_tokens - 8), rng.choice([1, 3, 6])))
    edges = [0, *cuts, row_tokens]
    spans = [rng.choice(list(itertools.pairwise(edges))) for _ in range(shape.anchors)]
    pairs = [(rng.randrange(start, end), start) for start, end in spans]
    if rng.random() < 0.8:
        pairs.sort()
    anchors, starts = torch.tensor(pairs).T.contiguous()
    return anchors, starts, shape, rng.choice([None, 1, 17, 64, 130, 300]), rng.random() < 0.5


def test_dense_mask_is_the_rule_pair_by_pair() -> None:
    rng = random.Random(0)
    for _ in range(4):
        anchors, starts, shape, window, causal = random_case(rng, 128, [6, 8, 32])
        mask = dense_mask(anchors, starts, shape, window, causal)
        for query in range(shape.num_queries):
            block, slot = divmod(query, shape.stride)
            slot = min(slot, shape.block_size - 1)
            anchor, start = int(anchors[block]), int(starts[block])
            context = {t for t in range(start, anchor) if window is None or anchor + slot - t < window}
            last = slot if causal else shape.block_size - 1
            own = {shape.row_tokens + block * shape.stride + k for k in range(last + 1)}
            assert set(torch.nonzero(mask[query]).flatten().tolist()) == context | own


def test_tiles_equal_the_dense_rule() -> None:
    rng = random.Random(1)
    skipped = total = 0
    for _ in range(400):
        anchors, starts, shape, window, causal = random_case(rng, 512, [2, 3, 4, 7, 8, 10, 16, 32, 128])
        want = dense_mask(anchors, starts, shape, window, causal)
        partial, full = tiles(anchors, starts, shape, window)
        grid = want.view(shape.num_queries // TILE, TILE, shape.num_keys // TILE, TILE)
        assert not (partial & full).any()
        assert not (grid.any(3).any(1) & ~(partial | full)).any(), "a skipped tile holds a visible pair"
        assert grid.all(3).all(1)[full].all(), "a full tile holds an invisible pair"
        skipped, total = skipped + int((~(partial | full)).sum()), total + partial.numel()
    assert skipped / total > 0.3


def test_flex_mask_holds_the_same_rule_and_the_same_tiles() -> None:
    rng = random.Random(2)
    for _ in range(40):
        anchors, starts, shape, window, causal = random_case(rng, 512, [3, 8, 16])
        mask = flex_mask(anchors, starts, shape, window, causal)
        none = torch.zeros((), dtype=torch.int64)
        query, key = torch.arange(shape.num_queries)[:, None], torch.arange(shape.num_keys)[None]
        assert torch.equal(mask.mask_mod(none, none, query, key), dense_mask(anchors, starts, shape, window, causal))
        partial, full = tiles(anchors, starts, shape, window)
        assert torch.equal(mask.to_dense()[0, 0].bool(), partial | full)


def test_flex_mask_looks_the_same_to_a_compiled_step_however_its_inputs_lie() -> None:
    """Strides of what the rule closes over are guarded: exams take them as columns of a table, training does not."""
    anchors, starts, shape, window, causal = random_case(random.Random(3), 512, [8])
    columns = torch.stack([anchors, starts, anchors]).T.contiguous()  # [A, 3]
    pairs = ((anchors, starts), (columns[:, 0], columns[:, 1]), (columns.unbind(1)[0], columns.unbind(1)[1]))
    masks = [flex_mask(first, second, shape, window, causal) for first, second in pairs]
    layouts = []
    for mask in masks:
        closed_over = [cell.cell_contents for cell in mask.mask_mod.__closure__ or ()]
        tensors = [item for item in (*vars(mask).values(), *closed_over) if isinstance(item, torch.Tensor)]
        assert len(tensors) >= 6, "four of the tiles, anchors and starts"
        layouts.append([(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])
    assert layouts[0] == layouts[1] == layouts[2]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_flex_equals_dense_attention_forward(window: int | None, causal: bool) -> None:
    anchors, starts, shape, *_ = random_case(random.Random(3), 256, [8])
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, shape.num_queries, 16, generator=rng)
    k, v = torch.randn(2, 1, 2, shape.num_keys, 16, generator=rng)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without torch.compile.*")  # a CPU runs it uncompiled, only here
        flexed = flex_attention(q, k, v, block_mask=flex_mask(anchors, starts, shape, window, causal), enable_gqa=True)
    assert isinstance(flexed, torch.Tensor)
    mask = dense_mask(anchors, starts, shape, window, causal)
    dense = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    scores = (q @ k.repeat_interleave(2, 1).mT / 4.0).masked_fill(~mask, float("-inf"))
    eager = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(flexed, eager, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(dense, eager, atol=2e-6, rtol=1e-5)


def test_no_query_is_without_a_key() -> None:
    shape = RowShape(row_tokens=128, anchors=16, block_size=6)
    zeros = torch.zeros(16, dtype=torch.int64)
    mask = dense_mask(zeros, zeros, shape, window=1, causal=True)
    assert mask.any(1).all()
    assert not mask[:, : shape.row_tokens].any()


@pytest.mark.parametrize(
    ("tokens", "anchors", "block_size", "advice"),
    [
        (100, 16, 8, "row_tokens = 128"),
        (128, 10, 8, "anchors = 16"),
        (128, 9, 16, "anchors = 16"),
        (128, 12, 10, "anchors = 16"),
        (128, 16, 200, "another block size"),
        (0, 16, 8, "row_tokens = 128"),
    ],
)
def test_shapes_that_are_no_whole_tiles_are_refused(tokens: int, anchors: int, block_size: int, advice: str) -> None:
    with pytest.raises(UserError, match=advice):
        RowShape(row_tokens=tokens, anchors=anchors, block_size=block_size)


def test_default_anchors_fit_and_stride_divides_a_tile() -> None:
    for block_size in range(2, 129):
        for row_tokens in (128, 512, 16384):
            anchors = default_anchors(row_tokens, block_size)
            shape = RowShape(row_tokens=row_tokens, anchors=anchors, block_size=block_size)
            assert shape.stride >= block_size
            assert TILE % shape.stride == 0
            assert shape.num_queries % TILE == 0
            assert row_tokens // 8 <= anchors < row_tokens // 8 + shape.unit
