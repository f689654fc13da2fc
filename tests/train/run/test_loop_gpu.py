"""The loop on a CUDA device: copied from pinned memory, resumed to the same bits.

Needs a GPU: on a CPU none of compiling, pinning and asynchronous copies takes place.
"""

import dataclasses
import math
import shutil

import numpy as np
import pytest
import torch
from dflash_offline.pinned_memory import pinned
from dflash_offline.train.checkpoint import list_steps, load
from dflash_offline.train.facts import read_facts
from dflash_offline.train.staging import Lanes
from dflash_offline.train.worker import train

pytestmark = pytest.mark.gpu
SETTINGS = ("devices=cuda", "stall_s=600", "drafter.head_dim=32", "optim.lr=0.02", "rows.rows_per_step=2", "keep=9")


@pytest.fixture(scope="module")
def cuda_run(lab, tiny_store, tmp_path_factory):
    out = tmp_path_factory.mktemp("cuda") / "run"
    train(lab.make_config(tiny_store, out, *SETTINGS))
    return out


def test_it_learns_in_bfloat16_and_keeps_its_kernels(lab, cuda_run):
    losses = [line["loss"] for line in lab.metrics_of(cuda_run, "train")]
    assert len(losses) == 12
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    assert read_facts(cuda_run).dtype == "bfloat16"
    assert {tensor.dtype for tensor in load(cuda_run, 12).weights.values()} == {torch.float32}
    assert any((cuda_run / "kernels").iterdir())


def test_a_resumed_run_equals_one_that_was_never_stopped(lab, tiny_store, tmp_path, cuda_run):
    resumed = shutil.copytree(cuda_run, tmp_path / "run")
    (resumed / "report.json").unlink()
    for step in list_steps(resumed):
        if step > 6:
            shutil.rmtree(resumed / f"checkpoints/step-{step:08d}")
    config = lab.make_config(tiny_store, resumed, *SETTINGS)
    train(dataclasses.replace(config, devices="cuda:0"))
    for step in (8, 9, 12):
        lab.same_checkpoint(resumed / f"checkpoints/step-{step:08d}", cuda_run / f"checkpoints/step-{step:08d}")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_run_on_the_second_card_is_the_run_on_the_first(lab, tiny_store, tmp_path, cuda_run):
    """Its graphs and kernels go to its own card, which is not the one that torch starts with.

    Kernels are chosen by their speed, each card's anew, so sums may be taken in another order there.
    """
    train(dataclasses.replace(lab.make_config(tiny_store, tmp_path / "run", *SETTINGS), devices="cuda:1"))
    first, second = ([line["loss"] for line in lab.metrics_of(run, "train")] for run in (cuda_run, tmp_path / "run"))
    assert second == pytest.approx(first, rel=0.01)


def test_copies_and_reads_of_the_staging_memory_wait_for_each_other():
    """The device reads late and the host writes the next row as soon as a copy is done: every row is read whole."""
    device = torch.device("cuda")
    memory = np.zeros(64 << 20, np.uint8)
    staging = torch.empty(memory.size, dtype=torch.uint8, device=device)
    seen = torch.zeros(20, 2, dtype=torch.uint8, device=device)
    lanes = Lanes(device)
    with pinned(memory, device):
        assert torch.from_numpy(memory).is_pinned()
        for number in range(20):
            memory[:] = number
            copied = lanes.copy(torch.from_numpy(memory), staging)
            lanes.wait_for_copy()
            torch.cuda._sleep(10_000_000)
            seen[number] = torch.stack([staging.amin(), staging.amax()])
            lanes.mark_read()
            copied.wait()
            assert copied.is_done()
            memory[:] = 255
    assert seen.tolist() == [[number, number] for number in range(20)]
