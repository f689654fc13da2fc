"""The frozen-head loss against full logits, plain definitions and autograd, for every objective and weighting."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from dflash_offline.train.config import CHUNK_BLOCKS, OBJECTIVE_NAMES, WEIGHT_NAMES, LossConfig
from dflash_offline.train.loss import (
    BlockLoss,
    Head,
    Teacher,
    equal_chunk,
    final_norm,
    frozen_head_loss,
    make_chunk_loss,
)
from dflash_offline.train.slot_weights import decay_weights

BLOCKS, STRIDE, SLOTS, HIDDEN, VOCABULARY, TOKENS = 12, 8, 5, 16, 40, 30  # blocks of 6 in strides of 8
CAPS = [(1.0, None), (0.3, None), (1.0, 2.0), (2.5, 4.0)]


@dataclass
class Inputs:
    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    valid: torch.Tensor
    teacher: Teacher


def random_inputs(seed: int = 0, dtype: torch.dtype = torch.float64) -> Inputs:
    """Hidden states near enough to the teacher's that some slots are right; NaN where no valid slot looks."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

    weight, told = normal(VOCABULARY, HIDDEN) / 3, normal(TOKENS, HIDDEN)
    places = torch.randint(0, TOKENS, (BLOCKS, SLOTS), generator=rng)
    labels = (told[places].double() @ weight.double().T).argmax(-1)
    hidden = normal(BLOCKS, STRIDE, HIDDEN)
    hidden[:, 1 : SLOTS + 1] += 2 * told[places]
    valid = (torch.arange(SLOTS) < torch.randint(0, SLOTS + 1, (BLOCKS, 1), generator=rng)).float()
    bad = torch.cat([told, torch.full_like(told[:1], float("nan"))])
    places = torch.where(valid > 0, places, TOKENS)  # the row of NaN
    return Inputs(hidden.view(-1, HIDDEN).requires_grad_(), weight, labels, valid, Teacher(bad, places))


def fast(inputs: Inputs, config: LossConfig, multiplier: float = 1.0, softcap: float | None = None) -> BlockLoss:
    head = Head(weight=inputs.weight, multiplier=multiplier, softcap=softcap)
    static = decay_weights(SLOTS + 1, 3.0) if config.weights == "decay" else torch.ones(SLOTS)
    return frozen_head_loss(
        inputs.hidden.detach(),
        head,
        inputs.labels,
        inputs.valid * static,
        chunk_blocks=config.chunk_blocks or CHUNK_BLOCKS,
        chunk_loss=make_chunk_loss(config, head),
        teacher=inputs.teacher if config.needs_last else None,
    )


def capped(products: torch.Tensor, multiplier: float, softcap: float | None) -> torch.Tensor:
    return products * multiplier if softcap is None else softcap * torch.tanh(products * multiplier / softcap)


def slow(inputs: Inputs, config: LossConfig, multiplier: float = 1.0, softcap: float | None = None):
    """Loss, weights, value, nll, hit, alpha and the gradient of hidden; every logit at once, in float64."""
    hidden, weight = inputs.hidden.detach().double().requires_grad_(), inputs.weight.double()
    logits = capped(hidden.view(BLOCKS, STRIDE, HIDDEN)[:, 1 : SLOTS + 1] @ weight.T, multiplier, softcap)
    rows = inputs.teacher.hidden[inputs.teacher.places].double().nan_to_num(0.0)
    p, q = torch.softmax(capped(rows @ weight.T, multiplier, softcap), -1), torch.softmax(logits, -1)
    nll = F.cross_entropy(logits.flatten(0, 1), inputs.labels.flatten(), reduction="none").view(BLOCKS, SLOTS)
    hit = logits.argmax(-1) == inputs.labels
    alpha, kl = torch.minimum(p, q).sum(-1), (p * (p.log() - q.log())).sum(-1)
    share = torch.exp(-config.hybrid_eta * alpha.detach())
    value = {
        "ce": nll,
        "tv_tokens": 1 - torch.exp(-nll),
        "kl": kl,
        "tv": 1 - alpha,
        "lk": -alpha.log(),
        "lk_hybrid": share * kl + (1 - share) * (1 - alpha),
    }[config.objective]
    used = slow_weights(config, nll.detach(), hit, inputs.valid)
    loss = (used * value).sum()
    (gradient,) = torch.autograd.grad(loss, hidden)
    return loss.detach(), used, value.detach(), nll.detach(), hit, alpha.detach(), gradient


