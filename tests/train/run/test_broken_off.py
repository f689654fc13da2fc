"""Runs that something outside breaks off: the reason in three lines, nothing left behind, the same command goes on."""

import errno
import os
import re
import shutil
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.train import start
from dflash_offline.train.checkpoint import checkpoint_dir, list_steps
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.outcome import read_report, require_exams_before
from dflash_offline.watch import Channel
from processes import children
from torch.nn import functional


def train_inside(config: TrainConfig) -> None:
    """The trainer in this process (its loader in one of its own); what it tells is dropped."""
    _ours, theirs = Pipe()
    start.run_trainer(Channel(theirs, "trainer"), config)


def end_with(error: Exception, config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> UserError:
    """What a run ends with when torch raises that in a step, as soon as there is a checkpoint."""
    run_dir, real = Path(config.out), functional.scaled_dot_product_attention

    def attention(*args: Any, **settings: Any) -> torch.Tensor:
        if list_steps(run_dir):
            raise error
        return real(*args, **settings)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    with pytest.raises(UserError) as caught:
        train_inside(config)
    monkeypatch.undo()
    assert len(str(caught.value).splitlines()) == 3
    assert not children(os.getpid(), "loader")
    return caught.value


def test_a_card_that_runs_full_ends_in_three_lines_and_the_run_goes_on(
    lab, tiny_store, tmp_path, reference_run, monkeypatch
):
    config = lab.make_config(tiny_store, tmp_path / "run")
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    error = end_with(full, config, monkeypatch)
    assert error.happened == "device memory ran out: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert "the newest checkpoint is kept" in error.advice
    train_inside(config)
    name = "checkpoints/step-00000012"
    lab.same_checkpoint(tmp_path / "run" / name, reference_run / name)


def test_a_disk_too_full_for_compiled_kernels_is_named(lab, tiny_store, tmp_path, monkeypatch):
    from torch._inductor.exc import InductorError  # here: its import takes seconds

    full = InductorError(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), None)
    error = end_with(full, lab.make_config(tiny_store, tmp_path / "run"), monkeypatch)
    assert f"{tmp_path / 'run/kernels'}' failed: No space left on device (ENOSPC)" in error.happened
    assert "training goes on from the newest checkpoint, step " in error.advice


@pytest.mark.parametrize("lost", ["the whole file", "the exam before training"])
@pytest.mark.parametrize("step", [9, 12])
def test_lost_lines_of_metrics_are_named_before_a_run_goes_on(lab, tiny_store, tmp_path, reference_run, lost, step):
    """Without the exam of step 0 the report would call another one that of the untrained drafter."""
    run_dir = shutil.copytree(reference_run, tmp_path / "run")
    config, metrics = lab.make_config(tiny_store, run_dir, "keep=9"), run_dir / "metrics.jsonl"
    (run_dir / "report.json").unlink()
    for later in list_steps(run_dir):
        if later > step:
            shutil.rmtree(checkpoint_dir(run_dir, later))
    kept = metrics.read_text().splitlines(keepends=True)
    metrics.unlink()
    if lost == "the exam before training":
        metrics.write_text("".join(line for line in kept if '"step": 0,' not in line))
    there = metrics.read_bytes() if metrics.exists() else b""
    with pytest.raises(UserError, match=r"metrics.jsonl' holds (no exam|exams of steps 4 to \d+): its lines") as caught:
        train_inside(config)
    assert len(str(caught.value).splitlines()) == 3
    assert f"since the checkpoint of step {step}" in caught.value.happened
    assert f"--checkpoint {step}" in caught.value.advice
    assert list_steps(run_dir)[-1] == step, "nothing was trained"
    assert (metrics.read_bytes() if metrics.exists() else b"") == there
    metrics.write_text("".join(kept))
    train_inside(config)
    assert (run_dir / "report.json").read_bytes() == (reference_run / "report.json").read_bytes()


def test_lines_that_are_lost_while_a_run_trains_are_named_at_its_end(lab, tiny_store, tmp_path, monkeypatch):
    config, real = lab.make_config(tiny_store, tmp_path / "run"), functional.scaled_dot_product_attention

    def attention(*args: Any, **settings: Any) -> torch.Tensor:
        if list_steps(tmp_path / "run"):
            (tmp_path / "run/metrics.jsonl").unlink(missing_ok=True)
        return real(*args, **settings)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    with pytest.raises(UserError, match=r"metrics.jsonl' holds no exam: its lines were removed while the run trained"):
        train_inside(config)
    assert not (tmp_path / "run/report.json").exists()


def test_a_run_told_to_end_before_its_first_exam_goes_on_without_one(tmp_path):
    require_exams_before(tmp_path, 0, None)
    with pytest.raises(UserError, match="holds no exam"):
        require_exams_before(tmp_path, 0, 0)


def test_a_cpu_without_memory_is_explained(lab, tiny_store, tmp_path, monkeypatch):
    full = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 281474976710656 bytes. Error code 12 (Cannot allocate memory)"
    )
    error = end_with(full, lab.make_config(tiny_store, tmp_path / "run"), monkeypatch)
    assert "device memory ran out: " in error.happened
    assert "rows.anchors" in error.advice


def test_an_exam_without_numbers_names_the_learning_rate(lab, tiny_store, tmp_path):
    settings = ("optim.weight_decay=1e6", "eval_every=1")
    with pytest.raises(UserError) as caught:
        train_inside(lab.make_config(tiny_store, tmp_path / "run", *settings))
    assert re.fullmatch(
        r"the drafter's output states are not all finite at step \d+: the training diverged, with optim.lr = 0.01, "
        r"optim.weight_decay = 1e\+06, optim.adamw_lr = 0.002",
        caught.value.happened,
    )
    newest = list_steps(tmp_path / "run")[-1]
    assert f"dflash export {tmp_path / 'run'} --checkpoint {newest}" in caught.value.advice
    assert "lower optim.lr" in caught.value.advice
    assert len(str(caught.value).splitlines()) == 3


def test_a_broken_report_is_named_and_written_anew(lab, tiny_store, tmp_path, reference_run):
    run_dir = shutil.copytree(reference_run, tmp_path / "run")
    report = run_dir / "report.json"
    report.write_text(report.read_text()[:-30])
    with pytest.raises(UserError, match="report.json' is broken") as caught:
        read_report(run_dir, "finished", 0)
    assert len(str(caught.value).splitlines()) == 3
    report.unlink()  # what the message advises
    train_inside(lab.make_config(tiny_store, run_dir))
    assert report.read_bytes() == (reference_run / "report.json").read_bytes()
