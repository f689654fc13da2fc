"""What the user types, what the machine has, and how shards meet devices."""

import pytest
from dflash_offline import UserError
from dflash_offline.extract.devices import choose_devices, choose_workers, own_shards, single_devices


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
