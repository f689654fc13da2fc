"""Slot weights against their closed forms (invariant 16 of dflash-spec 7)."""

import math

import pytest
import torch
from dflash_offline.train.config import LossConfig
from dflash_offline.train.slot_weights import (
    decay_weights,
    default_gamma,
    dpace_weights,
    dynamic_weights,
    first_error_weights,
    static_weights,
)


@pytest.mark.parametrize(
    ("block_size", "gamma", "total", "last"), [(16, 7, 6.63, 0.135), (10, 5, 4.61, 0.202), (8, 4, 3.74, 0.223)]
)
def test_decay_weights_are_those_of_the_paper(block_size: int, gamma: float, total: float, last: float) -> None:
    assert default_gamma(block_size) == gamma
    weights = decay_weights(block_size, gamma)
    assert weights[0] == 1
    assert float(weights.sum()) == pytest.approx(total, abs=0.01)  # the figures of dflash-spec 2.6
    closed = (1 - math.exp(-(block_size - 1) / gamma)) / (1 - math.exp(-1 / gamma))
    assert float(weights.sum()) == pytest.approx(closed, rel=1e-6)
    assert float(weights[-1]) == pytest.approx(last, abs=0.001)
    assert default_gamma(12) == 6


def test_each_rule_has_one_part() -> None:
    nll, hit = torch.rand(2, 7), torch.rand(2, 7) < 0.5
    for name in ("decay", "uniform", "dpace", "first_error"):
        config = LossConfig(weights=name)
        is_static = name in ("decay", "uniform")
        assert (dynamic_weights(config, nll, hit, torch.ones(2, 7, dtype=torch.bool)) is None) == is_static
        assert bool((static_weights(config, 8) == 1).all()) == (name != "decay")


def dpace_by_loops(nll: torch.Tensor, valid: torch.Tensor, alpha: float) -> torch.Tensor:
    weights = torch.zeros_like(nll)
    for block in range(len(nll)):
        for k in range(nll.shape[1]):
            if not valid[block, k]:
                continue
            for m in range(k, nll.shape[1]):
                if valid[block, m]:
                    factors = [
                        alpha + (1 - alpha) * math.exp(-float(nll[block, i])) for i in range(m + 1) if valid[block, i]
                    ]
                    weights[block, k] += math.prod(factors)
    return weights


def test_dpace_weights_are_positive_and_never_rise() -> None:
    nll = torch.rand(50, 15, generator=torch.Generator().manual_seed(0)) * 6
    weights = dpace_weights(nll.requires_grad_(), torch.ones(50, 15, dtype=torch.bool), 0.3)
    assert not weights.requires_grad
    assert (weights > 0).all()
    assert (weights[:, 1:] <= weights[:, :-1]).all()
    torch.testing.assert_close(weights, dpace_by_loops(nll.detach(), torch.ones(50, 15), 0.3))


def test_dpace_leaves_invalid_slots_out() -> None:
    rng = torch.Generator().manual_seed(1)
    nll, valid = torch.rand(40, 9, generator=rng) * 4, torch.rand(40, 9, generator=rng) < 0.7
    torch.testing.assert_close(dpace_weights(nll, valid, 0.5) * valid, dpace_by_loops(nll, valid, 0.5))


def test_dpace_with_alpha_1_counts_the_slots_left() -> None:
    valid = torch.arange(7) < 5
    weights = dpace_weights(torch.rand(3, 7), valid.expand(3, 7), 1.0)
    assert (weights * valid).tolist() == [[5, 4, 3, 2, 1, 0, 0]] * 3


def test_first_error_counts_to_the_first_wrong_slot_and_no_further() -> None:
    hit = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]).bool()
    valid = torch.tensor([[1, 1, 1, 1, 1]] * 4 + [[1, 1, 0, 0, 0]]).bool()
    expected = [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert (first_error_weights(hit, valid) * valid).tolist() == expected


def test_first_error_counts_one_slot_more_than_were_accepted() -> None:
    rng = torch.Generator().manual_seed(2)
    hit = torch.rand(500, 15, generator=rng) < 0.8
    valid = torch.arange(15) < torch.randint(0, 16, (500, 1), generator=rng)
    weights = first_error_weights(hit, valid) * valid
    for block in range(500):
        length = int(valid[block].sum())
        accepted = next((k for k in range(length) if not hit[block, k]), length)
        assert weights[block].tolist() == [1.0] * min(accepted + 1, length) + [0.0] * (15 - min(accepted + 1, length))
