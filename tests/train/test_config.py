"""Settings of a training that no run can have are refused by name, before anything is written."""

import pytest
from dflash_offline import UserError
from dflash_offline.settings import resolve
from dflash_offline.train.config import TrainConfig

REFUSED = [
    *("epochs=inf", "epochs=nan", "epochs=0.0", "stall_s=inf", "stall_s=nan"),
    *("seed=-9223372036854775809", "seed=9223372036854775808", "cpu_threads=0", "checkpoint_every=0", "eval_every=0"),
    *("drafter.num_heads=0", "drafter.num_kv_heads=0", "drafter.head_dim=0", "drafter.intermediate_size=-4"),
    *("loss.gamma=inf", "loss.gamma=nan", "loss.gamma=0.0", "loss.dpace_alpha=nan"),
    *("optim.lr=inf", "optim.lr=nan", "optim.lr=0.0", "optim.adamw_lr=0.0", "optim.adamw_lr=inf"),
    *("optim.beta1=1.0", "optim.beta1=-0.1", "optim.beta2=1.0", "optim.beta2=nan"),
    *("optim.momentum=1.0", "optim.momentum=nan", "optim.weight_decay=-0.1", "optim.weight_decay=inf"),
    *("optim.clip=inf", "optim.clip=nan", "optim.clip=-1.0"),
    *("optim.warmup_share=nan", "optim.decay_share=nan", "optim.final_share=nan"),
]


@pytest.mark.parametrize("override", REFUSED)
def test_a_value_that_cannot_work_is_refused_by_name(override: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(TrainConfig, name="train", overrides=[override])
    name, _, value = override.partition("=")
    assert caught.value.happened == f"{name} = {value}"
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    "override",
    [
        *(
            "seed=-9223372036854775808",
            "seed=9223372036854775807",
            "cpu_threads=1",
            "checkpoint_every=1",
            "epochs=0.01",
        ),
        *("optim.beta1=0.0", "optim.momentum=0.0", "optim.clip=0.0", "optim.weight_decay=0.0", "optim.lr=1e-30"),
    ],
)
def test_the_ends_of_a_range_are_taken(override: str) -> None:
    resolve(TrainConfig, name="train", overrides=[override])
