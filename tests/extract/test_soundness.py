"""A target that lies is refused before the first segment."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.soundness import check_target, has_zero_state, is_finite, peaks
from dflash_offline.extract.targets.hf import HfTarget, load_target

LENGTHS = torch.tensor([40, 33, 21])
IDS = torch.randint(6, 262, (3, 40), generator=torch.Generator().manual_seed(0))
TAPS = (0, 2)


@pytest.fixture(scope="module")
def target(case_target: Any) -> HfTarget:
    return load_target(str(case_target()))


class Liar:
    """A target whose states are spoilt after they are recorded."""

    def __init__(self, target: HfTarget, spoil: Callable[[torch.Tensor], None]) -> None:
        self.target = target
        self.spoil = spoil

    def record(self, ids: torch.Tensor, lengths: torch.Tensor, tap_layers: Sequence[int], *, last: bool = False) -> Any:
        taps, final = self.target.record(ids, lengths, tap_layers, last=last)
        self.spoil(taps if final is None else torch.cat([taps, final[None]]))
        if final is not None:
            self.spoil(final[None])
        return taps, final


@pytest.mark.parametrize("config", ["t16-tied", "t19-hybrid"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_true_targets_pass(case_target: Any, config: str, dtype: str) -> None:
    target = load_target(str(case_target("plain", config)), dtype=dtype)
    check_target(target, IDS, LENGTHS, TAPS, last=True)


def zero_tap(taps: torch.Tensor) -> None:
    taps[1] = 0


def constant_tap(taps: torch.Tensor) -> None:
    taps[1] = 0.5


def same_everywhere(taps: torch.Tensor) -> None:
    taps[1] = torch.arange(taps.shape[-1])


def copied_tap(taps: torch.Tensor) -> None:
    taps[1] = taps[0]


def leak_of_the_batch(taps: torch.Tensor) -> None:
    if taps.shape[1] > 1:
        taps[1] *= 1.001


def all_nan(taps: torch.Tensor) -> None:
    taps[:] = float("nan")


@pytest.mark.parametrize(
    "spoil, message",
    [
        (zero_tap, "zero or not finite in all 3 samples"),
        (constant_tap, "tap 2 of the target is one constant"),
        (same_everywhere, "tap 2 of the target is the same at every position"),
        (copied_tap, "tap 2 of the target is identical to tap 0"),
        (leak_of_the_batch, "tap 2 of a sample differs between its batch and the sample alone: relative error 0.001"),
        (all_nan, "zero or not finite in all 3 samples"),
    ],
)
def test_spoilt_targets_are_refused(target: HfTarget, spoil: Callable[[torch.Tensor], None], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_target(Liar(target, spoil), IDS, LENGTHS, TAPS, last=False)  # type: ignore[arg-type]


def test_one_bad_sample_does_not_condemn_the_target(target: HfTarget) -> None:
    def spoil_last(taps: torch.Tensor) -> None:
        if taps.shape[1] == 3:
            taps[:, 2, 5] = float("inf")

    check_target(Liar(target, spoil_last), IDS, LENGTHS, TAPS, last=False)  # type: ignore[arg-type]


def test_sample_of_one_repeated_token_passes(target: HfTarget) -> None:
    check_target(target, torch.full((1, 12), 9), torch.tensor([12]), TAPS, last=False)


def test_peaks() -> None:
    states = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert np.array_equal(peaks(states), states.float().abs().amax(-1).numpy())
    assert is_finite(peaks(states))
    assert not has_zero_state(peaks(states))
    states[0, 0, 0, 3] = float("nan")
    assert not is_finite(peaks(states))
    states[0, 0, 0] = 0
    assert has_zero_state(peaks(states))
