"""One segment file against a reader that is slow and obvious."""

import struct
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from dflash_offline.store.geometry import ABSENT, SegmentGeometry
from dflash_offline.store.segment_reader import SegmentDamage, SegmentReader
from dflash_offline.store.segment_writer import SegmentWriter
from hypothesis import given, settings
from hypothesis import strategies as st

GEOMETRY = SegmentGeometry(positions=1024, taps=3, hidden=4)
SAMPLES = {0: 64, 64: 1, 192: 200, 512: 65}  # position -> n; chunks 2, 7 and from 10 on stay empty


def states(n: int, seed: int, taps: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**15, size=(taps, n, 4), dtype=np.uint16)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("segment") / "c.0.0.0"
    writer = SegmentWriter(path, GEOMETRY)
    for position, n in SAMPLES.items():
        writer.append(position, states(n, position))
    assert writer.finish() == path.stat().st_size
    return path


def slow_read(data: bytes, chunk: int, tap: int) -> np.ndarray | None:
    """One chunk [64, 4] from the bytes of a segment, by the letter of the Zarr sharding spec."""
    index = data[-(16 * 3 * 16 + 4) :]
    assert google_crc32c.value(index[:-4]) == struct.unpack("<I", index[-4:])[0]
    offset, size = struct.unpack_from("<QQ", index, (chunk * 3 + tap) * 16)
    if offset == ABSENT and size == ABSENT:
        return None
    body, crc = data[offset : offset + size - 4], data[offset + size - 4 : offset + size]
    assert google_crc32c.value(body) == struct.unpack("<I", crc)[0]
    return np.frombuffer(body, "<u2").reshape(64, 4)


