"""A whole store under the magnifying glass: sound, and with every kind of fault."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from dflash_offline.store.frozen import write_frozen
from dflash_offline.store.index import commit_path, write_consolidated
from dflash_offline.store.integrity import value_faults, verify


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, small: ModuleType) -> Path:
    store_dir, manifest, _ = small.make_store(tmp_path_factory.mktemp("sound"), 12, status={102: 1, 107: 2})
    write_frozen(store_dir, {"embedding": torch.randn(9, 8), "norm": torch.ones(8)}, {"name": "tiny"})
    assert write_consolidated(store_dir, manifest.plan_sha256, manifest.num_segments)
    return store_dir


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "copy"))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.write_bytes(data)


def test_a_sound_store_has_no_faults(sound: Path) -> None:
    seen: list[int] = []
    report = verify(sound, seen.append)
    assert report.faults == []
    assert report.checked == 12
    assert report.segments == report.num_segments > 1
    assert sum(seen) == report.bytes > 0


def test_an_unfinished_store_is_sound_as_far_as_it_goes(tmp_path: Path, small: ModuleType) -> None:
    store_dir, manifest, _ = small.make_store(tmp_path, 12, fill=False)
    write_frozen(store_dir, {"embedding": torch.randn(9, 8), "norm": torch.ones(8)}, {"name": "tiny"})
    small.fill_segment(small.StoreWriter(store_dir, manifest), 1)
    report = verify(store_dir)
    assert report.faults == []
    assert (report.segments, report.num_segments) == (1, manifest.num_segments)


def flip_middle(name: str) -> Callable[[Path], None]:
    return lambda store: flip(store / name, (store / name).stat().st_size // 2)


def swap_commits(store: Path) -> None:
    first, second = commit_path(store, 0), commit_path(store, 1)
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)


def flip_tokens(store: Path) -> None:
    from dflash_offline.store.samples import SampleTable

    needle = SampleTable(store / "plan").tokens(3)[0].tobytes()
    path = store / "plan/tokens-00000.arrow"
    flip(path, path.read_bytes().index(needle) + 1)


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
    "frozen gone": (lambda store: shutil.rmtree(store / "frozen"), ["frozen/config.json", "not exist"]),
    "array": (lambda store: flip(store / "hidden/zarr.json", 30), ["hidden/zarr.json"]),
    "manifest": (lambda store: (store / "zarr.json").unlink(), ["no store"]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_each_fault_is_named_once(copy: Path, name: str) -> None:
    damage, words = DAMAGES[name]
    damage(copy)
    faults = verify(copy).faults
    assert any(all(word in fault for word in words) for fault in faults), faults
    assert len(faults) <= 4, faults


def test_every_fault_is_named_not_only_the_first(copy: Path) -> None:
    for number in (0, 1):
        flip(copy / f"hidden/c.{number}.0.0", 40)
    flip(copy / "commits/00000002.arrow", 300)
    faults = verify(copy).faults
    assert [name for name in ("c.0.0.0", "c.1.0.0", "00000002.arrow") if any(name in fault for fault in faults)] == [
        "c.0.0.0",
        "c.1.0.0",
        "00000002.arrow",
    ]


def test_states_no_target_puts_out_are_seen(small: ModuleType) -> None:
    names = ["1", "9", "17"]
    good = small.states(1, 10)
    assert value_faults(good, names) == []
    for position, value, word in ((3, 0x0000, "zero"), (3, 0x8000, "zero"), (4, 0x3F80, "constant")):
        planes = good.copy()
        planes[1, position] = value
        assert any(word in fault and f"tap 9, position {position}" in fault for fault in value_faults(planes, names))
    for value in (0x7FC0, 0x7F80, 0xFF80):
        planes = good.copy()
        planes[2, 5, 1] = value
        assert value_faults(planes, names) == ["1 states are non-finite, first tap 17, position 5"]
    planes = good.copy()
    planes[2] = planes[0]
    assert value_faults(planes, names) == ["taps 1 and 17 are identical"]
    assert value_faults(np.full((1, 2, 1), 0x3F80, dtype=np.uint16), ["1"]) == []
