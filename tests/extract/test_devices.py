"""What the user types, what the machine has, and how shards meet devices."""

from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.devices import choose_devices, choose_workers, own_shards, single_devices
from dflash_offline.extract.plan import make_groups
from dflash_offline.extract.shares import own_groups


@pytest.mark.parametrize(
    "text, available, expected",
    [
        (None, 0, ("cpu",)),
        (None, 2, ("cuda:0", "cuda:1")),
        (None, 8, tuple(f"cuda:{i}" for i in range(6))),
        ("cpu", 8, ("cpu",)),
        ("0-2", 4, ("cuda:0", "cuda:1", "cuda:2")),
        ("3,0", 4, ("cuda:3", "cuda:0")),
        ("0-1, 3", 4, ("cuda:0", "cuda:1", "cuda:3")),
        ("cuda:1", 2, ("cuda:1",)),
    ],
)
def test_devices(text: str | None, available: int, expected: tuple[str, ...]) -> None:
    assert choose_devices(text, available) == expected


@pytest.mark.parametrize("text", ["", "gpu", "0-", "2-1", "0,0", "0-2,1", "-1", "4", "0-9", "1.5"])
def test_devices_that_are_no_list_or_not_there(text: str) -> None:
    with pytest.raises(UserError, match="devices"):
        choose_devices(text, 4)


def test_a_cuda_device_on_a_machine_without_any_is_refused() -> None:
    with pytest.raises(UserError, match=r"CUDA device 0[\s\S]*no CUDA device"):
        choose_devices("0", 0)


@pytest.mark.parametrize(
    "devices, shards, expected",
    [
        (("cpu",), None, ("cpu",)),
        (("cpu",), 3, ("cpu", "cpu", "cpu")),
        (("cuda:0", "cuda:1"), None, ("cuda:0", "cuda:1")),
        (("cuda:0", "cuda:1"), 1, ("cuda:0",)),
        (("cuda:0", "cuda:1"), 6, ("cuda:0", "cuda:1")),
    ],
)
def test_more_shards_than_gpus_queue(devices: tuple[str, ...], shards: int | None, expected: tuple[str, ...]) -> None:
    assert choose_workers(devices, shards) == expected


@pytest.mark.parametrize(
    "text, available, each, expected",
    [
        (None, 8, 2, ("cuda:0+cuda:1", "cuda:2+cuda:3", "cuda:4+cuda:5")),
        (None, 8, 4, ("cuda:0+cuda:1+cuda:2+cuda:3",)),
        (None, 8, 8, ("+".join(f"cuda:{i}" for i in range(8)),)),
        (None, 3, 2, ("cuda:0+cuda:1",)),
        ("4-7", 8, 2, ("cuda:4+cuda:5", "cuda:6+cuda:7")),
        ("3,0", 4, 2, ("cuda:3+cuda:0",)),
    ],
)
def test_gpus_that_hold_a_target_together(
    text: str | None, available: int, each: int, expected: tuple[str, ...]
) -> None:
    devices = choose_devices(text, available, each)
    assert devices == expected
    singles = [single for device in devices for single in single_devices(device)]
    assert len(set(singles)) == len(singles) == each * len(devices)
    assert choose_workers(devices, 1) == expected[:1]


@pytest.mark.parametrize(
    "text, available, message",
    [
        ("cpu", 8, "gpus_per_shard = 2 on a CPU"),
        (None, 0, "gpus_per_shard = 2 on a CPU"),
        (None, 1, "gpus_per_shard = 2 with 1 devices"),
        ("0-2", 8, r"gpus_per_shard = 2 with 3 devices \(cuda:0, cuda:1, cuda:2\)"),
    ],
)
def test_gpus_that_make_no_whole_groups_are_refused(text: str | None, available: int, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        choose_devices(text, available, 2)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("text, expected", [("0-5", (0, 1, 2, 3, 4, 5)), ("7,2", (2, 7)), ("0", (0,))])
def test_shards_of_this_node(text: str, expected: tuple[int, ...]) -> None:
    assert own_shards(text, 8) == expected


@pytest.mark.parametrize("text", ["", "8", "3-9", "1,1", "cpu", "2-1", "cuda:1"])
def test_shards_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="only = "):
        own_shards(text, 8)


@pytest.mark.parametrize("text", ["0-99999999999", "0-99999999999999999999", "9" * 5000, "0," * 5000 + "1"])
def test_huge_lists_are_refused_before_they_are_made(text: str) -> None:
    for refuse in (lambda: choose_devices(text, 8), lambda: choose_devices(text, 0), lambda: own_shards(text, 8)):
        with pytest.raises(UserError, match="devices = |only = ") as caught:
            refuse()
        assert len(str(caught.value).splitlines()) == 3
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "name, value",
    [
        ("shards", 100_001),
        ("shards", 10**20),
        ("window", 2**31),
        ("window", 10**20),
        ("cpu_threads", 100_000),
        ("cpu_threads", 10**11),
        ("store", ""),
        ("data", " "),
    ],
)
def test_values_that_nothing_could_be_made_of_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"{name} = "):
        ExtractConfig(**{name: value})


def test_the_most_shards_are_few_enough_to_be_listed() -> None:
    config = ExtractConfig(shards=100_000, only="0-99999", cpu_threads=1024, window=2**31 - 1)
    assert config.own_shards == tuple(range(100_000))
    assert own_groups(40, 40, 100_000, (0, 99_999)) == [range(38, 40)]
    assert own_groups(40, 40, 100_000, config.own_shards) == make_groups(40)
