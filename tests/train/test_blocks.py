"""The block mask: pairs by loops, tiles against the dense rule, flex against dense attention."""

import itertools
import random
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dflash_offline import UserError
from dflash_offline.train.blocks import RowMasks, dense_mask, flex_mask, tiles
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.slot import TILE, RowShape, default_anchors
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Case = tuple[torch.Tensor, torch.Tensor, RowShape, AttentionKind]
TENSORS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
TENSORS += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


def random_anchors(rng: random.Random, shape: RowShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors and sample starts of a packed row: often at starts, not always sorted, often with spare slots."""
    num_cuts = rng.choice([0, 1, 3, 6, 30])
    cuts = sorted(rng.sample(range(1, shape.row_tokens), num_cuts))
    spans = list(itertools.pairwise([0, *cuts, shape.row_tokens]))
    num_kept = rng.choice([shape.anchors, rng.randint(1, shape.anchors)])
    used = [rng.choice(spans[: rng.randint(1, len(spans))]) for _ in range(num_kept)]
    pairs = [(start if rng.random() < 0.1 else rng.randrange(start, end), start) for start, end in used]
    if rng.random() < 0.7:
        pairs.sort()
    pairs += [pairs[-1]] * (shape.anchors - num_kept)  # spare slots repeat the last anchor
    anchors, starts = torch.tensor(pairs).T.contiguous()
    return anchors, starts


def random_kind(rng: random.Random, shape: RowShape) -> AttentionKind:
    """One of the four variants; windows of one token, below and above a block, a tile and a row."""
    size, tokens = shape.block_size, shape.row_tokens
    windows = [1, 2, size - 1, size, size + 1, 17, TILE - 1, TILE, TILE + 1, tokens - 1, tokens, 10 * tokens]
    window = rng.choice([None, rng.choice(windows), rng.randint(1, tokens)])
    return AttentionKind(window, rng.random() < 0.5)


def random_case(rng: random.Random, row_tokens: int, block_sizes: list[int]) -> Case:
    block_size = rng.choice(block_sizes)
    unit = RowShape(row_tokens=TILE, anchors=TILE, block_size=block_size).unit
    shape = RowShape(row_tokens=row_tokens, anchors=unit * rng.choice([1, 2, 3]), block_size=block_size)
    return *random_anchors(rng, shape), shape, random_kind(rng, shape)


def test_dense_mask_is_the_rule_pair_by_pair() -> None:
    rng = random.Random(0)
    for _ in range(12):
        anchors, starts, shape, kind = random_case(rng, 128, [6, 8, 32])
        window, causal = kind.window, kind.is_causal
        mask = dense_mask(anchors, starts, shape, kind)
        for query in range(shape.num_queries):
            block, slot = divmod(query, shape.stride)
            slot = min(slot, shape.block_size - 1)
            anchor, start = int(anchors[block]), int(starts[block])
            context = {t for t in range(start, anchor) if window is None or anchor + slot - t < window}
            last = slot if causal else shape.block_size - 1
            own = {shape.row_tokens + block * shape.stride + k for k in range(last + 1)}
            assert set(torch.nonzero(mask[query]).flatten().tolist()) == context | own


@pytest.mark.parametrize("seed", range(6))
def test_tiles_equal_the_dense_rule(seed: int) -> None:
    """3,000 rows of all variants: no visible pair in a skipped tile, no invisible one in a full tile."""
    rng = random.Random(seed)
    skipped = total = 0
    seen: set[tuple[bool, bool]] = set()
    for _ in range(500):
        row_tokens = rng.choice([128, 256, 384, 512])
        anchors, starts, shape, kind = random_case(rng, row_tokens, [2, 3, 7, 8, 10, 16, 32, 128])
        want = dense_mask(anchors, starts, shape, kind)
        partial, full = tiles(anchors, starts, shape, kind.window)
        grid = want.view(shape.num_queries // TILE, TILE, shape.num_keys // TILE, TILE)
        assert not (partial & full).any()
        assert not (grid.any(3).any(1) & ~(partial | full)).any(), "a skipped tile holds a visible pair"
        assert grid.all(3).all(1)[full].all(), "a full tile holds an invisible pair"
        skipped, total = skipped + int((~(partial | full)).sum()), total + partial.numel()
        seen.add((kind.window is None, kind.is_causal))
    assert skipped / total > 0.3
    assert len(seen) == 4


def same_tiles(one: BlockMask, other: BlockMask) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in TENSORS)


def test_flex_mask_holds_the_same_rule_and_the_same_tiles() -> None:
    rng = random.Random(2)
    for _ in range(200):
        anchors, starts, shape, kind = random_case(rng, 256, [2, 3, 8, 10, 16, 128])
        mask = flex_mask(anchors, starts, shape, kind)
        none = torch.zeros((), dtype=torch.int64)
        query, key = torch.arange(shape.num_queries)[:, None], torch.arange(shape.num_keys)[None]
        assert torch.equal(mask.mask_mod(none, none, query, key), dense_mask(anchors, starts, shape, kind))
        partial, full = tiles(anchors, starts, shape, kind.window)
        assert torch.equal(mask.to_dense()[0, 0].bool(), partial | full)


@pytest.mark.parametrize("is_tiled", [False, True])
def test_masks_are_refilled_in_place_with_what_fresh_ones_hold(is_tiled: bool) -> None:
    rng = random.Random(4)
    for _ in range(25):
        *_, shape, _ = random_case(rng, 384, [2, 8, 10, 16, 128])
        anchors, starts = (torch.zeros(shape.anchors, dtype=torch.int64) for _ in range(2))
        kinds = [AttentionKind(), *(random_kind(rng, shape) for _ in range(3))]
        held = RowMasks(anchors, starts, shape, kinds, is_tiled=is_tiled)
        masks, before = held.masks, places(held)
        for _ in range(6):
            for buffer, values in zip((anchors, starts), random_anchors(rng, shape)):
                buffer.copy_(values)
            held.refill()
            assert held.masks is masks
            assert places(held) == before
            for mask, kind in zip(masks, kinds, strict=True):
                if isinstance(mask, BlockMask):
                    assert same_tiles(mask, flex_mask(anchors.clone(), starts.clone(), shape, kind))
                    dense = all_pairs(mask, shape)
                else:
                    dense = mask
                assert torch.equal(dense, dense_mask(anchors, starts, shape, kind))


def all_pairs(mask: BlockMask, shape: RowShape) -> torch.Tensor:
    """The rule of the mask for every pair, bool [Q, T+Q]."""
    none = torch.zeros((), dtype=torch.int64)
    return mask.mask_mod(none, none, torch.arange(shape.num_queries)[:, None], torch.arange(shape.num_keys)[None])


def places(held: RowMasks) -> list[int]:
    """Where each tensor of the masks lies, those that the rules close over among them."""
    tensors = [tensor for mask in held.masks for tensor in (guarded(mask) if isinstance(mask, BlockMask) else [mask])]
    return [tensor.data_ptr() for tensor in tensors]


def guarded(mask: BlockMask) -> list[torch.Tensor]:
    """Every tensor of a mask that a compiled step looks at."""
    closed_over = [cell.cell_contents for cell in mask.mask_mod.__closure__ or ()]
    return [item for item in (*vars(mask).values(), *closed_over) if isinstance(item, torch.Tensor)]


def test_masks_look_the_same_to_a_compiled_step_however_their_inputs_lie() -> None:
    """Strides of what a rule closes over are guarded, and that all rules share it: exams take columns of a table."""
    anchors, starts, shape, _ = random_case(random.Random(3), 512, [8])
    kinds = [AttentionKind(), AttentionKind(40, True)]
    columns = torch.stack([anchors, starts, anchors]).T.contiguous()  # [A, 3]
    pairs = ((anchors, starts), (columns[:, 0], columns[:, 1]), (columns.unbind(1)[0], columns.unbind(1)[1]))
    layouts, shared = [], []
    for first, second in pairs:
        masks = RowMasks(first, second, shape, kinds, is_tiled=True).masks
        tensors = [guarded(mask) for mask in masks if isinstance(mask, BlockMask)]
        assert [len(own) for own in tensors] == [len(TENSORS) + 2] * 2, "the tiles, anchors and starts"
        layouts.append([(tensor.shape, tensor.stride(), tensor.dtype) for own in tensors for tensor in own])
        shared.append([one is other for one, other in zip(*tensors)])
    assert layouts[0] == layouts[1] == layouts[2]
    assert shared[0] == shared[1] == shared[2] == [False] * len(TENSORS) + [True] * 2


def test_masks_of_several_kinds_are_inputs_of_one_compiled_frame() -> None:
    """Refilled ones and fresh ones of an exam alike, through Dynamo without a code generator."""
    *_, shape, _ = random_case(random.Random(5), 256, [8])
    kinds = [AttentionKind(9, True), AttentionKind(), AttentionKind(None, True)]
    anchors, starts = (torch.zeros(shape.anchors, dtype=torch.int64) for _ in range(2))
    held = RowMasks(anchors, starts, shape, kinds, is_tiled=True)
    queries, keys = torch.randn(1, 2, shape.num_queries, 16), torch.randn(1, 2, shape.num_keys, 16)

    def layers(masks: Sequence[Any]) -> list[Any]:
        return [flex_attention(queries, keys, keys, block_mask=mask) for mask in masks]

    torch._dynamo.reset()
    counters.clear()
    frame = torch.compile(layers, fullgraph=True, dynamic=False, backend="eager")
    rng = random.Random(6)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            values = random_anchors(rng, shape)
            for buffer, fresh in zip((anchors, starts), values):
                buffer.copy_(fresh)
            held.refill()
            first, second = torch.stack(values, dim=1).unbind(1)  # columns of a table, as in an exam
            exam = RowMasks(first, second, shape, kinds, is_tiled=True)
            for one, other, kind in zip(frame(held.masks), frame(exam.masks), kinds, strict=True):
                mask = dense_mask(*values, shape, kind)
                dense = F.scaled_dot_product_attention(queries, keys, keys, attn_mask=mask)
                assert torch.equal(one, other)
                torch.testing.assert_close(one, dense, atol=2e-6, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_flex_equals_dense_attention_forward(window: int | None, causal: bool) -> None:
    anchors, starts, shape, _ = random_case(random.Random(3), 256, [8])
    kind = AttentionKind(window, causal)
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, shape.num_queries, 16, generator=rng)
    k, v = torch.randn(2, 1, 2, shape.num_keys, 16, generator=rng)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without torch.compile.*")  # a CPU runs it uncompiled, only here
        flexed = flex_attention(q, k, v, block_mask=flex_mask(anchors, starts, shape, kind), enable_gqa=True)
    assert isinstance(flexed, torch.Tensor)
    mask = dense_mask(anchors, starts, shape, kind)
    dense = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    scores = (q @ k.repeat_interleave(2, 1).mT / 4.0).masked_fill(~mask, float("-inf"))
    eager = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(flexed, eager, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(dense, eager, atol=2e-6, rtol=1e-5)


def test_no_query_is_without_a_key() -> None:
    shape = RowShape(row_tokens=128, anchors=16, block_size=6)
    zeros = torch.zeros(16, dtype=torch.int64)
    mask = dense_mask(zeros, zeros, shape, AttentionKind(1, True))
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
