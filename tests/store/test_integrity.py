"""A whole store under the magnifying glass: sound, and with every kind of fault."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from dflash_offline.store.codecs import get_codec
from dflash_offline.store.frozen import write_frozen
from dflash_offline.store.geometry import ABSENT, array_geometries
from dflash_offline.store.index import commit_path, write_consolidated
from dflash_offline.store.integrity import verify
from dflash_offline.store.manifest import read_manifest
from dflash_offline.store.samples import SampleTable
from dflash_offline.store.segment_reader import SegmentReader
from dflash_offline.store.summary import verify_text
from dflash_offline.store.values import odd_rows, odd_states
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, small: ModuleType) -> Path:
    store_dir, manifest, _ = small.make_store(tmp_path_factory.mktemp("sound"), 12, status={102: 1, 107: 2})
    write_frozen(store_dir, {"embedding": torch.randn(9, 8), "norm": torch.ones(8)}, manifest.target)
    assert write_consolidated(store_dir, manifest.identity_sha256, manifest.num_segments)
    return store_dir


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "copy"))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.write_bytes(data)


def test_a_sound_store_has_no_faults(sound: Path) -> None:
    for workers in (1, 3):
        report = verify(sound, workers=workers)
        assert report.faults == []
        assert report.checked == 12
        assert report.segments == report.num_segments > 1
        files = [path for array in ("hidden", "last") for path in (sound / array).glob("c.*")]
        assert report.bytes == sum(path.stat().st_size for path in files)


def test_an_unfinished_store_is_sound_as_far_as_it_goes(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, _ = small.make_store(tmp_path, 12, fill=False)
    small.fill_segment(small.StoreWriter(store_dir, manifest), 1)
    report = verify(store_dir)
    assert report.faults == []
    assert (report.segments, report.num_segments) == (1, manifest.num_segments)
    assert report.uncommitted == [0, *range(2, manifest.num_segments)]
    assert "not committed: segments 0,2" in verify_text(report)


def flip_middle(name: str) -> Callable[[Path], None]:
    return lambda store: flip(store / name, (store / name).stat().st_size // 2)


def swap_commits(store: Path) -> None:
    first, second = commit_path(store, 0), commit_path(store, 1)
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)


def flip_tokens(store: Path) -> None:
    needle = SampleTable(store / "plan").tokens(3)[0].tobytes()
    path = store / "plan/tokens-00000.arrow"
    flip(path, path.read_bytes().index(needle) + 1)


def other_target(store: Path) -> None:
    shutil.rmtree(store / "frozen")
    target = read_manifest(store).target | {"weights_sha256": "cd" * 32}
    write_frozen(store, {"embedding": torch.randn(9, 8), "norm": torch.ones(8)}, target)


DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "states": (
        lambda store: flip(store / "hidden/c.0.0.0", 40),
        ["c.0.0.0", "segment 0", "sample", "tap 1", "checksum"],
    ),
    "last states": (lambda store: flip(store / "last/c.1.0.0", 40), ["last/c.1.0.0", "tap last", "checksum"]),
    "index": (lambda store: flip(store / "hidden/c.1.0.0", -20), ["hidden/c.1.0.0", "index"]),
    "cut": (lambda store: (store / "hidden/c.1.0.0").write_bytes(b"short"), ["hidden/c.1.0.0", "5 bytes"]),
    "missing": (lambda store: (store / "hidden/c.1.0.0").unlink(), ["hidden/c.1.0.0", "missing"]),
    "commit": (flip_middle("commits/00000001.arrow"), ["00000001.arrow", "checksum"]),
    "swapped": (swap_commits, ["00000000.arrow", "segment 1"]),
    "plan": (flip_middle("plan/index.arrow"), ["plan/index.arrow", "checksum"]),
    "consolidated": (flip_middle("index.arrow"), ["index.arrow", "checksum"]),
    "tokens": (flip_tokens, ["tokens-00000.arrow", "row 3"]),
    "tokens gone": (lambda store: (store / "plan/tokens-00001.arrow").unlink(), ["tokens-00001.arrow"]),
    "frozen": (lambda store: flip(store / "frozen/frozen.safetensors", -5), ["frozen.safetensors", "checksum"]),
    "frozen of another target": (other_target, ["frozen/config.json", "weights_sha256", "manifest"]),
    "measured error": (lambda store: (store / "state_errors.json").write_text('{"worst": 0}'), ["state_errors.json"]),
    "frozen gone": (lambda store: shutil.rmtree(store / "frozen"), ["frozen/config.json", "not exist"]),
    "array": (lambda store: flip(store / "hidden/zarr.json", 30), ["hidden/zarr.json"]),
    "manifest": (lambda store: (store / "zarr.json").unlink(), ["no store"]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_each_fault_is_named_once(copy: Path, name: str) -> None:
    damage, words = DAMAGES[name]
    damage(copy)
    faults = [str(fault) for fault in verify(copy).faults]
    assert any(all(word in fault for word in words) for fault in faults), faults
    assert len(faults) <= 4, faults


def test_every_fault_is_named_not_only_the_first(copy: Path) -> None:
    for number in (0, 1):
        flip(copy / f"hidden/c.{number}.0.0", 40)
    flip(copy / "commits/00000002.arrow", 300)
    faults = [str(fault) for fault in verify(copy).faults]
    assert [name for name in ("c.0.0.0", "c.1.0.0", "00000002.arrow") if any(name in fault for fault in faults)] == [
        "c.0.0.0",
        "c.1.0.0",
        "00000002.arrow",
    ]


@pytest.mark.parametrize("codec", ["raw", "zstd", "int8:3"])
def test_a_damaged_chunk_hides_no_other_of_its_segment(tmp_path: Path, small: ModuleType, codec: str) -> None:
    """One bit in every third chunk of a segment: each is named by sample, tap and position, and nothing else is."""
    store_dir, manifest, plan = small.make_store(tmp_path, 12, codec=codec)
    path, geometry = store_dir / "hidden/c.1.0.0", array_geometries(manifest)["hidden"]
    reader = SegmentReader(path, geometry)
    places = [tuple(place) for place in np.argwhere(reader.index[..., 0] != ABSENT).tolist()][::3]
    reader.close()
    for place in places:
        offset, size = reader.index[place].tolist()
        flip(path, offset + size // 2)
    here = {name: plan[name].to_numpy()[plan["segment"].to_numpy() == 1] for name in ("sample_id", "position", "n")}
    expected = set()
    for chunk, tap in places:
        row = int(np.searchsorted(here["position"], chunk * 64, side="right")) - 1
        expected.add((int(here["sample_id"][row]), small.TAPS[tap], chunk * 64 - int(here["position"][row])))
    found = set()
    for fault in verify(store_dir).faults:
        where = r"c\.1\.0\.0: segment 1, sample (\d+), tap (\d+): .*checksum, from its positions ([\d, ]+)$"
        match = re.search(where, str(fault))
        if match:
            found |= {(int(match[1]), int(match[2]), int(position)) for position in match[3].split(", ")}
    assert len(expected) > 4
    assert found == expected


def test_without_its_plan_the_states_are_checked_all_the_same(copy: Path) -> None:
    flip_middle("plan/index.arrow")(copy)
    flip(copy / "hidden/c.1.0.0", 40)
    text = verify_text(verify(copy))
    assert "plan/index.arrow" in text
    assert "c.1.0.0: segment 1, sample" in text


def test_statuses_that_are_not_true(tmp_path: Path, small: ModuleType) -> None:
    """A sample of NaN committed as ok, and a finite one committed as non-finite."""
    store_dir, manifest, _ = small.make_store(tmp_path, 4, fill=False)
    sink = small.StoreWriter(store_dir, manifest).open(0)
    for sample_id, position, n in zip(*(sink.plan[name].tolist() for name in ("sample_id", "position", "n"))):
        planes, last = small.states(sample_id, n), small.states(sample_id + 9, n, 1)[0]
        if sample_id == 100:
            planes[2, 7, 3] = 0xFF80
        sink.append(sample_id, position, planes, last, status=int(sample_id == 101))
    sink.commit({})
    faults = "\n".join(map(str, verify(store_dir).faults))
    assert "sample 100, tap 17: 1 states are non-finite, at its positions 7" in faults
    assert "sample 101: committed as non-finite, but every value is finite" in faults
    assert faults.count("segment 0") == 2


def looks_of(bits: np.ndarray) -> dict[str, Any]:
    """The slow reference of `odd_states`: float by float."""
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    is_zero = (values == 0).all(axis=-1)
    return {
        "non-finite": ~np.isfinite(values).all(axis=-1),
        "zero": is_zero,
        "constant": (bits == bits[..., :1]).all(axis=-1) & ~is_zero & (bits.shape[-1] > 1),
    }


VALUES = [0, 0x8000, 1, 0x8001, 0x3F80, 0xBF80, 0x7F7F, 0x7F80, 0xFF7F, 0xFF80, 0x7FC0, 0xFFFF]


@given(st.data(), st.integers(1, 4), st.integers(1, 6))
def test_odd_states_are_those_of_the_slow_way(data: st.DataObject, width: int, count: int) -> None:
    drawn = data.draw(st.lists(st.sampled_from(VALUES), min_size=width * count, max_size=width * count))
    bits = np.array(drawn, dtype=np.uint16).reshape(count, width)
    for look, found in odd_states(bits).items():
        assert np.array_equal(found, looks_of(bits)[look]), look


def test_odd_packed_rows_are_those_of_the_states(small: ModuleType) -> None:
    codec = get_codec("int8:2")
    bits = small.states(3, 12)
    bits[0, 1] = 0
    bits[0, 2, ::2] = 0x8000
    bits[0, 2, 1::2] = 0
    bits[1, 3] = 0x3F80
    bits[1, 4, 5] = 0x7FC0
    bits[1, 5] = 0xFF80
    bits[2, 6] = 0x3F80
    bits[2, 6, 0] = 0x4000  # no constant: one value is another
    rows = codec.encode(bits)
    assert {look: np.argwhere(found).tolist() for look, found in odd_rows(rows, codec, 8).items()} == {
        "non-finite": [[1, 4], [1, 5]],
        "zero": [[0, 1], [0, 2]],
        "constant": [[1, 3]],
    }


@pytest.mark.parametrize(
    "place, value",
    [
        (slice(8, 10), [0, 0]),  # scale 0
        (slice(8, 10), [0x80, 0x7F]),  # infinite
        (slice(8, 10), [0x80, 0xBF]),  # negative
        (slice(8, 10), [0xC0, 0x7F]),  # NaN, though the exact values are finite
        (slice(10, 14), [5, 0, 2, 0]),  # channels that descend
        (slice(10, 14), [5, 0, 5, 0]),  # twice the same
        (slice(12, 14), [8, 0]),  # outside
        (3, 0x80),  # code -128
    ],
)
def test_malformed_packed_rows(small: ModuleType, place: int | slice, value: object) -> None:
    codec = get_codec("int8:2")
    rows = codec.encode(small.states(3, 4))
    assert odd_rows(rows, codec, 8) == {}
    rows[1, 2, place] = value
    assert [(look, np.argwhere(found).tolist()) for look, found in odd_rows(rows, codec, 8).items()] == [
        ("malformed", [[1, 2]])
    ]
