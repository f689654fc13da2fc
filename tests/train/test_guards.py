"""What a training that goes wrong says of itself."""

import math
from pathlib import Path

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.train.config import OptimConfig
from dflash_offline.train.guards import LossSpikes, Suspect, blamed, diverged, out_of_memory, suspects
from dflash_offline.train.memory_choice import Demand, memory_table, require_room
from dflash_offline.train.optim import Unsound, require_sound
from dflash_offline.train.order import Place
from dflash_offline.train.slot import RowShape


def spiked(losses: list[float]) -> list[int]:
    spikes = LossSpikes()
    found = [i for i, loss in enumerate(losses) if spikes.note(loss) is not None]
    assert spikes.count == len(found)
    return found


def test_a_spike_is_a_loss_six_deviations_above_the_last_hundred() -> None:
    losses = [2.0 + 0.1 * (-1) ** i for i in range(100)]  # mean 2, deviation 0.1
    assert spiked([*losses, 2.59]) == []
    assert spiked([*losses, 2.61]) == [100]
    assert spiked([*losses[1:], 9.0]) == [], "before a hundred are known nothing is judged"
    assert spiked([*losses, 9.0, 2.6]) == [100], "a spike widens what is expected for the next hundred"
    assert spiked([*losses, 0.1]) == []


def test_spikes_of_a_run_that_goes_on_are_those_of_an_uninterrupted_one() -> None:
    losses = [2.0 + 0.1 * (-1) ** i for i in range(100)] + [5.0] + [2.0] * 120 + [2.5]
    whole = LossSpikes(losses)
    resumed = LossSpikes(losses[:150])
    for loss in losses[150:]:
        resumed.note(loss)
    assert resumed.count == whole.count == 2
    assert resumed.recent == whole.recent


ROWS = [Suspect(Place(0, 7 + i), (10 * i, 10 * i + 1)) for i in range(3)]


def unsound() -> Unsound:
    with pytest.raises(Unsound) as caught:
        require_sound(41, 3.0, math.nan)
    return caught.value


def test_the_row_whose_loss_is_not_finite_is_named_with_its_samples() -> None:
    others = suspects([Suspect(Place(0, 6), (5,))], [1.5])
    error = blamed(unsound(), [others, suspects(ROWS, [1.0, math.inf, math.nan])])
    assert error.happened.endswith("41 has the norm nan; it comes from row 8 of epoch 0 (samples 10, 11)")
    assert len(str(error).splitlines()) == 3


def test_where_no_loss_tells_all_rows_are_named() -> None:
    error = blamed(unsound(), [suspects([Suspect(Place(0, 6), tuple(range(40)))], [1.5]), suspects(ROWS, [1, 2, 3])])
    assert "its rows are row 6 of epoch 0 (samples 0, 1, 2" in error.happened
    assert "23 and 16 more); row 7 of epoch 0 (samples 0, 1); row 8" in error.happened
    many = [Suspect(Place(0, i), (i,)) for i in range(10)]
    assert blamed(unsound(), [suspects(many, [0.0] * 10)]).happened.endswith("(samples 3); and 6 rows more")


def test_a_loss_that_is_not_finite_is_unsound_by_itself() -> None:
    with pytest.raises(Unsound, match="update 3 has the norm 1.0, its loss is inf"):
        require_sound(3, 2.0, 1.0, math.inf)
    require_sound(3, 2.0, 1.0, 5.0)


def test_an_exam_without_numbers_before_training_is_no_divergence() -> None:
    error = diverged(UserError("states are not all finite", "", ""), 0, OptimConfig(), Path("run"), [])
    assert error.happened == "states are not all finite before the first update"
    assert "dflash verify" in error.advice
    later = diverged(UserError("states are not all finite", "", ""), 7, OptimConfig(name="adamw"), Path("run"), [])
    assert later.happened == "states are not all finite at step 7: the training diverged, with optim.lr = 0.0006"
    assert "export" not in later.advice, "there is no checkpoint"


def test_a_full_card_is_explained_with_the_plan(tiny_spec) -> None:
    demand = Demand(
        spec=tiny_spec(),
        shape=RowShape(row_tokens=128, anchors=16, block_size=8),
        optimizer="muon",
        objective="ce",
        dtype="bfloat16",
        codec="raw",
        head_is_tied=True,
        least_row_tokens=128,
    )
    choice = require_room(demand, 80 * 10**9, is_new=True)
    said = str(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"))
    error = out_of_memory(said, choice)
    assert isinstance(error, UserError)
    assert len(str(error).splitlines()) == 3
    assert "Tried to allocate 2.00 GiB." in error.happened
    assert "checkpointing=on" in error.advice
    assert memory_table(choice).startswith("device memory, predicted: ")
    assert len(str(out_of_memory(said, None)).splitlines()) == 3
