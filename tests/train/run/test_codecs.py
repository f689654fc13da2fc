"""Training on stores that hold the same states differently encoded."""

import dataclasses
import shutil
from multiprocessing.connection import Pipe
from pathlib import Path

import numpy as np
import pytest
from dflash_offline.store import int8
from dflash_offline.store.reader import StoreReader
from dflash_offline.train import start
from dflash_offline.train.checkpoint import list_steps
from dflash_offline.train.config import TrainConfig
from dflash_offline.watch import Channel


def train_inside(config: TrainConfig) -> Path:
    """The trainer in this process (its loader in one of its own); what it tells is dropped."""
    _ours, theirs = Pipe()
    start.run_trainer(Channel(theirs, "trainer"), config)
    return Path(config.out)


@pytest.fixture(scope="module")
def int8_store(lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The states of `tiny_store`, 4 of 32 values of each row exact."""
    return lab.make_store(tmp_path_factory.mktemp("int8"), codec="int8:4")


def states_of(reader: StoreReader, i: int) -> np.ndarray:
    out = np.empty((len(reader.manifest.tap_layers), int(reader.samples.n[i]), reader.manifest.hidden_size), np.uint16)
    reader.read(i, out)
    return int8.as_float(out).astype(np.float64)


def test_a_zstd_store_trains_the_very_same_weights(lab, tmp_path, reference_run):
    run_dir = train_inside(lab.make_config(lab.make_store(tmp_path, codec="zstd"), tmp_path / "run"))
    assert list_steps(run_dir) == list_steps(reference_run)
    for step in list_steps(run_dir):
        lab.same_checkpoint(run_dir / f"checkpoints/step-{step:08d}", reference_run / f"checkpoints/step-{step:08d}")
    for kind, name in (("train", "loss"), ("exam", "acceptance_length")):
        found, expected = ([line[name] for line in lab.metrics_of(run, kind)] for run in (run_dir, reference_run))
        assert found == expected


def test_int8_states_keep_to_the_bound(tiny_store, int8_store):
    raw, encoded = StoreReader(tiny_store), StoreReader(int8_store)
    for i in range(len(raw)):
        expected, found = states_of(raw, i), states_of(encoded, i)
        largest_other = np.sort(np.abs(expected), axis=-1)[..., -5]
        error = np.abs(found - expected).max(-1)
        assert (error <= largest_other * int8.ERROR_SHARE).all()
        assert error.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_int8_run_learns_as_the_raw_one_and_resumes_to_the_bit(
    lab, tmp_path, tiny_store, int8_store, reference_run, dtype
):
    config = lab.make_config(int8_store, tmp_path / "whole", "keep=9", f"dtype={dtype}")
    whole = train_inside(config)
    if dtype == "float32":
        found, expected = ([line["loss"] for line in lab.metrics_of(run, "train")] for run in (whole, reference_run))
        assert found != expected, "the states differ"
        assert np.allclose(found, expected, rtol=0.02)
    resumed = shutil.copytree(whole, tmp_path / "resumed")
    (resumed / "report.json").unlink()
    for step in list_steps(resumed):
        if step > 3:
            shutil.rmtree(resumed / f"checkpoints/step-{step:08d}")
    train_inside(dataclasses.replace(config, out=str(resumed)))
    for step in list_steps(whole):
        lab.same_checkpoint(resumed / f"checkpoints/step-{step:08d}", whole / f"checkpoints/step-{step:08d}")