def slow_weights(config: LossConfig, nll: torch.Tensor, hit: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """[A, B-1] by loops over blocks and slots; validity is a prefix of the slots."""
    used = torch.zeros(BLOCKS, SLOTS, dtype=torch.float64)
    for block in range(BLOCKS):
        length = int(valid[block].sum())
        q = [math.exp(-float(x)) for x in nll[block]]
        for k in range(length):
            used[block, k] = {
                "decay": float(decay_weights(SLOTS + 1, 3.0)[k]),
                "uniform": 1.0,
                "first_error": float(all(hit[block, :k])),
                "dpace": sum(
                    math.prod(config.dpace_alpha + (1 - config.dpace_alpha) * q[i] for i in range(m + 1))
                    for m in range(k, length)
                ),
            }[config.weights]
    return used


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10, check_dtype=False)


@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize(("multiplier", "softcap"), CAPS)
@pytest.mark.parametrize("weights", WEIGHT_NAMES)
@pytest.mark.parametrize("objective", OBJECTIVE_NAMES)
def test_loss_and_gradient_equal_plain_autograd(objective, weights, multiplier, softcap, chunk) -> None:
    alpha = {"dpace_alpha": 0.3} if weights == "dpace" else {}
    config = LossConfig(objective=objective, weights=weights, chunk_blocks=chunk, **alpha)
    for seed in range(3):
        inputs = random_inputs(seed)
        loss, used, value, nll, hit, alpha, gradient = slow(inputs, config, multiplier, softcap)
        found = fast(inputs, config, multiplier, softcap)
        close(found.loss, loss)
        close(found.weights, used)
        known = inputs.valid > 0
        close(found.value[known], value[known])
        close(found.nll, nll)
        assert torch.equal(found.hit, hit)
        close(found.gradient, gradient)
        assert found.gradient.abs().max() > 1e-3
        assert (found.alpha is None) == (not config.needs_last)
        if found.alpha is not None:
            close(found.alpha[known], alpha[known])


def test_the_inputs_hold_right_and_wrong_slots() -> None:
    """Else the tests of first_error and of hits would say little."""
    hits = torch.cat([fast(random_inputs(seed), LossConfig()).hit.flatten() for seed in range(3)])
    assert 0.3 < hits.float().mean() < 0.95


@pytest.mark.parametrize("objective", OBJECTIVE_NAMES)
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_fp32_and_bf16_stay_near_float64(objective: str, softcap: float | None) -> None:
    """alpha has a corner where p = q: in bf16 logits a few of the 40 tokens change sides."""
    config = LossConfig(objective=objective, weights="dpace", chunk_blocks=4)
    has_corners = objective in ("tv", "lk", "lk_hybrid")
    for dtype, bound, corner_bound in ((torch.float32, 1e-5, 1e-5), (torch.bfloat16, 0.03, 0.2)):
        inputs = random_inputs(dtype=dtype)
        loss, *_, gradient = slow(inputs, config, 0.7, softcap)
        found = fast(inputs, config, 0.7, softcap)
        assert found.loss.dtype == found.nll.dtype == found.value.dtype == torch.float32
        assert found.gradient.dtype == dtype
        assert float((found.loss - loss).abs() / loss) < bound
        error = float((found.gradient.double() - gradient).norm() / gradient.norm())
        assert error < (corner_bound if has_corners else bound)


@pytest.mark.parametrize("weights", WEIGHT_NAMES)
@pytest.mark.parametrize("objective", OBJECTIVE_NAMES)
def test_slot_0_padding_slots_and_invalid_slots_get_no_gradient(objective: str, weights: str) -> None:
    inputs = random_inputs()
    by_slot = fast(inputs, LossConfig(objective=objective, weights=weights)).gradient
    by_slot = by_slot.view(BLOCKS, STRIDE, HIDDEN).abs().sum(-1)
    assert (by_slot[:, 0] == 0).all()
    assert (by_slot[:, SLOTS + 1 :] == 0).all()
    assert (by_slot[:, 1 : SLOTS + 1][inputs.valid == 0] == 0).all()
    if weights != "first_error":
        assert torch.equal(by_slot[:, 1 : SLOTS + 1] > 0, inputs.valid > 0)