def test_the_bytes_are_what_the_sharding_spec_says(path: Path) -> None:
    data = path.read_bytes()
    for chunk in range(16):
        owner = [(p, n) for p, n in SAMPLES.items() if p // 64 <= chunk < -(-(p + n) // 64)]
        for tap in range(3):
            found = slow_read(data, chunk, tap)
            if not owner:
                assert found is None
                continue
            assert found is not None
            (position, n), first = owner[0], chunk * 64 - owner[0][0]
            body = states(n, position)[tap, first : first + 64]
            assert np.array_equal(found[: len(body)], body)
            assert (found[len(body) :] == 0x7FC0).all()  # padding is NaN


def test_whole_samples_come_back(path: Path) -> None:
    reader = SegmentReader(path, GEOMETRY)
    for position, n in SAMPLES.items():
        out = np.zeros((3, n, 4), dtype=np.uint16)
        reader.read(position, n, out)
        assert np.array_equal(out, states(n, position))
    reader.close()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_slice_of_any_taps(path: Path, data: st.DataObject) -> None:
    position = data.draw(st.sampled_from(sorted(SAMPLES)))
    start = data.draw(st.integers(0, SAMPLES[position] - 1))
    stop = data.draw(st.integers(start + 1, SAMPLES[position]))
    taps = data.draw(st.permutations(range(3)))[: data.draw(st.integers(1, 3))]
    ring = np.full((len(taps), stop - start + 2, 4), 7, dtype=np.uint16)  # planes inside a larger slot
    reader = SegmentReader(path, GEOMETRY)
    reader.read(position, stop - start, ring[:, 1:-1], taps=taps, start=start)
    reader.close()
    assert np.array_equal(ring[:, 1:-1], states(SAMPLES[position], position)[taps, start:stop])
    assert (ring[:, [0, -1]] == 7).all()  # nothing beside the slice is touched


def test_the_order_of_writing_does_not_matter_to_a_reader(tmp_path: Path) -> None:
    crcs = {}
    for name, order in {"a": [0, 64, 192, 512], "b": [512, 64, 0, 192]}.items():
        writer = SegmentWriter(tmp_path / name, GEOMETRY)
        crcs[name] = {position: writer.append(position, states(SAMPLES[position], position)) for position in order}
        writer.finish()
        reader = SegmentReader(tmp_path / name, GEOMETRY)
        for position, n in SAMPLES.items():
            out = np.zeros((3, n, 4), dtype=np.uint16)
            stored = reader.read(position, n, out)
            assert np.array_equal(out, states(n, position))
            assert google_crc32c.value(stored.tobytes()) == crcs[name][position]
        reader.close()
    assert crcs["a"] == crcs["b"]


def test_more_chunks_than_one_system_call_takes(tmp_path: Path) -> None:
    geometry = SegmentGeometry(positions=64 * 512, taps=3, hidden=4)
    planes = states(64 * 512 - 5, 1)
    writer = SegmentWriter(tmp_path / "a", geometry)
    writer.append(0, planes)
    writer.finish()
    out = np.zeros_like(planes)
    reader = SegmentReader(tmp_path / "a", geometry)
    reader.read(0, planes.shape[1], out)
    reader.close()
    assert np.array_equal(out, planes)


def test_a_flipped_bit_in_any_chunk_names_position_and_tap(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    slot = 64 * 4 * 2 + 4
    changed_path = tmp_path / "c.0.0.0"
    chunks = [(position, number, n) for position, n in SAMPLES.items() for number in range(-(-n // 64))]
    for place in range(0, len(data) - GEOMETRY.index_bytes, 97):
        changed = bytearray(data)
        changed[place] ^= 1 << (place % 8)
        changed_path.write_bytes(changed)
        reader = SegmentReader(changed_path, GEOMETRY)
        position, number, n = chunks[place // (3 * slot)]
        out = np.zeros((3, n, 4), dtype=np.uint16)
        with pytest.raises(SegmentDamage, match="checksum") as caught:
            reader.read(position, n, out)
        assert caught.value.tap == place // slot % 3
        assert caught.value.position == position + 64 * number
        reader.close()


def test_a_flipped_bit_in_the_index_or_a_cut_file_is_noticed(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    changed_path = tmp_path / "c.0.0.0"
    for place in range(len(data) - GEOMETRY.index_bytes, len(data), 13):
        changed = bytearray(data)
        changed[place] ^= 1
        changed_path.write_bytes(changed)
        with pytest.raises(SegmentDamage, match="index"):
            SegmentReader(changed_path, GEOMETRY)
    for length in (0, 3, GEOMETRY.index_bytes, len(data) - 4, len(data) - 1):
        changed_path.write_bytes(data[:length])
        with pytest.raises(SegmentDamage, match="index|bytes"):
            SegmentReader(changed_path, GEOMETRY)
    changed_path.write_bytes(data[: -GEOMETRY.index_bytes - 5000] + data[-GEOMETRY.index_bytes :])
    with pytest.raises(SegmentDamage, match="its commit says"):
        SegmentReader(changed_path, GEOMETRY, file_bytes=len(data))
    reader = SegmentReader(changed_path, GEOMETRY)  # without a commit the index alone cannot tell
    with pytest.raises(SegmentDamage, match="checksum|ends inside"):
        reader.read(512, 65, np.zeros((3, 65, 4), dtype=np.uint16))
    reader.close()


def test_an_unverified_read_still_notices_a_file_that_ends(path: Path, tmp_path: Path) -> None:
    geometry = SegmentGeometry(positions=64, taps=1, hidden=4)
    index = struct.pack("<QQ", 10_000, geometry.slot_bytes)
    (tmp_path / "a").write_bytes(index + struct.pack("<I", google_crc32c.value(index)))
    reader = SegmentReader(tmp_path / "a", geometry)
    with pytest.raises(SegmentDamage, match="ends inside"):
        reader.read(0, 1, np.zeros((1, 1, 4), dtype=np.uint16), verify=False)
    reader.close()


def test_what_was_never_written_is_an_error(path: Path, tmp_path: Path) -> None:
    reader = SegmentReader(path, GEOMETRY)
    with pytest.raises(SegmentDamage, match="never written"):
        reader.read(128, 10, np.zeros((3, 10, 4), dtype=np.uint16))
    reader.close()
    with pytest.raises(SegmentDamage, match="missing"):
        SegmentReader(tmp_path / "c.9.0.0", GEOMETRY)


def test_misuse_is_refused(path: Path, tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path / "a", GEOMETRY)
    writer.append(64, states(65, 0))
    for position, planes in (
        (128, states(3, 0)),  # taken
        (32, states(3, 0)),  # not on a chunk
        (960, states(65, 0)),  # over the end
        (256, states(0, 0)),  # nothing
        (256, states(3, 0, taps=2)),
        (256, states(3, 0).astype(np.float32)),
        (256, np.asfortranarray(states(3, 0))),
    ):
        with pytest.raises(ValueError):
            writer.append(position, planes)
    writer.abort()
    assert list(tmp_path.iterdir()) == []
    reader = SegmentReader(path, GEOMETRY)
    for taps, shape in (([0, 0], (2, 3, 4)), ([3], (1, 3, 4)), (None, (2, 3, 4)), ([0], (1, 4, 4))):
        with pytest.raises(ValueError):
            reader.read(0, 3, np.zeros(shape, dtype=np.uint16), taps=taps)
    reader.close()
