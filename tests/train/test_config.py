"""Settings of a training that no run can have are refused by name, before anything is written."""

from pathlib import Path

import pytest
from dflash_offline import UserError
from dflash_offline.settings import build, resolve
from dflash_offline.settings_text import as_toml
from dflash_offline.train.config import LOSS_READ_WITH, OPTIM_READ_WITH, TrainConfig
from dflash_offline.train.kinds import named_layers

REFUSED = [
    *("epochs=inf", "epochs=nan", "epochs=0.0", "stall_s=inf", "stall_s=nan"),
    *("seed=-9223372036854775809", "seed=9223372036854775808", "cpu_threads=0", "checkpoint_every=0", "eval_every=0"),
    *("drafter.num_heads=0", "drafter.num_kv_heads=0", "drafter.head_dim=0", "drafter.intermediate_size=-4"),
    *("drafter.num_layers=0", "drafter.block_size=1", "drafter.block_size=129", "drafter.window=0"),
    *("loss.gamma=inf", "loss.gamma=nan", "loss.gamma=0.0", "loss.dpace_alpha=nan"),
    *("loss.objective='mse'", "loss.weights='focal'", "loss.hybrid_eta=-1.0", "loss.hybrid_eta=inf"),
    *("optim.lr=inf", "optim.lr=nan", "optim.lr=0.0", "optim.adamw_lr=0.0", "optim.adamw_lr=inf"),
    *("optim.beta1=1.0", "optim.beta1=-0.1", "optim.beta2=1.0", "optim.beta2=nan"),
    *("optim.momentum=1.0", "optim.momentum=nan", "optim.weight_decay=-0.1", "optim.weight_decay=inf"),
    *("optim.clip=inf", "optim.clip=nan", "optim.clip=-1.0"),
    *("optim.warmup_share=nan", "optim.decay_share=nan", "optim.final_share=nan"),
    *("steps=1000000000001", "steps=99999999999999999999", "steps=-1", "cpu_threads=1025", "stall_s=1000000.5"),
    *("drafter.num_layers=1025", "drafter.window=1000000001", "drafter.intermediate_size=16777217"),
    *("drafter.num_heads=4097", "drafter.num_kv_heads=4097", "drafter.head_dim=4097"),
    *("noise=1e+308", "noise=1000000.5", "noise=nan", "optim.lr=1e+308", "optim.lr=1e+30", "optim.lr=1000000.5"),
    *("optim.adamw_lr=1e+308", "optim.weight_decay=1e+308", "optim.clip=1e+308", "loss.hybrid_eta=1e+308"),
    *("loss.gamma=1e-320", "loss.gamma=0.0009", "loss.gamma=1e+308", "loss.dpace_alpha=1e-320"),
    *("rows.row_tokens=4194432", "rows.anchors=4194305", "rows.rows_per_step=1000001", "rows.shuffle_segments=1000001"),
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
        *("steps=0", "steps=1000000000000", "cpu_threads=1024", "stall_s=1000000.0", "drafter.num_layers=1024"),
        *("drafter.window=1000000000", "drafter.num_heads=4096", "rows.row_tokens=4194304", "rows.anchors=4194304"),
        *("optim.beta1=0.0", "optim.momentum=0.0", "optim.clip=0.0", "optim.weight_decay=0.0", "optim.lr=1e-30"),
        *(
            "optim.lr=1e6",
            "optim.clip=1e30",
            "optim.weight_decay=1e6",
            "noise=1e6",
            "loss.gamma=1e-3",
            "loss.gamma=1e6",
        ),
    ],
)
def test_the_ends_of_a_range_are_taken(override: str) -> None:
    resolve(TrainConfig, name="train", overrides=[override])


@pytest.mark.parametrize("name", ["kl_tokens", "lk_tokens"])
def test_kl_and_lk_on_tokens_are_ce_and_it_is_said(name: str) -> None:
    with pytest.raises(UserError, match=r"ce, kl, tv, lk, lk_hybrid or tv_tokens \(against tokens kl and lk are ce\)"):
        resolve(TrainConfig, name="train", overrides=[f"loss.objective={name}"])


@pytest.mark.parametrize("causal", ["yes", "full", "True"])
def test_causal_is_one_of_three_words(causal: str) -> None:
    with pytest.raises(UserError, match="no, sliding, all"):
        resolve(TrainConfig, name="train", overrides=[f"drafter.causal='{causal}'"])


