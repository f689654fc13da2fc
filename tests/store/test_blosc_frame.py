"""Chunks that we pack are blosc buffers: numcodecs unpacks every one, and they are smaller than its own."""

import numpy as np
import pytest
from dflash_offline.store.blosc_frame import HEADER, compress
from numcodecs import blosc  # pyright: ignore[reportAttributeAccessIssue]  compiled, without stubs


def states(count: int) -> np.ndarray:
    values = np.random.default_rng(count).normal(size=count).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("count", [1, 2, 64, 127, 128, 129, 512, 36_864, 327_680])
def test_blosc_unpacks_it(count: int) -> None:
    noise = np.random.default_rng(0).integers(0, 2**16, size=count).astype(np.uint16)
    padded = np.concatenate([states(count)[: count // 2], np.full(count - count // 2, 0x7FC0, dtype=np.uint16)])
    for values in (states(count), noise, padded, np.zeros(count, dtype=np.uint16)):
        packed = compress(values)
        assert np.array_equal(np.frombuffer(blosc.decompress(packed), dtype=np.uint16), values)
        assert len(packed) <= values.nbytes + HEADER.size
        assert HEADER.unpack(packed[: HEADER.size])[4:] == (values.nbytes, values.nbytes, len(packed))


@pytest.mark.parametrize("hidden, share", [(576, 0.91), (5120, 0.99)])
def test_it_is_smaller_than_blosc_packs_it(hidden: int, share: float) -> None:
    """One chunk of 64 positions, normal values."""
    values = states(64 * hidden)
    assert len(compress(values)) < share * len(blosc.compress(values, b"zstd", 1, blosc.SHUFFLE, 262_144))


def test_what_does_not_pack_is_stored() -> None:
    noise = np.random.default_rng(0).integers(0, 2**16, size=4096).astype(np.uint16)
    assert compress(noise)[HEADER.size :] == noise.tobytes()
