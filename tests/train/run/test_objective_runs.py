"""Runs with every objective and weighting, on a store that holds the target's last states and on one that does not."""

import json
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest
from dflash_offline import UserError
from dflash_offline.train import start
from dflash_offline.train.config import OBJECTIVE_NAMES, TOKEN_OBJECTIVES, TrainConfig
from dflash_offline.train.run import check_run
from dflash_offline.watch import Channel

AGAINST_TARGET = [name for name in OBJECTIVE_NAMES if name not in TOKEN_OBJECTIVES]


def train_inside(config: TrainConfig) -> Path:
    """The trainer in this process (its loader in one of its own); what it tells is dropped."""
    _ours, theirs = Pipe()
    start.run_trainer(Channel(theirs, "trainer"), config)
    return Path(config.out)


@pytest.fixture(scope="module")
def last_store(lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lab.make_store(tmp_path_factory.mktemp("last"), has_last=True)


def losses_of(lab, run_dir: Path, name: str = "loss") -> list[float]:
    return [line[name] for line in lab.metrics_of(run_dir, "train")]


@pytest.mark.parametrize(
    ("objective", "weights"), [*((name, "decay") for name in OBJECTIVE_NAMES), ("ce", "first_error"), ("lk", "dpace")]
)
def test_the_loss_falls(lab, tmp_path, last_store, objective, weights):
    settings = (f"loss.objective={objective}", f"loss.weights={weights}", "steps=30", "eval_every=30")
    run_dir = train_inside(lab.make_config(last_store, tmp_path / "run", *settings))
    losses = losses_of(lab, run_dir)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), losses
    lines = lab.metrics_of(run_dir, "train")
    assert all(("acceptance_expected" in line) == (objective in AGAINST_TARGET) for line in lines)
    if objective in AGAINST_TARGET:
        kept = losses_of(lab, run_dir, "acceptance_expected")
        assert 0 < kept[0] < kept[-1] <= 1
    assert json.loads((run_dir / "run.json").read_text())["loss"]["objective"] == objective


@pytest.mark.parametrize("codec", ["zstd", "int8:4"])
def test_encoded_last_states_train_as_raw_ones(lab, tmp_path, last_store, codec):
    settings = ("loss.objective=lk_hybrid", "steps=4")
    store = lab.make_store(tmp_path, has_last=True, codec=codec)
    found = losses_of(lab, train_inside(lab.make_config(store, tmp_path / "run", *settings)))
    expected = losses_of(lab, train_inside(lab.make_config(last_store, tmp_path / "raw", *settings)))
    if codec == "zstd":
        assert found == expected
    else:
        assert found != expected
        assert found == pytest.approx(expected, rel=0.02)


def test_a_run_on_tokens_does_not_care_for_last_states(lab, tmp_path, last_store, tiny_store):
    settings = ("steps=4", "loss.weights=first_error")
    with_last = train_inside(lab.make_config(last_store, tmp_path / "with", *settings))
    without = train_inside(lab.make_config(tiny_store, tmp_path / "without", *settings))
    assert losses_of(lab, with_last) == losses_of(lab, without)


@pytest.mark.parametrize("objective", AGAINST_TARGET)
def test_a_store_without_last_states_is_refused_before_anything_is_written(lab, tmp_path, tiny_store, objective):
    config = lab.make_config(tiny_store, tmp_path / "run", f"loss.objective={objective}")
    with pytest.raises(UserError) as caught:
        check_run(config, lambda: "cpu")
    assert f"loss.objective = {objective!r}" in caught.value.happened
    assert str(tiny_store) in caught.value.happened
    assert "dflash extract --last" in caught.value.expected
    assert not (tmp_path / "run").exists()


def test_the_command_says_so_in_three_lines(lab, tmp_path, tiny_store):
    process = lab.start_command(tiny_store, tmp_path / "run", "loss.objective=kl")
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "holds no last hidden states" in stderr
    assert "--last" in stderr
    assert "Traceback" not in stderr


def test_the_objective_belongs_to_the_run(lab, tmp_path, last_store):
    config = lab.make_config(last_store, tmp_path / "run", "loss.objective=tv", "steps=2")
    train_inside(config)
    other = lab.make_config(last_store, tmp_path / "run", "loss.objective=lk", "steps=2")
    with pytest.raises(UserError, match="loss.objective was 'tv' and is now 'lk'"):
        check_run(other, lambda: "cpu")
