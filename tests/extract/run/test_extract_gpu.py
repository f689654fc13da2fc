"""Extraction on a CUDA device: the forward, pinned copies and the device of a worker exist only there."""

from collections.abc import Callable
from multiprocessing.connection import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch
from dflash_offline.extract.batching import make_batches
from dflash_offline.extract.config import ExtractConfig, PrepareConfig
from dflash_offline.extract.dealing import Halved
from dflash_offline.extract.int8_rows import encode_states
from dflash_offline.extract.launch import Dealer, extract
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.recorder import Recorder
from dflash_offline.extract.survey import survey
from dflash_offline.extract.targets.hf import load_target
from dflash_offline.extract.writing import Committed, Entry, Room, SegmentFiller
from dflash_offline.store.codecs import get_codec
from dflash_offline.store.integrity import verify
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.writer import create_store
from dflash_offline.watch import Channel

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


@pytest.mark.parametrize("codec", ["raw", "int8:4"])
def test_states_copied_beside_the_next_forward_are_those_of_one_batch_at_a_time(
    tmp_path: Path, chats: Path, make_config: Callable[..., ExtractConfig], codec: str
) -> None:
    """The whole path of a worker, its ring page-locked, against each batch run, waited for and fetched."""
    data = tmp_path / "data"
    prepare(PrepareConfig(target="tiny", out=str(data), min_trained=2), [str(chats)])
    config = make_config(data, tmp_path / "store", devices="0", taps=(0, 2, 4), codec=codec, dtype="bfloat16")
    extract(config)
    found = survey(config)
    target = load_target("tiny", device="cuda:0", dtype="bfloat16")
    _, theirs = Pipe()
    dealer = Dealer(found, set())
    recorder = Recorder(Channel(theirs, "here"), dealer.order("cuda:0"), found.manifest, target)
    reader, rows_of = StoreReader(tmp_path / "store"), {}
    for i, sample in enumerate(reader.samples.sample_id.tolist()):
        geometry = reader.geometries["hidden"]
        rows_of[sample] = np.empty((geometry.taps, int(reader.samples.n[i]), geometry.row_bytes), np.uint8)
        reader.read_rows(i, rows_of[sample])
    for group in dealer.groups:
        first, last = np.searchsorted(recorder.plan["segment"], [group.segments.start, group.segments.stop])
        for batch in make_batches(recorder.lengths[first:last], config.token_budget):
            rows = int(first) + batch
            taps, _ = target.record(*recorder.load(rows), found.manifest.tap_layers)
            torch.cuda.synchronize()
            encoded = encode_states(taps, get_codec(codec).outliers).cpu().numpy()
            for place, row in enumerate(rows.tolist()):
                n = int(recorder.plan["n"][row])
                assert (encoded[:, place, :n] == rows_of[int(recorder.plan["sample_id"][row])]).all()


def test_cuda_out_of_memory_halves_the_token_budget(
    tmp_path: Path, chats: Path, make_config: Callable[..., ExtractConfig]
) -> None:
    """CUDA's own error, raised beside a forward of many tokens after the check before the first segment."""
    data = tmp_path / "data"
    prepare(PrepareConfig(target="tiny", out=str(data), min_trained=2), [str(chats)])
    settings = {"taps": (0, 2), "token_budget": 2048, "dtype": "bfloat16", "segment_positions": 16384}
    found = survey(make_config(data, tmp_path / "store", devices="0", **settings))
    create_store(found.store_dir, found.manifest, found.plan.table, data)
    target = load_target("tiny", device="cuda:0", dtype="bfloat16")
    seen: list[int] = []

    def take_too_much(module: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        seen.append(kwargs["input_ids"].numel())
        if seen[-1] > 1024 and len(seen) > 2:
            torch.empty(1 << 42, dtype=torch.uint8, device="cuda:0")

    target.decoder.register_forward_pre_hook(take_too_much, with_kwargs=True)
    ours, theirs = Pipe()
    dealer = Dealer(found, set())
    recorder = Recorder(Channel(theirs, "here"), dealer.order("cuda:0"), found.manifest, target)
    committed: list[Committed] = []
    filler = SegmentFiller(found.store_dir, found.manifest, committed.append)
    for group in dealer.groups:
        recorder.record(group, Inline(filler))
    told = []
    while ours.poll():
        told.append(ours.recv()[1])
    halved = [one for one in told if isinstance(one, Halved)]
    assert [one.token_budget for one in halved] == [1024]
    assert "out of memory" in halved[0].detail
    assert len(committed) == found.plan.num_segments


class Inline:
    """Writes in this process; its memory is page-locked, as a ring's is."""

    def __init__(self, filler: SegmentFiller) -> None:
        self.filler = filler

    def room(self, shape: tuple[int, ...]) -> Room:
        return Room(torch.empty(shape, dtype=torch.uint8, pin_memory=True))

    def put(self, room: Room, entries: tuple[Entry, ...]) -> None:
        self.filler.write(room.rows.numpy(), entries)
