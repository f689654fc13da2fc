"""A row's blocks, labels and mask against loops over samples."""

import numpy as np
import pytest
import torch
from dflash_offline.train.batch import RowBatch
from dflash_offline.train.blocks import dense_mask
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.slot import RowShape, RowSlot

CPU = torch.device("cpu")
ANCHORS = [3, 9, 10, 38, 41, 60, 61, 99, None]


def loaded(tiny_spec, random_sample, fill_row, **spec_changes):
    spec = tiny_spec(**({"block_size": 6} | spec_changes))
    shape = RowShape(row_tokens=128, anchors=16, block_size=6)
    samples = [random_sample(0, 40), random_sample(1, 23), random_sample(2, 37, 0)]
    samples[1].loss_mask[8:12] = False  # a turn of the user
    row = fill_row(shape, samples, ANCHORS)
    batch = RowBatch(spec, shape, CPU, torch.float32)
    batch.load(row)
    return spec, shape, samples, row, batch


def test_blocks_labels_and_weights_by_loops(tiny_spec, random_sample, fill_row) -> None:
    spec, shape, samples, _, batch = loaded(tiny_spec, random_sample, fill_row)
    starts = [0, 40, 63]
    for block, anchor in enumerate(ANCHORS):
        ids = batch.block_ids.view(-1, shape.stride)[block].tolist()
        if anchor is None:
            assert ids == [spec.mask_token_id] * 8
            assert not batch.valid[block].any()
            continue
        number = max(i for i, start in enumerate(starts) if start <= anchor)
        place, sample = anchor - starts[number], samples[number]
        assert ids == [sample.ids[place]] + [spec.mask_token_id] * 7
        assert batch.starts[block] == starts[number]
        assert batch.block_positions.view(-1, 8)[block].tolist() == [place + k for k in range(8)]
        running = 1.0
        for k in range(1, 6):
            inside = place + k < len(sample)
            running *= float(inside and sample.loss_mask[place + k])
            assert batch.valid[block, k - 1] == running
            if running:
                assert batch.labels[block, k - 1] == sample.ids[place + k]
    # the cases this row must hold: a cut at the sample's end, one at a turn, and a whole block
    lengths = batch.valid.sum(1).tolist()
    assert {0.0, 1.0, 5.0} <= set(lengths)


def test_taps_are_concatenated_in_list_order(tiny_spec, random_sample, fill_row) -> None:
    *_, samples, _, batch = loaded(tiny_spec, random_sample, fill_row)
    bits = samples[1].taps[:, 4].astype(np.uint32) << 16
    expected = torch.from_numpy(bits.view(np.float32).copy()).flatten()  # taps 0, 1, 2 of token 44
    assert torch.equal(batch.taps[44], expected)
    assert (batch.taps[100:] == 0).all()


def test_masks_are_the_dense_rule_of_each_kind(tiny_spec, random_sample, fill_row) -> None:
    kinds = (AttentionKind(7, True), AttentionKind(), AttentionKind(7), AttentionKind(is_causal=True))
    layers = {"attention": (*kinds, AttentionKind(7, True)), "num_layers": 5}
    spec, shape, _, _, batch = loaded(tiny_spec, random_sample, fill_row, **layers)
    assert spec.kinds == kinds
    for mask, kind in zip(batch.masks, kinds, strict=True):
        assert isinstance(mask, torch.Tensor)
        assert torch.equal(mask, dense_mask(batch.anchors, batch.starts, shape, kind))
        no_other_sample(mask, batch)


def no_other_sample(mask: torch.Tensor, batch: RowBatch) -> None:
    """No block sees another sample, whatever the anchor."""
    context = mask[:, :128].view(16, 8, 128).any(1)
    samples = batch.sample_ids[:128]
    for block, anchor in enumerate(ANCHORS):
        if anchor is not None:
            assert (samples[context[block]] == samples[anchor]).all()


def test_buffers_stay_where_they_are(tiny_spec, random_sample, fill_row) -> None:
    spec, shape, samples, first, batch = loaded(tiny_spec, random_sample, fill_row)
    fields = [name for name, value in vars(batch).items() if isinstance(value, torch.Tensor)]

    def places() -> list[tuple[int, torch.Size]]:
        tensors = [*(getattr(batch, name) for name in fields), *batch.masks]
        return [(tensor.data_ptr(), tensor.shape) for tensor in tensors]

    before = places()
    batch.load(fill_row(shape, samples[1:], [5, 11]))
    assert places() == before
    batch.load(first)
    fresh = RowBatch(spec, shape, CPU, torch.float32)
    fresh.load(first)
    assert all(torch.equal(getattr(batch, name), getattr(fresh, name)) for name in fields)
    for one, other in zip(batch.masks, fresh.masks, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


def test_the_last_block_may_reach_past_the_row(tiny_spec, random_sample, fill_row) -> None:
    shape = RowShape(row_tokens=128, anchors=16, block_size=6)
    batch = RowBatch(tiny_spec(block_size=6), shape, CPU, torch.float32)
    batch.load(fill_row(shape, [random_sample(0, 128)], [126, 127]))
    assert batch.valid[:2].tolist() == [[1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("has_last", [False, True])
def test_a_slot_holds_every_array_apart(has_last: bool) -> None:
    row_shape = RowShape(row_tokens=128, anchors=16, block_size=6)
    layout = RowSlot(shape=row_shape, num_taps=2, hidden_size=5, codec_name="raw", has_last=has_last)
    memory = np.zeros(layout.size_bytes + 100, np.uint8)
    row = layout.view(memory)
    arrays = {name: getattr(row, name) for name, _, _ in layout.fields()}
    assert ("last" in arrays) == (row.last is not None) == has_last
    for number, array in enumerate(arrays.values()):
        array[...] = number % 2 if array.dtype == np.bool_ else number + 1
    assert (memory[layout.size_bytes :] == 0).all()
    for number, (name, shape, dtype) in enumerate(layout.fields()):
        assert arrays[name].shape == shape
        assert arrays[name].dtype == dtype
        assert (arrays[name] == (number % 2 if dtype == np.bool_ else number + 1)).all()
        assert arrays[name].__array_interface__["data"][0] % 64 == memory.__array_interface__["data"][0] % 64
    with pytest.raises(ValueError, match="expected at least"):
        layout.view(memory[:-200])
