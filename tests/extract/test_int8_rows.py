"""The torch encoder against the numpy one, byte for byte."""

import numpy as np
import pytest
import torch
from dflash_offline.extract.int8_rows import decode, encode, encode_states, errors
from dflash_offline.store import int8
from dflash_offline.store.state_error import relative_errors


def states_of(bits: np.ndarray, device: str = "cpu") -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(device)


def odd_rows(hidden: int) -> np.ndarray:
    """Rows of every kind [M, H] u16: random bits, normal values of all sizes, ties, massive channels, non-finite."""
    draw = np.random.default_rng(hidden)
    any_bits = draw.integers(0, 65536, (40, hidden)).astype(np.uint16)
    finite = np.where(any_bits & 0x7F80 == 0x7F80, any_bits & 0x80FF, any_bits)
    sizes = 2.0 ** draw.integers(-130, 120, (40, 1))
    normal = int8.as_bfloat16((draw.normal(size=(40, hidden)) * sizes).astype(np.float32))
    massive = normal.copy()
    massive[np.arange(40), draw.integers(0, hidden, 40)] = int8.as_bfloat16(np.array([24_704.0], np.float32))
    few = draw.choice(np.array([0x4000, 0xC000, 0x3F80, 0x8000], np.uint16), (40, hidden))
    constant = np.repeat(any_bits[:, :1], hidden, axis=1)
    largest = np.where(draw.random((40, hidden)) < 0.5, 0x7F7F, 0xFF7E).astype(np.uint16)
    zeros = np.zeros((1, hidden), np.uint16)
    return np.concatenate([any_bits, finite, normal, massive, few, constant, largest, zeros])


CASES = [(2, 1), (17, 16), (65, 3), (96, 16), (97, 96), (576, 16), (40_000, 5)]


@pytest.mark.parametrize("hidden, outliers", CASES)
def test_rows_are_those_of_numpy(hidden: int, outliers: int) -> None:
    bits = odd_rows(hidden)[:: 40 if hidden > 1000 else 1]
    assert (encode(states_of(bits), outliers).numpy() == int8.encode(bits, outliers)).all()


@pytest.mark.parametrize("hidden, outliers", CASES)
def test_what_is_measured_is_what_readers_will_see(hidden: int, outliers: int) -> None:
    bits = odd_rows(hidden)[:: 40 if hidden > 1000 else 1]
    values = int8.as_float(bits)
    bits = bits[np.isfinite(values).all(axis=1) & (values != 0).any(axis=1)]
    rows, after = int8.encode(bits, outliers), np.empty_like(bits)
    int8.decode(rows, outliers, after)
    found = decode(torch.from_numpy(rows), hidden, outliers)
    assert (found.view(torch.int16).numpy().view(np.uint16) == after).all()
    measured = errors(states_of(bits), torch.from_numpy(rows), outliers).numpy()
    assert measured == pytest.approx(relative_errors(bits, after), rel=1e-5, abs=1e-9)


def test_all_axes_but_the_last_are_kept_and_states_stay_as_they_were() -> None:
    bits = odd_rows(32)[:24].reshape(2, 3, 4, 32)
    states = states_of(bits.copy())
    assert (encode_states(states, 4).numpy() == int8.encode(bits, 4)).all()
    assert (states.view(torch.int16).numpy().view(np.uint16) == bits).all()


def test_without_kept_values_rows_are_the_bits_themselves() -> None:
    bits = odd_rows(32)[:24].reshape(2, 3, 4, 32)
    assert (encode_states(states_of(bits), None).numpy() == bits.view(np.uint8)).all()


@pytest.mark.parametrize("hidden, outliers", [(16, 16), (4, 5), (65_537, 16), (16, 0)])
def test_rows_that_cannot_be_packed_are_refused(hidden: int, outliers: int) -> None:
    with pytest.raises(ValueError, match=f"{outliers} exact values of a row of {hidden}"):
        encode(torch.zeros(1, hidden, dtype=torch.bfloat16), outliers)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden, outliers", CASES)
def test_rows_of_a_gpu_are_those_of_numpy(hidden: int, outliers: int) -> None:
    """Division, rounding, top k and NaN differ between devices unless they are pinned down."""
    bits = odd_rows(hidden)
    assert (encode(states_of(bits, "cuda"), outliers).cpu().numpy() == int8.encode(bits, outliers)).all()


@pytest.mark.gpu
def test_a_cuda_graph_can_hold_the_encoder() -> None:
    """Only CUDA shows whether something waits for the device."""
    first, second = odd_rows(5120)[:64], odd_rows(5120)[64:128]
    states = states_of(first, "cuda")
    encode(states, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = encode(states, 16)
    states.copy_(states_of(second, "cuda"))
    graph.replay()
    assert (rows.cpu().numpy() == int8.encode(second, 16)).all()
