"""A target that lies is refused before the first segment."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.soundness import (
    check_target,
    fault_of_sample,
    has_zero_state,
    head_fault,
    is_finite,
    peaks,
    relative_error,
    tolerance,
)
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
        self.facts = target.facts
        self.spoil = spoil

    def record(self, ids: torch.Tensor, lengths: torch.Tensor, tap_layers: Sequence[int], *, last: bool = False) -> Any:
        taps, final = self.target.record(ids, lengths, tap_layers, last=last)
        self.spoil(taps)
        return taps, final

    def run_whole(self, ids: torch.Tensor, tap_layers: Sequence[int], places: torch.Tensor) -> Any:
        taps, last, logits = self.target.run_whole(ids, tap_layers, places)
        self.spoil(taps[:, None])
        return taps, last, logits

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        return self.target.logits(last)


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


class WrongHead(Liar):
    """A target of whose last state our parts say something else than the target does."""

    def __init__(self, target: HfTarget, turn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(target, lambda taps: None)
        self.turn = turn

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        return self.turn(self.target.logits(last))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("last", [False, True])
def test_a_head_that_names_other_tokens_is_refused(case_target: Any, dtype: str, last: bool) -> None:
    target = load_target(str(case_target()), dtype=dtype)
    wrong = WrongHead(target, lambda logits: logits.roll(1, dims=-1))
    with pytest.raises(UserError, match="another top token than the target at") as caught:
        check_target(wrong, IDS, LENGTHS, TAPS, last=last)  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 3
    check_target(WrongHead(target, lambda logits: logits), IDS, LENGTHS, TAPS, last=last)  # type: ignore[arg-type]


def test_ties_within_rounding_are_excepted() -> None:
    own = torch.tensor([[10.0, 9.999, 1.0], [10.0, 9.0, 1.0]])
    ours = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert head_fault(own, ours, "torch.float32") is None
    ours[1] = torch.tensor([0.0, 1.0, 0.0])
    fault = head_fault(own, ours, "torch.float32")
    assert fault is not None
    assert "at 1 of 2 positions" in fault.happened


def test_fewer_states_than_tokens_are_a_fault(target: HfTarget) -> None:
    taps, _ = target.record(IDS[:1], torch.tensor([40]), TAPS)
    assert fault_of_sample(target, IDS[0], taps[:, 0], None, TAPS, with_head=False) is None
    fault = fault_of_sample(target, IDS[0], taps[:, 0, 1:], None, TAPS, with_head=False)
    assert fault is not None
    assert fault.happened == "tap 0 of a sample has shape [39, 64]"


def test_a_leak_into_the_last_state_alone_is_refused(target: HfTarget) -> None:
    class LastLeak(Liar):
        def record(self, ids: torch.Tensor, lengths: torch.Tensor, tap_layers: Any, *, last: bool = False) -> Any:
            taps, final = self.target.record(ids, lengths, tap_layers, last=last)
            assert final is not None
            return taps, final * 1.001 if ids.shape[0] > 1 else final

    with pytest.raises(UserError, match="the last state of a sample differs"):
        check_target(LastLeak(target, lambda taps: None), IDS, LENGTHS, TAPS, last=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_layers, most", [(1, 0.05), (13, 0.05), (36, 0.0812), (64, 0.1083), (100, 0.1353)])
def test_rounding_of_more_layers_is_let_pass_in_bfloat16_alone(num_layers: int, most: float) -> None:
    assert tolerance("bfloat16", num_layers) == pytest.approx(most, rel=1e-3)
    assert tolerance("float32", num_layers) == 1e-5


@pytest.mark.parametrize("config", ["t16-tied", "t19-hybrid"])
def test_layers_in_bfloat16_err_by_less_than_is_let_pass(case_target: Any, config: str) -> None:
    """Against float32, which is more than a batch against the sample alone, both of which round."""
    taps = {}
    for dtype in ("float32", "bfloat16"):
        target = load_target(str(case_target("plain", config)), dtype=dtype)
        layers = tuple(range(target.facts.num_layers - 1))
        taps[dtype] = target.record(IDS[:1], LENGTHS[:1], layers)[0][:, 0]
    errors = [relative_error(b.float(), a) for a, b in zip(taps["float32"], taps["bfloat16"])]
    assert all(0.0 < error < tolerance("bfloat16", layer + 1) for layer, error in enumerate(errors)), errors


def test_a_sample_that_sees_its_neighbour_is_far_beyond_rounding(target: HfTarget) -> None:
    """What a lost mask does: the tolerance of 100 layers is no hiding place."""
    other = torch.randint(6, 262, (1, 20), generator=torch.Generator().manual_seed(1))
    alone, _ = target.record(IDS[:1, :20], LENGTHS.new_tensor([20]), TAPS)
    behind, _ = target.record(torch.cat([other, IDS[:1, :20]], 1), LENGTHS.new_tensor([40]), TAPS)
    assert relative_error(behind[-1, 0, 20:], alone[-1, 0]) > 2 * tolerance("bfloat16", 100)
