"""The objectives slot by slot: against autograd in float64, by hand, and what must hold for any two distributions."""

import math

import pytest
import torch
from dflash_offline.train.config import OBJECTIVE_NAMES, TOKEN_OBJECTIVES, LossConfig
from dflash_offline.train.objectives import OBJECTIVES, Drafted, Judged
from hypothesis import given, settings
from hypothesis import strategies as st

AGAINST_TARGET = [name for name in OBJECTIVE_NAMES if name not in TOKEN_OBJECTIVES]


def judge(name: str, logits: torch.Tensor, label: torch.Tensor, teacher: torch.Tensor, **config) -> Judged:
    """The objective of logits [n, V], its label's error in its place."""
    log_q = torch.log_softmax(logits.detach(), -1)
    nll = -log_q.gather(1, label[:, None])[:, 0]
    log_p = torch.log_softmax(teacher, -1) if name in AGAINST_TARGET else None
    judged = OBJECTIVES[name](Drafted(log_q, nll, log_p), LossConfig(objective=name, **config))
    if judged.label_error is None:
        return judged
    return judged._replace(error=judged.error.scatter(1, label[:, None], judged.label_error[:, None]))


def by_definition(name: str, logits: torch.Tensor, label: torch.Tensor, teacher: torch.Tensor, eta: float = 3.0):
    """[n], differentiable: probabilities and sums, nothing else."""
    q, p = torch.softmax(logits, -1), torch.softmax(teacher, -1)
    at_label = q.gather(1, label[:, None])[:, 0]
    alpha = torch.minimum(p, q).sum(-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    share = torch.exp(-eta * alpha.detach())
    return {
        "ce": -at_label.log(),
        "tv_tokens": 1 - at_label,
        "kl": kl,
        "tv": 1 - alpha,
        "lk": -alpha.log(),
        "lk_hybrid": share * kl + (1 - share) * (1 - alpha),
    }[name]


def random_logits(seed: int, spread: float = 2.0, n: int = 60, vocabulary: int = 40):
    rng = torch.Generator().manual_seed(seed)
    drafted, told = (spread * torch.randn(n, vocabulary, generator=rng, dtype=torch.float64) for _ in range(2))
    return drafted.requires_grad_(), torch.randint(0, vocabulary, (n,), generator=rng), told


def test_every_name_is_an_objective() -> None:
    assert set(OBJECTIVES) == set(OBJECTIVE_NAMES)


@pytest.mark.parametrize("spread", [0.1, 2.0, 8.0])
@pytest.mark.parametrize("name", OBJECTIVE_NAMES)
def test_value_and_error_equal_autograd(name: str, spread: float) -> None:
    logits, label, teacher = random_logits(0, spread)
    expected = by_definition(name, logits, label, teacher)
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    judged = judge(name, logits, label, teacher)
    torch.testing.assert_close(judged.value, expected.detach(), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(judged.error, gradient, atol=1e-10, rtol=1e-9)
    assert (judged.alpha is None) == (name in TOKEN_OBJECTIVES)


@pytest.mark.parametrize("eta", [0.0, 1.0, 1e4])
def test_the_hybrid_goes_from_kl_to_tv(eta: float) -> None:
    logits, label, teacher = random_logits(1)
    found = judge("lk_hybrid", logits, label, teacher, hybrid_eta=eta)
    expected = by_definition("lk_hybrid", logits, label, teacher, eta)
    torch.testing.assert_close(found.value, expected.detach(), atol=1e-10, rtol=1e-10)
    if eta in (0.0, 1e4):
        end = judge("kl" if eta == 0 else "tv", logits, label, teacher)
        torch.testing.assert_close(found.error, end.error, atol=1e-12, rtol=1e-12)


def test_by_hand() -> None:
    """q = (1/2, 1/4, 1/4), p = (1/4, 1/4, 1/2), label 2: alpha = 3/4, and only token 2 has q < p."""
    logits = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    teacher = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64).log()
    values = {
        "ce": math.log(4),
        "tv_tokens": 0.75,
        "kl": 0.25 * math.log(0.5) + 0.5 * math.log(2),
        "tv": 0.25,
        "lk": math.log(4 / 3),
    }
    errors = {
        "ce": [0.5, 0.25, -0.75],
        "tv_tokens": [0.125, 0.0625, -0.1875],
        "kl": [0.25, 0.0, -0.25],
        "tv": [0.125, 0.0625, -0.1875],
        "lk": [1 / 6, 1 / 12, -1 / 4],
    }
    label = torch.tensor([2])
    # q = p at token 1 is a corner of alpha: both sides have their own slope, ours is that of q >= p
    nudged = logits + torch.tensor([[0.0, 1e-12, 0.0]], dtype=torch.float64)
    for name, value in values.items():
        judged = judge(name, nudged, label, teacher)
        assert float(judged.value) == pytest.approx(value, abs=1e-9), name
        assert judged.error[0].tolist() == pytest.approx(errors[name], abs=1e-9), name


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.01, 1.0, 5.0, 40.0]), dtype=st.sampled_from([32, 64]))
def test_what_holds_for_any_two_distributions(seed: int, spread: float, dtype: int) -> None:
    logits, label, teacher = (x.detach() for x in random_logits(seed, spread, n=12, vocabulary=9))
    if dtype == 32:
        logits, teacher = logits.float(), teacher.float()
    found = {name: judge(name, logits, label, teacher) for name in OBJECTIVE_NAMES}
    alpha = found["tv"].alpha
    assert alpha is not None
    assert ((alpha >= 0) & (alpha <= 1)).all()
    torch.testing.assert_close(found["tv"].value, 1 - alpha)
    torch.testing.assert_close(torch.exp(-found["lk"].value), alpha, atol=1e-6, rtol=1e-6)
    assert (found["kl"].value >= 0).all()
    assert (found["kl"].value + 1e-6 >= 2 * found["tv"].value ** 2).all()  # Pinsker
    for name, judged in found.items():
        assert torch.isfinite(judged.value).all(), name
        assert torch.isfinite(judged.error).all(), name
        assert judged.error.abs().max() <= 1 + 1e-4, name  # logits of 100 in fp32
        assert judged.error.sum(-1).abs().max() < 1e-5, name  # a shift of all logits changes nothing