@pytest.mark.parametrize("text", ["4xsliding,1xfull", "['4xsliding', 'full']", "4xsliding, full_attention"])
def test_layers_may_be_typed_short(text: str) -> None:
    config = resolve(TrainConfig, name="train", overrides=[f"drafter.layer_types={text}", "drafter.window=2048"])
    assert config.drafter.layer_types is not None
    assert named_layers(config.drafter.layer_types) == (*["sliding_attention"] * 4, "full_attention")


def test_a_layer_of_another_name_is_refused() -> None:
    with pytest.raises(UserError, match="drafter.layer_types holds 'causal'"):
        resolve(TrainConfig, name="train", overrides=["drafter.layer_types=4xsliding,causal"])


READ_WITH = [("loss", *one) for one in LOSS_READ_WITH] + [("optim", *one) for one in OPTIM_READ_WITH]
CHOICES = {
    "loss.objective": ["ce", "kl", "tv", "lk", "lk_hybrid", "tv_tokens"],
    "loss.weights": ["decay", "uniform", "dpace", "first_error"],
    "optim.name": ["muon", "adamw"],
    "optim.schedule": ["wsd", "cosine", "constant"],
}


@pytest.mark.parametrize("section, name, chooser, readers", READ_WITH, ids=lambda value: value)
def test_a_setting_that_nothing_reads_is_refused(section: str, name: str, chooser: str, readers: tuple[str]) -> None:
    path, by = f"{section}.{name}", f"{section}.{chooser}"
    for chosen in CHOICES[by]:
        overrides = [f"{path}=0.3", f"{by}={chosen}"]
        if chosen in readers:
            assert getattr(getattr(resolve(TrainConfig, name="train", overrides=overrides), section), name) == 0.3
            continue
        with pytest.raises(UserError, match=f"{path} = 0.3 does nothing with {by} = '{chosen}'") as caught:
            resolve(TrainConfig, name="train", overrides=overrides)
        assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("by, chosen", [(by, chosen) for by, values in CHOICES.items() for chosen in values])
def test_the_resolved_config_of_every_choice_is_taken_again(tmp_path: Path, by: str, chosen: str) -> None:
    """train.toml holds the defaults of settings that this choice does not read."""
    config = resolve(TrainConfig, name="train", overrides=[f"{by}={chosen}"])
    (tmp_path / "train.toml").write_text(as_toml(config, "train"))
    assert resolve(TrainConfig, name="train", file=tmp_path / "train.toml") == config


def write_table(path: Path, text: str) -> Path:
    path.write_text(f"[train]\n{text}\n")
    return path


@pytest.mark.parametrize(
    "text, overrides",
    [("", ["steps=6", "epochs=50"]), ("epochs = 50\nsteps = 6", []), ("steps = 6", ["epochs=50"])],
)
def test_epochs_beside_steps_are_refused(tmp_path: Path, text: str, overrides: list[str]) -> None:
    with pytest.raises(UserError, match="epochs = 50 does nothing beside steps = 6") as caught:
        resolve(TrainConfig, name="train", file=write_table(tmp_path / "dflash.toml", text), overrides=overrides)
    assert len(str(caught.value).splitlines()) == 3


def test_steps_on_the_command_line_are_in_place_of_the_epochs_of_a_file(tmp_path: Path) -> None:
    file = write_table(tmp_path / "dflash.toml", "epochs = 50")
    assert resolve(TrainConfig, name="train", file=file, options={"steps": 6}).steps == 6


def test_a_saved_config_with_epochs_and_the_steps_they_came_to_is_taken(tmp_path: Path) -> None:
    """train.toml has both: epochs as given, and the steps that followed."""
    config, file = TrainConfig(epochs=3.0, steps=6), tmp_path / "train.toml"
    file.write_text(as_toml(config, "train"))
    assert resolve(TrainConfig, name="train", file=file) == config
    assert resolve(TrainConfig, name="train", file=file, overrides=["steps=9"]).steps == 9
    again = resolve(TrainConfig, name="train", file=file, overrides=["epochs=2", "steps=none"])
    assert (again.epochs, again.steps) == (2.0, None)
    with pytest.raises(UserError, match="epochs = 2 does nothing beside steps = 6"):
        resolve(TrainConfig, name="train", file=file, overrides=["epochs=2"])


def test_the_runs_of_a_sweep_are_refused_epochs_beside_steps() -> None:
    with pytest.raises(UserError, match="epochs = 2 does nothing beside steps = 6"):
        build(TrainConfig, {"steps": 6, "epochs": 2}, "")
