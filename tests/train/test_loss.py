"""The frozen-head loss against plain cross-entropy and autograd; slot weights against their closed forms."""

import math

import pytest
import torch
import torch.nn.functional as F
from dflash_offline.train.loss import Head, decay_weights, default_gamma, dpace_weights, frozen_head_loss

BLOCKS, STRIDE, SLOTS, HIDDEN, VOCABULARY = 12, 8, 5, 16, 40  # blocks of 6 in strides of 8


def random_inputs(seed: int = 0, dtype: torch.dtype = torch.float32):
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BLOCKS * STRIDE, HIDDEN, generator=rng).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=rng).to(dtype)
    labels = torch.randint(0, VOCABULARY, (BLOCKS, SLOTS), generator=rng)
    lengths = torch.randint(0, SLOTS + 1, (BLOCKS, 1), generator=rng)
    valid = (torch.arange(SLOTS) < lengths).float()
    return hidden, weight, labels, valid


def plain_nll(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, multiplier=1.0, softcap=None):
    """[A, B-1] by full logits."""
    logits = hidden.view(BLOCKS, STRIDE, HIDDEN)[:, 1 : SLOTS + 1] @ weight.T * multiplier
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    nll = F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.flatten(), reduction="none")
    return nll.view(BLOCKS, SLOTS), logits.argmax(-1) == labels


@pytest.mark.parametrize("chunk", [1, 2, 5, 12, 100])
@pytest.mark.parametrize(("multiplier", "softcap"), [(1.0, None), (0.3, None), (1.0, 2.0), (2.5, 4.0)])
def test_loss_and_gradient_equal_plain_cross_entropy(chunk: int, multiplier: float, softcap: float | None) -> None:
    hidden, weight, labels, valid = random_inputs()
    weights = valid * decay_weights(SLOTS + 1, 3.0)
    nll, hit = plain_nll(hidden, weight, labels, multiplier, softcap)
    expected = (nll * weights).sum()
    (gradient,) = torch.autograd.grad(expected, hidden)

    result = frozen_head_loss(
        hidden, Head(weight=weight, multiplier=multiplier, softcap=softcap), labels, weights, chunk_blocks=chunk
    )
    result.loss.backward()
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(result.nll, nll)
    assert torch.equal(result.hit, hit)
    assert torch.equal(result.weights, weights)
    torch.testing.assert_close(hidden.grad, gradient, atol=1e-6, rtol=1e-5)


def test_slot_0_padding_slots_and_invalid_slots_get_no_gradient() -> None:
    hidden, weight, labels, valid = random_inputs()
    frozen_head_loss(hidden, Head(weight=weight), labels, valid, chunk_blocks=4).loss.backward()
    assert hidden.grad is not None
    by_slot = hidden.grad.view(BLOCKS, STRIDE, HIDDEN).abs().sum(-1)
    assert (by_slot[:, 0] == 0).all()
    assert (by_slot[:, SLOTS + 1 :] == 0).all()
    assert torch.equal(by_slot[:, 1 : SLOTS + 1] > 0, valid > 0)


def test_outer_factor_scales_the_gradient() -> None:
    hidden, weight, labels, valid = random_inputs()
    loss = frozen_head_loss(hidden, Head(weight=weight), labels, valid, chunk_blocks=4).loss
    (once,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (scaled,) = torch.autograd.grad(loss * 0.25, hidden)
    torch.testing.assert_close(scaled, once * 0.25)


def test_head_and_labels_get_no_gradient() -> None:
    hidden, weight, labels, valid = random_inputs()
    weight.requires_grad_()
    before = weight.detach().clone()
    frozen_head_loss(hidden, Head(weight=weight), labels, valid, chunk_blocks=4).loss.backward()
    assert weight.grad is None
    assert torch.equal(weight.detach(), before)


def test_no_valid_slot_gives_zero_and_finite() -> None:
    hidden, weight, labels, valid = random_inputs()
    for alpha in (None, 0.5):
        hidden.grad = None
        result = frozen_head_loss(
            hidden, Head(weight=weight), labels, torch.zeros_like(valid), chunk_blocks=4, dpace_alpha=alpha
        )
        result.loss.backward()
        assert result.loss == 0
        assert hidden.grad is not None
        assert (hidden.grad == 0).all()


def test_bfloat16_stays_near_fp32() -> None:
    hidden, weight, labels, valid = random_inputs(dtype=torch.bfloat16)
    result = frozen_head_loss(hidden, Head(weight=weight), labels, valid, chunk_blocks=4)
    result.loss.backward()
    wide = hidden.detach().float().requires_grad_()
    expected = (plain_nll(wide, weight.float(), labels)[0] * valid).sum()
    expected.backward()
    assert hidden.grad is not None
    assert wide.grad is not None
    assert result.loss.dtype == result.nll.dtype == torch.float32
    torch.testing.assert_close(result.loss, expected, atol=0, rtol=0.01)
    assert (hidden.grad.float() - wide.grad).norm() / wide.grad.norm() < 0.01


def test_dpace_in_the_loss_is_detached_and_uses_the_same_pass() -> None:
    hidden, weight, labels, valid = random_inputs()
    nll, _ = plain_nll(hidden, weight, labels)
    weights = dpace_by_loops(nll.detach(), valid, 0.5)
    (gradient,) = torch.autograd.grad((nll * weights).sum(), hidden)
    result = frozen_head_loss(hidden, Head(weight=weight), labels, valid, chunk_blocks=3, dpace_alpha=0.5)
    result.loss.backward()
    torch.testing.assert_close(result.weights, weights)
    torch.testing.assert_close(result.loss, (nll * weights).sum())
    torch.testing.assert_close(hidden.grad, gradient, atol=1e-6, rtol=1e-5)


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


def test_dpace_with_alpha_1_counts_the_slots_left() -> None:
    valid = torch.arange(7) < 5
    weights = dpace_weights(torch.rand(3, 7), valid.expand(3, 7), 1.0)
    assert (weights * valid).tolist() == [[5, 4, 3, 2, 1, 0, 0]] * 3


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
