"""Extraction on a CUDA device: the forward, pinned copies and the device of a worker exist only there."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from dflash_offline.extract.config import ExtractConfig, PrepareConfig
from dflash_offline.extract.launch import extract
from dflash_offline.extract.prepare import prepare
from dflash_offline.store.codecs import get_codec
from dflash_offline.store.integrity import verify
from dflash_offline.store.reader import StoreReader

pytestmark = pytest.mark.gpu


def bits_of(reader: StoreReader, i: int) -> np.ndarray:
    shape = (len(reader.manifest.tap_layers), int(reader.samples.n[i]), reader.manifest.hidden_size)
    bits = np.empty(shape, dtype=np.uint16)
    reader.read(i, bits)
    return bits


def states_of(reader: StoreReader, i: int) -> np.ndarray:
    return (bits_of(reader, i).astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2.0**-7), ("bfloat16", 0.05)])
def test_gpu_states_are_those_of_the_cpu(
    tmp_path: Path, chats: Path, make_config: Callable[..., ExtractConfig], dtype: str, tolerance: float
) -> None:
    data = tmp_path / "data"
    prepare(PrepareConfig(target="tiny", out=str(data), min_trained=2), [str(chats)])
    settings = {"taps": (0, 2, 4), "last": True, "token_budget": 2048}
    extract(make_config(data, tmp_path / "cpu", dtype="float32", **settings))
    report = extract(make_config(data, tmp_path / "gpu", devices="0", shards=2, dtype=dtype, **settings))
    assert report.workers == ("cuda:0",)
    assert not verify(tmp_path / "gpu").faults
    cpu, gpu = StoreReader(tmp_path / "cpu"), StoreReader(tmp_path / "gpu")
    for i in range(len(cpu)):
        expected, got = states_of(cpu, i), states_of(gpu, i)
        error = np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert np.quantile(error, 0.95) < tolerance


def test_states_encoded_on_a_gpu_are_those_that_numpy_encodes(
    tmp_path: Path, chats: Path, make_config: Callable[..., ExtractConfig]
) -> None:
    data = tmp_path / "data"
    prepare(PrepareConfig(target="tiny", out=str(data), min_trained=2), [str(chats)])
    for name in ("raw", "int8:4"):
        extract(make_config(data, tmp_path / name, devices="0", taps=(0, 2, 4), codec=name, dtype="bfloat16"))
    assert not verify(tmp_path / "int8:4").faults
    raw, encoded, codec = StoreReader(tmp_path / "raw"), StoreReader(tmp_path / "int8:4"), get_codec("int8:4")
    for i in range(len(raw)):
        bits = bits_of(raw, i)
        expected = np.empty_like(bits)
        codec.decode(codec.encode(bits), expected)
        assert (bits_of(encoded, i) == expected).all()
