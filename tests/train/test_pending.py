"""Numbers that are read an update later are those of their own update."""

import math

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.train.optim import Update
from dflash_offline.train.pending import HostCopy, PendingUpdate
from dflash_offline.train.step import StepSums

CPU = torch.device("cpu")


def sums_of(*values: float) -> StepSums:
    """Of blocks of 3: loss, weight, blocks, alpha, then hits, valid slots and survivors of slots 1 and 2."""
    sums = StepSums(3, CPU)
    sums.values.copy_(torch.tensor(values, dtype=torch.float64))
    return sums


def update(number: int = 4, norm: float = 2.5) -> Update:
    return Update(number, 0.01, torch.tensor(norm, dtype=torch.float64))


def test_a_copy_does_not_see_what_comes_after_it() -> None:
    values = torch.tensor([1.0, 2.0])
    copy = HostCopy(values)
    values.zero_()
    assert copy.read() == [1.0, 2.0]


def test_the_sums_of_the_next_update_change_nothing() -> None:
    sums = sums_of(6.0, 3.0, 2.0, 0.0, 1.0, 0.0, 2.0, 1.0, 1.0, 0.0)
    expected = sums.metrics()
    pending = PendingUpdate.of(5, update(), sums, {"num_samples": 7})
    sums.zero()
    sums.values += 9.0
    numbers = pending.numbers(sums)
    assert numbers == expected | {"weight": 3.0, "lr": 0.01, "grad_norm": 2.5, "num_samples": 7}
    assert numbers["loss"] == 2.0
    assert numbers["accuracy"] == pytest.approx(1 / 3)
    assert numbers["accepted_drafts_teacher_forced"] == 0.5


@pytest.mark.parametrize(
    ("weight", "norm", "message"),
    [(0.0, 1.0, "update 4 has no label"), (3.0, math.nan, "update 4 has the norm nan"), (3.0, math.inf, "norm inf")],
)
def test_an_update_that_spoilt_the_weights_is_found(weight: float, norm: float, message: str) -> None:
    sums = sums_of(6.0, weight, 2.0, 0.0, 1.0, 0.0, 2.0, 1.0, 1.0, 0.0)
    with pytest.raises(UserError, match=message):
        PendingUpdate.of(5, update(norm=norm), sums, {}).numbers(sums)
