"""Masters, schedules, clip and resume of the optimizer."""

import io
import math
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.train.config import OptimConfig
from dflash_offline.train.optim import MasterOptimizer, lr_share
from torch import nn


class Toy(nn.Module):
    """Two matrices and a norm."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.wide = nn.Parameter(torch.randn(6, 10, generator=rng))
        self.norm = nn.Parameter(torch.ones(10))
        self.tall = nn.Parameter(torch.randn(9, 4, generator=rng))
        self.to(dtype)


def gradients(seed: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=rng) for shape in [(6, 10), (10,), (9, 4)]]


def test_muon_moves_matrices_and_adamw_the_norms_by_the_library_rules() -> None:
    config = OptimConfig(clip=0.0, weight_decay=0.1, schedule="constant", warmup_share=0.0, lr=0.05)
    ours, plain = Toy(), Toy()
    optimizer = MasterOptimizer(ours.named_parameters(), config, 10)
    muon = torch.optim.Muon([plain.wide, plain.tall], lr=0.05, momentum=0.95, weight_decay=0.1)
    adamw = torch.optim.AdamW([plain.norm], lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(4):
        optimizer.step(gradients(step), torch.tensor(2.0, dtype=torch.float64))
        for parameter, gradient in zip(plain.parameters(), gradients(step)):
            parameter.grad = gradient / 2.0
        muon.step()
        adamw.step()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name))


def test_adamw_alone_is_the_library_s() -> None:
    config = OptimConfig(name="adamw", clip=0.0, weight_decay=0.1, schedule="constant", warmup_share=0.0)
    ours, plain = Toy(), Toy()
    optimizer = MasterOptimizer(ours.named_parameters(), config, 10)
    adamw = torch.optim.AdamW(
        [{"params": [plain.wide, plain.tall], "weight_decay": 0.1}, {"params": [plain.norm], "weight_decay": 0.0}],
        lr=6e-4,
        betas=(0.9, 0.95),
    )
    for step in range(4):
        optimizer.step(gradients(step), torch.tensor(1.0, dtype=torch.float64))
        for parameter, gradient in zip(plain.parameters(), gradients(step)):
            parameter.grad = gradient
        adamw.step()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name))


@pytest.mark.parametrize(("weight", "clip"), [(1.0, 1.0), (4.0, 0.5), (1000.0, 1.0)])
def test_clip_is_the_library_s_on_the_divided_gradient(weight: float, clip: float) -> None:
    toy = Toy()
    optimizer = MasterOptimizer(toy.named_parameters(), OptimConfig(clip=clip), 10)
    sums = gradients(0)
    expected = [nn.Parameter(torch.zeros_like(g)) for g in sums]
    for parameter, gradient in zip(expected, sums):
        parameter.grad = gradient / weight
    norm = nn.utils.clip_grad_norm_(expected, clip)
    update = optimizer.step(sums, torch.tensor(weight, dtype=torch.float64))
    assert float(update.gradient_norm) == pytest.approx(float(norm), rel=1e-5)
    for parameter, used in zip(expected, sums):
        torch.testing.assert_close(parameter.grad, used)


def test_wsd_schedule_by_hand() -> None:
    config = OptimConfig(warmup_share=0.1, decay_share=0.5, final_share=0.1)
    shares = [lr_share(config, step, 20) for step in range(20)]
    assert shares[:2] == [0.5, 1.0]
    assert shares[2:10] == [1.0] * 8
    assert shares[10:] == pytest.approx([1.0 - 0.9 * (i + 1) / 10 for i in range(10)])
    assert lr_share(config, 50, 20) == pytest.approx(0.1)


def test_cosine_and_constant_schedules_by_hand() -> None:
    cosine = OptimConfig(schedule="cosine", warmup_share=0.2, final_share=0.1)
    shares = [lr_share(cosine, step, 10) for step in range(10)]
    assert shares[:2] == [0.5, 1.0]
    assert shares[2:] == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * (i + 1) / 8)) / 2 for i in range(8)])
    constant = OptimConfig(schedule="constant", warmup_share=0.2)
    assert [lr_share(constant, step, 10) for step in range(10)] == [0.5] + [1.0] * 9


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "constant"])
@pytest.mark.parametrize("total", [1, 2, 3, 7])
@pytest.mark.parametrize(("warmup", "decay"), [(0.0, 1.0), (1.0, 1.0), (0.9, 0.9), (0.0, 0.0)])
def test_shares_are_sane_in_the_shortest_runs(schedule: str, total: int, warmup: float, decay: float) -> None:
    falling: dict[str, Any] = {"decay_share": decay} if schedule == "wsd" else {}
    config = OptimConfig(schedule=schedule, warmup_share=warmup, **falling)
    assert all(0 < lr_share(config, step, total) <= 1 for step in range(total + 2))


def test_learning_rate_is_applied_per_step() -> None:
    toy = Toy()
    config = OptimConfig(name="adamw", lr=0.1, warmup_share=0.5, schedule="constant", clip=0.0)
    optimizer = MasterOptimizer(toy.named_parameters(), config, 4)
    rates = [optimizer.step(gradients(step), torch.tensor(1.0, dtype=torch.float64)).lr for step in range(3)]
    assert rates == pytest.approx([0.05, 0.1, 0.1])
    assert rates == pytest.approx([optimizer.lr(step) for step in range(3)])


def test_norms_move_at_a_small_rate_only_with_masters() -> None:
    config = OptimConfig(name="adamw", lr=1e-4, schedule="constant", warmup_share=0.0)
    toy = Toy(torch.bfloat16)
    optimizer = MasterOptimizer(toy.named_parameters(), config, 100)
    rounded = nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
    plain = torch.optim.AdamW([rounded], lr=1e-4, weight_decay=0.0)
    for _ in range(60):
        optimizer.step([torch.ones(6, 10), torch.ones(10), torch.ones(9, 4)], torch.tensor(1.0, dtype=torch.float64))
        rounded.grad = torch.ones(10, dtype=torch.bfloat16)
        plain.step()
    assert (rounded == 1).all()  # what happens without masters
    assert (toy.norm < 1).all()
    for parameter, master in zip(toy.parameters(), optimizer.masters):
        assert parameter.dtype == torch.bfloat16
        assert master.dtype == torch.float32
        assert torch.equal(parameter, master.bfloat16())


@pytest.mark.parametrize("name", ["muon", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bit_exact(name: str, dtype: torch.dtype) -> None:
    config = OptimConfig(name=name, lr=0.01)
    whole = Toy(dtype)
    one = MasterOptimizer(whole.named_parameters(), config, 9)
    for step in range(9):
        one.step(gradients(step), torch.tensor(3.0, dtype=torch.float64))

    first = Toy(dtype)
    optimizer = MasterOptimizer(first.named_parameters(), config, 9)
    for step in range(4):
        optimizer.step(gradients(step), torch.tensor(3.0, dtype=torch.float64))
    file = io.BytesIO()
    torch.save({"weights": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    second = Toy(dtype)
    second.load_state_dict(saved["weights"])
    resumed = MasterOptimizer(second.named_parameters(), config, 9)
    resumed.load_state_dict(saved["optimizer"])
    for step in range(4, 9):
        resumed.step(gradients(step), torch.tensor(3.0, dtype=torch.float64))
    for name_, parameter in whole.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name_))
    for left, right in zip(one.masters, resumed.masters):
        assert torch.equal(left, right)
    assert resumed.num_steps == 9


def test_a_foreign_state_is_refused() -> None:
    toy = Toy()
    muon = MasterOptimizer(toy.named_parameters(), OptimConfig(), 9)
    adamw = MasterOptimizer(toy.named_parameters(), OptimConfig(name="adamw"), 9)
    with pytest.raises(UserError, match="in 2 parts"):
        adamw.load_state_dict(muon.state_dict())
    other = MasterOptimizer([("a", toy.wide)], OptimConfig(name="adamw"), 9)
    with pytest.raises(UserError, match="3 parameters"):
        other.load_state_dict(adamw.state_dict())


@pytest.mark.parametrize(
    ("weight", "value", "message"),
    [
        (0.0, 1.0, "no label"),
        (1.0, math.nan, "the norm nan"),
        (1.0, math.inf, "the norm inf"),
        (math.nan, 1.0, "no label"),
    ],
)
def test_an_update_without_a_meaning_is_refused_and_changes_nothing(weight: float, value: float, message: str) -> None:
    toy = Toy()
    before = {name: tensor.clone() for name, tensor in toy.state_dict().items()}
    optimizer = MasterOptimizer(toy.named_parameters(), OptimConfig(), 9)
    sums = gradients(0)
    sums[1][3] = value
    with pytest.raises(UserError, match=message):
        optimizer.step(sums, torch.tensor(weight, dtype=torch.float64))
    assert all(torch.equal(tensor, before[name]) for name, tensor in toy.state_dict().items())
    assert optimizer.num_steps == 0