@pytest.mark.parametrize("objective", OBJECTIVE_NAMES)
def test_no_valid_slot_gives_zero_and_finite(objective: str) -> None:
    for weights in WEIGHT_NAMES:
        inputs = random_inputs()
        inputs.valid.zero_()
        inputs.teacher.places.fill_(TOKENS)  # NaN for every slot
        result = fast(inputs, LossConfig(objective=objective, weights=weights))
        assert result.loss == 0
        assert (result.gradient == 0).all()
        assert torch.isfinite(result.value).all()


def test_the_last_states_of_unread_tokens_may_be_anything() -> None:
    config = LossConfig(objective="lk")
    inputs, others = random_inputs(), random_inputs()
    unread = ~torch.isin(torch.arange(TOKENS + 1), inputs.teacher.places[inputs.valid > 0])
    assert unread.sum() > 1
    others.teacher.hidden[unread] = float("inf")
    assert torch.equal(fast(inputs, config).gradient, fast(others, config).gradient)


def test_nothing_but_hidden_gets_a_gradient() -> None:
    inputs = random_inputs()
    inputs.weight.requires_grad_()
    before = inputs.weight.detach().clone()
    result = fast(inputs, LossConfig(objective="lk_hybrid"))
    assert not result.loss.requires_grad
    inputs.hidden.backward(result.gradient)
    assert inputs.weight.grad is None
    assert torch.equal(inputs.weight.detach(), before)
    assert inputs.hidden.grad is not None
    assert torch.equal(inputs.hidden.grad, result.gradient)


def test_all_chunks_have_one_shape() -> None:
    for num_blocks in range(1, 200):
        for chunk in (1, 7, 64):
            size = equal_chunk(num_blocks, chunk)
            assert num_blocks % size == 0
            assert 1 <= size <= chunk
            assert all(num_blocks % larger for larger in range(size + 1, min(chunk, num_blocks) + 1))


def test_final_norm_is_the_formula() -> None:
    rng = torch.Generator().manual_seed(0)
    last, weight = torch.randn(7, 16, generator=rng), torch.rand(16, generator=rng)
    for row in range(7):
        size = math.sqrt(sum(float(x) ** 2 for x in last[row]) / 16 + 1e-5)
        expected = [float(x) / size * float(w) for x, w in zip(last[row], weight)]
        assert final_norm(last, weight, 1e-5)[row].tolist() == pytest.approx(expected, rel=1e-5)
    assert final_norm(last.bfloat16(), weight, 1e-5).dtype == torch.bfloat16
    assert (final_norm(torch.zeros(2, 16), weight, 1e-5) == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVE_NAMES)
def test_a_chunk_compiles_to_one_graph_with_the_same_numbers(objective: str) -> None:
    """With a C++ compiler, on a CPU; slow because inductor is."""
    torch._dynamo.reset()
    for weights, softcap in (("decay", None), ("dpace", 4.0), ("first_error", 4.0)):
        config = LossConfig(objective=objective, weights=weights)
        inputs = random_inputs(dtype=torch.float32)
        plain = make_chunk_loss(config, Head(weight=inputs.weight, multiplier=0.7, softcap=softcap))
        compiled = torch.compile(plain, fullgraph=True, dynamic=False)
        rows = inputs.teacher.hidden[inputs.teacher.places.flatten()].nan_to_num(0.0)
        products = inputs.hidden.detach().view(BLOCKS, STRIDE, HIDDEN)[:, 1 : SLOTS + 1].flatten(0, 1) @ inputs.weight.T
        told = rows @ inputs.weight.T if config.needs_last else None
        (numbers, gradient), (expected, wanted) = (
            function(products, told, inputs.labels, inputs.valid) for function in (compiled, plain)
        )
        for found, value in zip(numbers, expected):
            assert (found is None) == (value is None)
            if found is not None:
                torch.testing.assert_close(found, value, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-5)
        torch._dynamo.reset()
