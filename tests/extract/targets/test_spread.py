"""A target on several GPUs: what transformers is told. No GPU here; that it then runs so is not tested yet."""

from types import SimpleNamespace

import pytest
from dflash_offline import UserError
from dflash_offline.extract.targets.spread import device_map, require_on_devices


def test_only_the_devices_of_the_group_are_named() -> None:
    said = device_map({"cuda:2": 100_000_000_000, "cuda:5": 40_000_000_000})
    assert said == {"device_map": "auto", "max_memory": {2: 85_000_000_000, 5: 34_000_000_000}}


def test_a_part_that_found_no_room_is_refused() -> None:
    require_on_devices(SimpleNamespace(hf_device_map={"model.layers.0": 2, "lm_head": 5}), "big")
    with pytest.raises(UserError, match=r"'big' does not fit: 'lm_head' and 1 more"):
        require_on_devices(SimpleNamespace(hf_device_map={"model.layers.9": "disk", "lm_head": "cpu"}), "big")
