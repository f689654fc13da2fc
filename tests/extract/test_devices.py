"""What the user types, what the machine has, and how shards meet devices."""

import pytest
from dflash_offline import UserError
from dflash_offline.extract.devices import choose_devices, choose_workers


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