@pytest.mark.parametrize("name", AGAINST_TARGET)
def test_a_drafter_that_is_the_target_has_nothing_to_learn(name: str) -> None:
    logits, label, _ = random_logits(3)
    judged = judge(name, logits.detach(), label, logits.detach())
    assert judged.value.abs().max() < 1e-12
    assert judged.error.abs().max() < 1e-12


@pytest.mark.parametrize("name", ["kl", "lk"])
def test_against_a_one_hot_target_it_is_cross_entropy(name: str) -> None:
    logits, label, _ = random_logits(4)
    one_hot = torch.full_like(logits, -500.0).scatter(1, label[:, None], 500.0).detach()
    found, expected = judge(name, logits, label, one_hot), judge("ce", logits, label, one_hot)
    torch.testing.assert_close(found.value, expected.value)
    torch.testing.assert_close(found.error, expected.error)


def test_hopeless_slots_keep_a_whole_gradient_in_fp32() -> None:
    """Two distributions so far apart that min(p, q) is below what fp32 holds: lk still pulls as ce does, tv not."""
    logits, teacher, label = torch.tensor([[300.0, 0.0]]), torch.tensor([[0.0, 300.0]]), torch.tensor([1])
    judged = judge("lk", logits, label, teacher)
    assert float(judged.value) == pytest.approx(300.0 - math.log(2))
    assert judged.error[0].tolist() == pytest.approx([0.5, -0.5], rel=1e-4)
    assert judge("tv", logits, label, teacher).error.abs().max() < 1e-30
