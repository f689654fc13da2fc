"""The torch decoder against the numpy one, bit for bit, and a row's taps as a batch decodes them."""

import numpy as np
import pytest
import torch
from dflash_offline.store import int8
from dflash_offline.store.codecs import get_codec
from dflash_offline.train.batch import RowBatch
from dflash_offline.train.int8_rows import decode
from dflash_offline.train.slot import RowArrays, RowShape, RowSlot

CASES = [(2, 1), (17, 16), (65, 3), (96, 16), (576, 16), (40_000, 5)]


def random_planes(*shape: int) -> np.ndarray:
    """Bits [..., H] u16 of finite values, each row of a size of its own."""
    draw = np.random.default_rng(shape[-1])
    sizes = 2.0 ** draw.integers(-130, 120, (*shape[:-1], 1))
    return int8.as_bfloat16((draw.normal(size=shape) * sizes).astype(np.float32))


def bits_of(states: torch.Tensor) -> np.ndarray:
    return states.cpu().view(torch.int16).numpy().view(np.uint16)


def decoded(rows: np.ndarray, hidden: int, outliers: int) -> np.ndarray:
    out = np.empty((*rows.shape[:-1], hidden), np.uint16)
    int8.decode(rows, outliers, out)
    return out


@pytest.mark.parametrize("hidden, outliers", CASES)
def test_states_are_those_of_numpy(hidden: int, outliers: int) -> None:
    rows = int8.encode(random_planes(2, 20, hidden), outliers)
    assert (bits_of(decode(torch.from_numpy(rows), hidden, outliers)) == decoded(rows, hidden, outliers)).all()


def test_states_land_in_the_caller_s_memory() -> None:
    """Also where the rows of the destination lie apart, as those of a tap in taps [T, Lt*H] do."""
    rows = int8.encode(random_planes(20, 65), 3)
    taps = torch.full((20, 3, 65), 7.0, dtype=torch.bfloat16)
    out = decode(torch.from_numpy(rows), 65, 3, out=taps[:, 1])
    assert out.data_ptr() == taps[:, 1].data_ptr()
    assert (bits_of(taps[:, 1].contiguous()) == decoded(rows, 65, 3)).all()
    assert (taps[:, [0, 2]] == 7.0).all()


def test_kept_non_finite_values_come_back_and_a_row_of_more_is_nan() -> None:
    planes = random_planes(2, 32)
    planes[:, [3, 9]] = 0x7F80, 0xFFC1
    planes[1, 4:9] = 0x7FC0
    found = decode(torch.from_numpy(int8.encode(planes, 2)), 32, 2)
    assert (bits_of(found)[0, [3, 9]] == planes[0, [3, 9]]).all()
    assert found[0, [0, 1, 2, 31]].isfinite().all()
    assert found[1].isnan().sum() >= 30


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 130 torch.uint8, expected 82 uint8"):
        decode(torch.zeros(1, 130, dtype=torch.uint8), 64, 4)


@pytest.mark.parametrize("name", ["raw", "zstd", "int8:5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_batch_decodes_what_the_loader_hands_over(name: str, dtype: torch.dtype, device: str, tiny_spec) -> None:
    """Padding, rows of zero bytes, must become zeros whatever the codec; on CUDA the copy and the decoder differ."""
    spec, shape = tiny_spec(), RowShape(row_tokens=128, anchors=16, block_size=8)
    codec = get_codec(name)
    planes = random_planes(spec.num_taps, 50, spec.hidden_size)
    batch = RowBatch(spec, shape, torch.device(device), dtype, has_last=True)
    assert batch.last is not None
    for states in (batch.taps, batch.last):
        states.fill_(float("nan"))
    batch.load(loaded_row(spec.num_taps, spec.hidden_size, shape, name, planes))
    expected = np.zeros((spec.num_taps, 128, spec.hidden_size), np.uint16)
    codec.decode(codec.encode(planes), expected[:, :50])
    by_token = torch.from_numpy(expected.transpose(1, 0, 2).copy().view(np.int16)).view(torch.bfloat16)
    assert torch.equal(batch.taps.cpu(), by_token.reshape(128, -1).to(dtype))
    assert torch.equal(batch.last.cpu(), by_token[:, 1].to(dtype))


def loaded_row(num_taps: int, hidden: int, shape: RowShape, name: str, planes: np.ndarray) -> RowArrays:
    """A row whose last states are those of its tap 1."""
    row = RowSlot(shape=shape, num_taps=num_taps, hidden_size=hidden, codec_name=name, has_last=True).allocate()
    assert row.taps.shape == (num_taps, shape.row_tokens, get_codec(name).row_bytes(hidden))
    row.taps[:, : planes.shape[1]] = row.codec.encode(planes)
    assert row.last is not None
    row.last[:] = row.taps[1]
    return row


@pytest.mark.gpu
@pytest.mark.parametrize("hidden, outliers", CASES)
def test_states_of_a_gpu_are_those_of_numpy(hidden: int, outliers: int) -> None:
    """Only CUDA shows how CUDA multiplies, rounds and scatters."""
    rows = int8.encode(random_planes(2, 200, hidden), outliers)
    found = decode(torch.from_numpy(rows).cuda(), hidden, outliers)
    assert (bits_of(found) == decoded(rows, hidden, outliers)).all()


@pytest.mark.gpu
def test_a_cuda_graph_can_hold_the_decoder() -> None:
    """Only CUDA shows whether something waits for the device."""
    planes = random_planes(2, 128, 5120)
    encoded = int8.encode(planes, 16)
    rows, out = torch.from_numpy(encoded[0]).cuda(), torch.empty(128, 5120, dtype=torch.bfloat16, device="cuda")
    decode(rows, 5120, 16, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(rows, 5120, 16, out=out)
    rows.copy_(torch.from_numpy(encoded[1]).cuda())
    graph.replay()
    assert (bits_of(out) == decoded(encoded[1], 5120, 16)).all()
