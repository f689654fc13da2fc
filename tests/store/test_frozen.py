"""The target's frozen parts beside the states."""

from pathlib import Path

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.store.frozen import read_frozen, write_frozen
from safetensors import safe_open

CONFIG = {"name": "tiny", "rope": {"rope_theta": 1e6}, "eos_ids": (1, 2)}


def parts(*, tied: bool, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {
        "embedding": torch.randn(11, 6, generator=generator).to(dtype),
        "norm": torch.randn(6, generator=generator).to(dtype),
    }
    return made if tied else {**made, "head": torch.randn(11, 6, generator=generator).to(dtype)}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_parts_come_back(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    made = parts(tied=tied, dtype=dtype)
    write_frozen(tmp_path, made, CONFIG)
    frozen = read_frozen(tmp_path)
    assert torch.equal(frozen.embedding, made["embedding"])
    assert torch.equal(frozen.norm, made["norm"])
    assert torch.equal(frozen.head, made["embedding" if tied else "head"])
    assert frozen.is_tied == tied
    assert (frozen.head is frozen.embedding) == tied
    assert frozen.config == {**CONFIG, "eos_ids": [1, 2]}


def test_a_transposed_view_is_written_as_it_looks(tmp_path: Path) -> None:
    made = parts(tied=True) | {"embedding": torch.arange(66, dtype=torch.float32).reshape(6, 11).T}
    write_frozen(tmp_path, made, CONFIG)
    assert torch.equal(read_frozen(tmp_path).embedding, made["embedding"])


def test_anybody_reads_the_tensors(tmp_path: Path) -> None:
    made = parts(tied=False)
    write_frozen(tmp_path, made, CONFIG)
    with safe_open(tmp_path / "frozen/frozen.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == ["embedding", "head", "norm"]
        assert torch.equal(file.get_tensor("head"), made["head"])


def test_writing_the_same_again_changes_nothing(tmp_path: Path) -> None:
    write_frozen(tmp_path, parts(tied=True), CONFIG)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "frozen").iterdir()}
    write_frozen(tmp_path, parts(tied=True), CONFIG)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "frozen").iterdir()} == before


def test_other_parts_are_refused(tmp_path: Path) -> None:
    write_frozen(tmp_path, parts(tied=True), CONFIG)
    with pytest.raises(UserError, match="head = "):
        write_frozen(tmp_path, parts(tied=False), CONFIG)
    with pytest.raises(UserError, match="name = .*tiny.* there, .*huge.* now"):
        write_frozen(tmp_path, parts(tied=True), {**CONFIG, "name": "huge"})


def test_tensors_without_their_config_are_no_frozen_parts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"frozen/config\.json.*does not exist"):
        read_frozen(tmp_path)
    write_frozen(tmp_path, parts(tied=True), CONFIG)
    (tmp_path / "frozen/config.json").unlink()  # as after a kill between the two files
    write_frozen(tmp_path, parts(tied=True), CONFIG)
    assert torch.equal(read_frozen(tmp_path).norm, parts(tied=True)["norm"])


@pytest.mark.parametrize("name", ["frozen.safetensors", "config.json"])
def test_a_flipped_bit_is_noticed(tmp_path: Path, name: str) -> None:
    write_frozen(tmp_path, parts(tied=False), CONFIG)
    path = tmp_path / "frozen" / name
    data = path.read_bytes()
    for place in (len(data) // 2, len(data) - 3, 40):
        changed = bytearray(data)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(UserError, match=name):
            read_frozen(tmp_path)
    path.write_bytes(data[:-5])
    with pytest.raises(UserError, match=name):
        read_frozen(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"norm": torch.zeros(5)},
        {"embedding": torch.zeros(6)},
        {"head": torch.zeros(11, 5)},
        {"norm": torch.zeros(6, dtype=torch.int64)},
        {"extra": torch.zeros(6)},
    ],
)
def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path, change: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="expected"):
        write_frozen(tmp_path, parts(tied=True) | change, CONFIG)
