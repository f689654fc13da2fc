"""The loop on a CUDA device: copied from pinned memory, resumed to the same bits.

Needs a GPU: on a CPU none of compiling, pinning and asynchronous copies takes place.
"""

import dataclasses
import math
import shutil

import numpy as np
import pytest
import torch
from dflash_offline.train.checkpoint import list_steps, load
from dflash_offline.train.device import copy_mark, pinned
from dflash_offline.train.facts import read_facts
from dflash_offline.train.worker import train

pytestmark = pytest.mark.gpu
SETTINGS = ("device=cuda", "stall_s=600", "drafter.head_dim=32", "optim.lr=0.02", "rows.rows_per_step=2", "keep=9")


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
    train(dataclasses.replace(config, device="cuda:0"))
    for step in (8, 9, 12):
        lab.same_checkpoint(resumed / f"checkpoints/step-{step:08d}", cuda_run / f"checkpoints/step-{step:08d}")


def test_copies_from_pinned_memory_are_waited_for():
    device = torch.device("cuda")
    memory = np.zeros(64 << 20, np.uint8)
    target = torch.empty(memory.size, dtype=torch.uint8, device=device)
    with pinned(memory, device):
        assert torch.from_numpy(memory).is_pinned()
        for number in range(1, 20):
            memory[:] = number
            target.copy_(torch.from_numpy(memory), non_blocking=True)
            wait_for_copy = copy_mark(device)
            wait_for_copy()
            memory[:] = 0
            assert torch.equal(target.amin(), target.amax())
            assert int(target[0]) == number
