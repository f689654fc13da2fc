"""Numbers of [sweep.fields] that are none, or that no float holds."""

import re

import pytest
from dflash_offline import UserError
from dflash_offline.settings import resolve
from dflash_offline.train.sweep.config import SweepConfig


def test_numbers_that_are_none_or_too_large_are_named(lab, tiny_store, tmp_path):
    text = f"fields.optim.lr = [nan, 0.1]\nfields.optim.clip = [1{'0' * 400}, 1]"
    fields = resolve(SweepConfig, name="sweep", file=lab.write_file(tmp_path, text)).fields
    with pytest.raises(UserError) as caught:
        lab.train_here(tiny_store, tmp_path / "out", fields=fields)
    assert "optim.lr = nan is no finite number" in caught.value.happened
    assert re.search(r"optim.clip = 10+\.\.\. \(401 digits\) is larger than any float", caught.value.happened)
    assert len(str(caught.value).splitlines()) == 3
