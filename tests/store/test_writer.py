"""Making a store, filling it, being killed at it, and refusing to become another one."""

import json
import os
import shutil
import struct
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import google_crc32c
import numcodecs
import numpy as np
import pytest
import zarr
from dflash_offline import UserError
from dflash_offline.store import bfloat16
from dflash_offline.store.codecs import get_codec
from dflash_offline.store.create import require_own_folder
from dflash_offline.store.files import FolderLock
from dflash_offline.store.geometry import ABSENT, SegmentGeometry
from dflash_offline.store.index import commit_path, write_consolidated
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.segment_writer import SegmentWriter
from dflash_offline.store.writer import StoreWriter, create_store


def test_creating_twice_changes_nothing(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, plan = small.make_store(tmp_path, 6)
    before = {path: path.stat().st_mtime_ns for path in store_dir.rglob("*") if path.is_file()}
    create_store(store_dir, manifest, plan, tmp_path / "data")
    after = {path: path.stat().st_mtime_ns for path in store_dir.rglob("*") if path.is_file()}
    assert {p: t for p, t in before.items() if "lock" not in p.name} == {
        p: t for p, t in after.items() if "lock" not in p.name
    }


def test_tokens_are_linked_and_survive_the_data_folder(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, plan = small.make_store(tmp_path, 10)
    assert os.path.samefile(tmp_path / "data/tokens-00000.arrow", store_dir / "plan/tokens-00000.arrow")
    shutil.rmtree(tmp_path / "data")
    create_store(store_dir, manifest, plan, tmp_path / "data")
    with StoreReader(store_dir) as reader:
        ids, mask = reader.tokens(3)
        assert len(ids) == len(mask) == reader.samples.n[3] + 1


def test_a_missing_token_file_is_named(tmp_path: Path, small: ModuleType) -> None:
    plan = small.make_plan(small.make_samples(tmp_path / "data", 10))
    (tmp_path / "data/tokens-00001.arrow").unlink()
    with pytest.raises(UserError, match=r"tokens-00001\.arrow"):
        create_store(tmp_path / "store", small.make_manifest(plan), plan, tmp_path / "data")


@pytest.mark.parametrize("is_filled", [True, False])
def test_another_identity_is_refused_and_nothing_touched(tmp_path: Path, small: ModuleType, is_filled: bool) -> None:
    store_dir, manifest, plan = small.make_store(tmp_path, 6, fill=is_filled)
    before = small.tree(store_dir)
    for name, other in {
        "tap_layers": replace(manifest, tap_layers=(1, 9, 18)),
        "target.revision": replace(manifest, target={**manifest.target, "revision": "main"}),
        "has_last": replace(manifest, has_last=False),
    }.items():
        with pytest.raises(UserError, match=f"{name} = .* there, .* now"):
            create_store(store_dir, other, plan, tmp_path / "data")
        with pytest.raises(UserError, match=f"{name} = .* there, .* now"):
            StoreWriter(store_dir, other)
    assert small.tree(store_dir) == before


def test_a_foreign_folder_is_refused(tmp_path: Path, small: ModuleType) -> None:
    plan = small.make_plan(small.make_samples(tmp_path / "data", 3))
    manifest = small.make_manifest(plan)
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter.txt").touch()
    with pytest.raises(UserError, match=r"letter\.txt"):
        create_store(tmp_path / "home", manifest, plan, tmp_path / "data")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for place in (tmp_path / "link", tmp_path / "link" / "inside"):
        with pytest.raises(UserError, match=f"link' is a link to '{tmp_path}/nothing', where nothing is"):
            small.create_store(place, manifest, plan, tmp_path / "data")
    with pytest.raises(UserError, match="is a file"):
        create_store(tmp_path / "home/letter.txt", manifest, plan, tmp_path / "data")
    assert os.listdir(tmp_path / "home") == ["letter.txt"]
    with FolderLock(tmp_path):  # a lock file of the caller is no foreign file
        (tmp_path / "fresh").mkdir()
        (tmp_path / "fresh/.lock").touch()
        create_store(tmp_path / "fresh", manifest, plan, tmp_path / "data")


def test_a_store_that_another_process_lays_out_meanwhile_is_not_foreign(
    tmp_path: Path, small: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two launchers started together: the folder becomes a store while the second one looks at it."""
    plan = small.make_plan(small.make_samples(tmp_path / "data", 3))
    (tmp_path / "store").mkdir()

    def listdir(folder: Path) -> list[str]:
        monkeypatch.undo()
        create_store(tmp_path / "store", small.make_manifest(plan), plan, tmp_path / "data")
        return os.listdir(folder)

    monkeypatch.setattr(os, "listdir", listdir)
    require_own_folder(tmp_path / "store")


def test_a_manifest_that_contradicts_its_plan_is_refused(tmp_path: Path, small: ModuleType) -> None:
    plan = small.make_plan(small.make_samples(tmp_path / "data", 3))
    manifest = small.make_manifest(plan)
    for change in ({"num_samples": 4}, {"num_positions": 1}, {"plan_sha256": "00"}):
        with pytest.raises(ValueError, match=next(iter(change))):
            create_store(tmp_path / "store", replace(manifest, **change), plan, tmp_path / "data")
    assert not (tmp_path / "store").exists()


def test_misuse_of_a_segment_is_refused(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, _ = small.make_store(tmp_path, 6, fill=False)
    writer = StoreWriter(store_dir, manifest)
    with pytest.raises(ValueError, match="outside"):
        writer.open(manifest.num_segments)
    sink = writer.open(0)
    sample_id, position, n = (int(sink.plan[name][0]) for name in ("sample_id", "position", "n"))
    planes, last = small.states(sample_id, n), small.states(1, n, 1)[0]
    for arguments, status in (
        ((sample_id + 1, position, planes, last), 0),  # another sample's place
        ((sample_id, position + 64, planes, last), 0),
        ((sample_id, position, planes[:, :-1].copy(), last[:-1]), 0),
        ((sample_id, position, planes, None), 0),
        ((sample_id, position, None, None), 0),
        ((sample_id, position, planes, last), 2),
        ((sample_id, position, planes, last), 3),
    ):
        with pytest.raises(ValueError, match="sample"):
            sink.append(*arguments, status=status)
    sink.append(sample_id, position, planes, last)
    with pytest.raises(ValueError, match="not awaited"):
        sink.append(sample_id, position, planes, last)
    with pytest.raises(ValueError, match="missing"):
        sink.commit({})
    sink.abort()
    assert not list(store_dir.rglob("*.tmp.*"))
    assert writer.committed() == set()


def test_a_segment_written_again_replaces_the_consolidated_index(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, _ = small.make_store(tmp_path, 10)
    assert write_consolidated(store_dir, manifest.identity_sha256, manifest.num_segments)
    commit_path(store_dir, 1).unlink()
    writer = StoreWriter(store_dir, manifest)
    assert writer.committed() == set(range(manifest.num_segments)) - {1}
    small.fill_segment(writer, 1)
    assert not (store_dir / "index.arrow").exists()
    assert writer.committed() == set(range(manifest.num_segments))


def test_a_commit_without_its_segment_file_is_named(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, _ = small.make_store(tmp_path, 10)
    path = store_dir / "last/c.1.0.0"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(UserError, match=r"00000001\.arrow.*c\.1\.0\.0 has"):
        StoreWriter(store_dir, manifest).committed()
    path.unlink()
    with pytest.raises(UserError, match=r"00000001\.arrow.*c\.1\.0\.0 is missing"):
        StoreWriter(store_dir, manifest).committed()


CODECS = ("raw", "zstd", "int8:2")
SAMPLES = {0: 64, 64: 1, 192: 200, 512: 65}  # position -> n; chunks 2, 7 and from 10 on stay empty


def planes_of(position: int, n: int, taps: int, hidden: int) -> np.ndarray:
    """Bits of finite bfloat16 values [taps, n, hidden]."""
    values = np.random.default_rng(position).normal(size=(taps, n, hidden)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def padded_rows(codec_name: str, planes: np.ndarray) -> np.ndarray:
    """Rows [taps, m, row_bytes] u8 as a store of the codec shows them, m the positions in whole chunks."""
    codec = get_codec(codec_name)
    rows = codec.encode(planes)
    padding = np.full((planes.shape[2]), 0x7FC0, "<u2").view(np.uint8) if codec.is_lossless else np.uint8(0)
    whole = np.empty((len(rows), -(-rows.shape[1] // 64) * 64, rows.shape[2]), np.uint8)
    whole[:] = padding
    whole[:, : rows.shape[1]] = rows
    return whole


def stored_chunk(data: bytes, index: np.ndarray, number: int, tap: int, codec_name: str) -> tuple[bytes, bytes]:
    """One chunk from the bytes of a segment, by the letter of the Zarr specifications, and its checksum."""
    offset, size = (int(value) for value in index[number, tap])
    body, crc = data[offset : offset + size - 4], data[offset + size - 4 : offset + size]
    assert struct.pack("<I", google_crc32c.value(body)) == crc
    return (numcodecs.Blosc().decode(body) if codec_name == "zstd" else body), crc


@pytest.mark.parametrize("hidden", [40, 4096])  # a chunk of less than one block of blosc, and of two
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_is_stored_as_its_specification_says(tmp_path: Path, codec: str, hidden: int) -> None:
    geometry = SegmentGeometry(positions=1024, taps=2, hidden=hidden, codec_name=codec)
    writers = {name: SegmentWriter(tmp_path / f"{name}.0.0.0", geometry) for name in ("c", "encoded")}
    crcs = {}
    for position, n in reversed(SAMPLES.items()):
        planes = planes_of(position, n, 2, hidden)
        crcs[position] = writers["c"].append(position, planes)
        assert writers["encoded"].append(position, geometry.codec.encode(planes), encoded=True) == crcs[position]
    sizes = {writer.finish() for writer in writers.values()}
    data = (tmp_path / "c.0.0.0").read_bytes()
    assert data == (tmp_path / "encoded.0.0.0").read_bytes()
    assert sizes == {len(data)}
    index = np.frombuffer(data[-geometry.index_bytes : -4], "<u8").reshape(16, 2, 2)
    assert struct.pack("<I", google_crc32c.value(data[-geometry.index_bytes : -4])) == data[-4:]
    spans = sorted((offset, offset + size) for offset, size in index.reshape(-1, 2).tolist() if size != ABSENT)
    assert [0, *(end for _, end in spans)] == [*(begin for begin, _ in spans), len(data) - geometry.index_bytes]
    for position, n in SAMPLES.items():
        rows, stored = padded_rows(codec, planes_of(position, n, 2, hidden)), []
        for number in range(rows.shape[1] // 64):
            for tap in range(2):
                chunk, crc = stored_chunk(data, index, position // 64 + number, tap, codec)
                assert chunk == rows[tap, 64 * number : 64 * number + 64].tobytes()
                stored.append(crc)
        assert google_crc32c.value(b"".join(stored)) == crcs[position]


@pytest.mark.parametrize("codec", CODECS)
def test_zarr_python_reads_every_codec(tmp_path: Path, codec: str) -> None:
    """Tail chunks, missing chunks and a missing segment included."""
    bfloat16.register()
    geometry = SegmentGeometry(positions=1024, taps=2, hidden=40, codec_name=codec)
    items = geometry.codec.row_items(40)
    empty = np.uint16(0x7FC0) if geometry.codec.is_lossless else np.uint8(0)
    expected = np.full((3 * 1024, 2, items), empty)
    for segment in (0, 2):
        writer = SegmentWriter(tmp_path / f"c.{segment}.0.0", geometry)
        for position, n in SAMPLES.items():
            planes = planes_of(position + segment, n, 2, 40)
            writer.append(position, planes)
            rows = padded_rows(codec, planes).view(expected.dtype)
            first = segment * 1024 + position
            expected[first : first + rows.shape[1]] = rows.transpose(1, 0, 2)
        writer.finish()
    (tmp_path / "zarr.json").write_text(json.dumps(geometry.array_json()))
    array: Any = zarr.open_array(tmp_path, mode="r")
    assert np.array_equal(np.asarray(array[: len(expected)]).view(expected.dtype), expected)
    assert (expected != empty).any(axis=(1, 2)).sum() == 2 * sum(SAMPLES.values())


@pytest.mark.parametrize("codec", CODECS)
def test_encoded_samples_make_the_same_store(tmp_path: Path, small: ModuleType, codec: str) -> None:
    store_dir, manifest, _ = small.make_store(tmp_path, 8, codec=codec)
    expected = small.tree(store_dir)
    encode = get_codec(codec).encode
    writer = StoreWriter(store_dir, manifest)
    sink = writer.open(0)
    rows = list(zip(*(sink.plan[name].tolist() for name in ("sample_id", "position", "n"))))
    for number, (sample_id, position, n) in enumerate(reversed(rows)):
        planes, last = small.states(sample_id, n), small.states(sample_id + 10**6, n, 1)[0]
        if number == 0:
            for wrong in (planes, encode(planes)[:, :, 1:].copy(), encode(planes)[:-1], encode(planes)[:, ::-1]):
                with pytest.raises(ValueError):
                    sink.append(sample_id, position, wrong, encode(last), encoded=True)
        sink.append(sample_id, position, encode(planes), encode(last), encoded=True)
    sink.commit({"host": "somewhere"})
    assert small.tree(store_dir) == expected


def test_compressing_uses_one_thread(tmp_path: Path) -> None:
    geometry = SegmentGeometry(positions=64, taps=1, hidden=4096, codec_name="zstd")
    before = set(threading.enumerate()), set(os.listdir("/proc/self/task"))
    writer = SegmentWriter(tmp_path / "a", geometry)
    writer.append(0, planes_of(0, 64, 1, 4096))
    assert set(threading.enumerate()) <= before[0]  # one of another test may end meanwhile
    assert set(os.listdir("/proc/self/task")) <= before[1]
    writer.abort()
