"""Mistakes in sweep.toml that would train something else than was meant, or never end."""

import pytest
from dflash_offline import UserError
from dflash_offline.settings import resolve
from dflash_offline.train.sweep.choices import runs_of
from dflash_offline.train.sweep.config import SweepConfig


def refused(text, told, tmp_path):
    (tmp_path / "sweep.toml").write_text(text)
    with pytest.raises(UserError) as caught:
        runs_of(resolve(SweepConfig, name="sweep", file=tmp_path / "sweep.toml"))
    assert told in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    "text, told",
    [
        ('[sweep.fields]\n"drafter.taps" = [0, 2, 3]\n', "drafter.taps has the value 0, and each value is a list"),
        ("[sweep.halving]\nkeep = 0.3\n[sweep.fields]\nseed = [1, 2]\n", "halving.keep = 0.3"),
        (f"[sweep]\nstrategy = 'random'\n[sweep.fields]\nseed = {{ low = 0, high = {'9' * 400} }}\n", "no two rising"),
    ],
    ids=["flat taps", "keep without steps", "a number beyond all"],
)
def test_a_mistake_is_refused_by_name(tmp_path, text, told):
    refused(text, told, tmp_path)


def test_more_combinations_than_a_sweep_can_have_are_refused_at_once(tmp_path):
    values = list(range(60))
    text = "[sweep.fields]\n" + "".join(f'"optim.{name}" = {values}\n' for name in ("lr", "clip", "beta1", "beta2"))
    refused(text, "12,960,000 combinations, and a sweep has at most 100,000 runs", tmp_path)
