"""Reading every codec, against zarr-python's bytes and numpy's decoding of them."""

import json
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import ModuleType
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
from dflash_offline import UserError
from dflash_offline.store import bfloat16
from dflash_offline.store.geometry import ABSENT, SegmentGeometry
from dflash_offline.store.manifest import Manifest
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.segment_reader import SegmentReader
from dflash_offline.store.segment_writer import SegmentWriter
from dflash_offline.store.slices import SegmentDamage

CODECS = ("raw", "zstd", "int8:2")
Store = tuple[Path, Manifest]


@pytest.fixture(scope="module", autouse=True)
def plug_in() -> None:
    bfloat16.register()


@pytest.fixture(scope="module", params=CODECS)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, small: ModuleType) -> Store:
    return small.make_store(tmp_path_factory.mktemp("store"), codec=request.param)[:2]


class Reference:
    """A store read the slow way: whole segments by zarr-python, rows decoded one by one."""

    def __init__(self, store_dir: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        group: Any = zarr.open_group(store_dir, mode="r")
        end = manifest.num_segments * manifest.segment_positions
        self.arrays = {name: np.asarray(group[name][:end]).view(np.uint8) for name in ("hidden", "last")}

    def rows(self, reader: StoreReader, i: int, array: str = "hidden") -> np.ndarray:
        """Encoded rows [Lt, n, row_bytes] u8 of a sample."""
        first = int(reader.samples.segment[i]) * self.manifest.segment_positions + int(reader.samples.position[i])
        return self.arrays[array][first : first + int(reader.samples.n[i])].transpose(1, 0, 2)

    def values(self, reader: StoreReader, i: int, array: str = "hidden") -> np.ndarray:
        """Values [Lt, n, H] u16 of a sample."""
        rows, hidden = self.rows(reader, i, array), self.manifest.hidden_size
        return np.array([[decode(row, hidden, reader.geometries[array].codec.outliers) for row in tap] for tap in rows])


def decode(row: np.ndarray, hidden: int, outliers: int | None) -> np.ndarray:
    """One row, value by value, by the letter of the format."""
    if outliers is None:
        return np.frombuffer(row.tobytes(), "<u2")
    data = row.tobytes()
    (scale_bits,) = struct.unpack_from("<H", data, hidden)
    (scale,) = struct.unpack("<f", struct.pack("<I", scale_bits << 16))
    values = [rounded(float(np.float32(code) * np.float32(scale))) for code in struct.unpack_from(f"{hidden}b", data)]
    channels = struct.unpack_from(f"<{outliers}H", data, hidden + 2)
    for channel, bits in zip(channels, struct.unpack_from(f"<{outliers}H", data, hidden + 2 + 2 * outliers)):
        values[channel] = bits
    return np.array(values, dtype=np.uint16)


def rounded(value: float) -> int:
    """A number as bits of bfloat16, half to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    low, high = bits & 0xFFFF, bits >> 16
    return high + (low > 0x8000 or (low == 0x8000 and high % 2 == 1))


def test_whole_samples(store: Store, small: ModuleType) -> None:
    slow = Reference(*store)
    with StoreReader(store[0]) as reader:
        row_bytes = reader.geometries["hidden"].row_bytes
        for i, n in enumerate(reader.samples.n.tolist()):
            values, rows = np.empty((3, n, small.HIDDEN), np.uint16), np.empty((3, n, row_bytes), np.uint8)
            reader.read(i, values)
            reader.read_rows(i, rows)
            assert np.array_equal(rows, slow.rows(reader, i))
            assert np.array_equal(values, slow.values(reader, i))
            if reader.geometries["hidden"].codec.is_lossless:
                assert np.array_equal(values, small.states(int(reader.samples.sample_id[i]), n))
            last, last_rows = np.empty((n, small.HIDDEN), np.uint16), np.empty((1, n, row_bytes), np.uint8)
            reader.read_last(i, last)
            reader.read_rows(i, last_rows, array="last")
            assert np.array_equal(last, slow.values(reader, i, "last")[0])
            assert np.array_equal(last_rows, slow.rows(reader, i, "last"))


def test_slices_at_ragged_ends_and_some_taps(store: Store, small: ModuleType) -> None:
    slow = Reference(*store)
    with StoreReader(store[0]) as reader:
        i = int(np.argmax(reader.samples.n))
        n, row_bytes = int(reader.samples.n[i]), reader.geometries["hidden"].row_bytes
        values, rows = slow.values(reader, i), slow.rows(reader, i)
        edges = sorted({0, 1, 63, 64, 65, 127, 128, 129, n - 1, n})
        for start, stop in [(a, b) for a in edges for b in edges if a < b]:
            for taps in (None, [2, 0], [1]):
                chosen = slice(None) if taps is None else taps
                count = 3 if taps is None else len(taps)
                slot = np.full((count, stop - start + 2, small.HIDDEN), 7, np.uint16)  # planes inside a larger slot
                reader.read(i, slot[:, 1:-1], taps=taps, start=start, stop=stop)
                assert np.array_equal(slot[:, 1:-1], values[chosen, start:stop])
                assert (slot[:, [0, -1]] == 7).all()
                out = np.empty((count, stop - start, row_bytes), np.uint8)
                reader.read_rows(i, out, taps=taps, start=start, stop=stop, verify=False)
                assert np.array_equal(out, rows[chosen, start:stop])


def test_the_wrong_kind_of_memory_is_refused(store: Store, small: ModuleType) -> None:
    with StoreReader(store[0]) as reader:
        n, row_bytes = int(reader.samples.n[0]), reader.geometries["hidden"].row_bytes
        for shape, kind in (
            ((3, n, row_bytes), np.uint16),
            ((3, n, row_bytes + 1), np.uint8),
            ((2, n, row_bytes), np.uint8),
        ):
            with pytest.raises(ValueError, match="rows are"):
                reader.read_rows(0, np.empty(shape, kind))
        with pytest.raises(ValueError, match="contiguous"):
            reader.read_rows(0, np.empty((3, n, 2 * row_bytes), np.uint8)[..., ::2])
        with pytest.raises(ValueError, match="planes are"):
            reader.read(0, np.empty((3, n, small.HIDDEN), np.uint8))


def test_a_flipped_bit_anywhere_names_file_sample_and_tap(store: Store, tmp_path: Path, small: ModuleType) -> None:
    path = store[0] / "hidden/c.1.0.0"
    data = path.read_bytes()
    with StoreReader(store[0]) as reader:
        index = reader.segment("hidden", 1).index
        owners = {
            int(index[chunk, tap, 0]): (int(i), tap, int(chunk - reader.samples.position[i] // 64) * 64)
            for i in np.flatnonzero(reader.samples.segment == 1)
            for chunk in np.arange(reader.samples.position[i], reader.samples.position[i] + reader.samples.n[i], 64)
            // 64
            for tap in range(3)
        }
        try:
            for place in range(3, len(data) - reader.geometries["hidden"].index_bytes, 251):
                changed = bytearray(data)
                changed[place] ^= 1 << place % 8
                path.write_bytes(changed)
                i, tap, position = owners[max(offset for offset in owners if offset <= place)]
                n, sample_id = int(reader.samples.n[i]), int(reader.samples.sample_id[i])
                with pytest.raises(UserError) as caught:
                    reader.read(i, np.empty((3, n, small.HIDDEN), np.uint16))
                layer = store[1].tap_layers[tap]
                for words in (str(path), f"sample {sample_id},", f"tap {layer},", f"position {position})", "checksum"):
                    assert words in caught.value.happened
                with pytest.raises(UserError, match=f"tap {layer},"):
                    reader.read_rows(i, np.empty((3, n, reader.geometries["hidden"].row_bytes), np.uint8))
                reader.read(i, np.empty((2, n, small.HIDDEN), np.uint16), taps=[t for t in range(3) if t != tap])
        finally:
            path.write_bytes(data)


def test_without_verification_only_what_must_be_unpacked_is_checked(store: Store, small: ModuleType) -> None:
    path = store[0] / "hidden/c.0.0.0"
    data = path.read_bytes()
    path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    try:
        with StoreReader(store[0]) as reader:
            i = int(np.flatnonzero(reader.samples.segment == 0)[-1])  # the sinks were filled in reverse
            out = np.empty((3, int(reader.samples.n[i]), small.HIDDEN), np.uint16)
            if reader.geometries["hidden"].codec.is_compressed:
                with pytest.raises(UserError, match="checksum"):
                    reader.read(i, out, verify=False)
            else:
                reader.read(i, out, verify=False)
    finally:
        path.write_bytes(data)


@pytest.mark.parametrize("codec", CODECS)
def test_shards_of_zarr_python_in_its_own_order(tmp_path: Path, codec: str) -> None:
    """Its chunks come in Morton order, so those of a sample do not lie together."""
    geometry = SegmentGeometry(positions=512, taps=3, hidden=8, codec_name=codec)
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "zarr.json").write_text(json.dumps(geometry.array_json()))
    planes = np.random.default_rng(0).normal(size=(3, 512, 8)).astype(np.float32).view(np.uint32) >> 16
    rows = geometry.codec.encode(planes.astype(np.uint16))  # [3, 512, row_bytes]
    array: Any = zarr.open_array(tmp_path / "hidden", mode="r+")
    array[:512] = np.ascontiguousarray(rows.transpose(1, 0, 2)).view(array.dtype)
    reader = SegmentReader(tmp_path / "hidden" / "c.0.0.0", geometry)
    assert (np.diff(reader.index[..., 0].reshape(-1).astype(np.int64)) < 0).any()
    out = np.zeros((2, 300, geometry.row_bytes), np.uint8)
    reader.read_rows(64, 300, out, taps=[2, 0], start=7)
    reader.close()
    assert np.array_equal(out, rows[[2, 0], 71:371])


def one_chunk(path: Path, body: bytes, geometry: SegmentGeometry) -> SegmentReader:
    """A segment of one chunk with these stored bytes, every checksum right."""
    stored = body + struct.pack("<I", google_crc32c.value(body))
    index = struct.pack("<QQ", 0, len(stored)) + struct.pack("<QQ", ABSENT, ABSENT) * (geometry.num_chunks - 1)
    path.write_bytes(stored + index + struct.pack("<I", google_crc32c.value(index)))
    return SegmentReader(path, geometry)


def test_a_sound_chunk_that_does_not_unpack_is_named(tmp_path: Path) -> None:
    """What a faulty writer would leave: no crash, no half-filled plane."""
    geometry = SegmentGeometry(positions=128, taps=1, hidden=8, codec_name="zstd")
    writer = SegmentWriter(tmp_path / "whole", geometry)
    writer.append(0, np.random.default_rng(0).integers(0, 99, size=(1, 64, 8), dtype=np.uint16))
    writer.finish()
    whole = SegmentReader(tmp_path / "whole", geometry)
    size = int(whole.index[0, 0, 1]) - 4
    whole.close()
    body = (tmp_path / "whole").read_bytes()[:size]
    zstd = body.index(b"\x28\xb5\x2f\xfd")
    cases = {
        "length": [struct.pack_into, 4, 512],
        "packed": [struct.pack_into, 12, size + 4],
        "zstd": [struct.pack_into, zstd, 0],
    }
    for name, (pack, place, value) in cases.items():
        changed = bytearray(body)
        pack("<I", changed, place, value)
        reader = one_chunk(tmp_path / name, bytes(changed), geometry)
        with pytest.raises(SegmentDamage, match="unpack") as caught:
            reader.read(0, 64, np.empty((1, 64, 8), np.uint16))
        assert (caught.value.position, caught.value.tap) == (0, 0)
        reader.close()
    reader = one_chunk(tmp_path / "short", b"\0" * 10, geometry)
    with pytest.raises(SegmentDamage, match="wrong length"):
        reader.read(0, 64, np.empty((1, 64, 8), np.uint16))
    reader.close()


def test_a_row_with_a_channel_that_is_not_there_is_named(tmp_path: Path) -> None:
    geometry = SegmentGeometry(positions=64, taps=1, hidden=8, codec_name="int8:2")
    rows = np.zeros((64, geometry.row_bytes), np.uint8)
    rows[7, 10:12] = 8, 0  # channel 8 of 0..7
    reader = one_chunk(tmp_path / "a", rows.tobytes(), geometry)
    with pytest.raises(SegmentDamage, match="channel"):
        reader.read(0, 64, np.empty((1, 64, 8), np.uint16))
    reader.close()


@pytest.mark.parametrize("codec", ["raw", "zstd", "int8:16"])
def test_memory_does_not_grow_with_the_sample(tmp_path: Path, codec: str) -> None:
    geometry = SegmentGeometry(positions=2048, taps=2, hidden=5120, codec_name=codec)
    writer = SegmentWriter(tmp_path / "a", geometry)
    writer.append(0, np.zeros((2, 2000, geometry.row_bytes), np.uint8), encoded=True)
    writer.finish()
    out = np.empty((2, 1990, 5120), np.uint16)  # 41 MB
    reader = SegmentReader(tmp_path / "a", geometry)
    tracemalloc.start()
    try:
        reader.read(0, 1990, out, start=3)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        reader.close()
    assert (out == 0).all()
    assert peak < 12 << 20


def test_only_a_compressed_store_needs_numcodecs(store: Store, python_environment: dict[str, str]) -> None:
    code = (
        "import sys; import numpy as np; from pathlib import Path; "
        "from dflash_offline.store.reader import StoreReader; "
        "r = StoreReader(Path(sys.argv[1])); r.read(0, np.empty((3, r.samples.n[0], 8), np.uint16)); "
        "print('numcodecs' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(store[0])], env=python_environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(store[1].codec == "zstd")
