"""Runs that something outside breaks off: the reason in three lines, nothing left behind, the same command goes on."""

import errno
import os
import shutil
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.train import start
from dflash_offline.train.checkpoint import list_steps
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.outcome import read_report
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
def test_lost_lines_of_metrics_are_named(lab, tiny_store, tmp_path, reference_run, lost):
    """Without the exam of step 0 the report would call another one that of the untrained drafter."""
    run_dir = shutil.copytree(reference_run, tmp_path / "run")
    config, metrics = lab.make_config(tiny_store, run_dir), run_dir / "metrics.jsonl"
    (run_dir / "report.json").unlink()
    kept = metrics.read_text().splitlines(keepends=True)
    metrics.unlink()
    if lost == "the exam before training":
        metrics.write_text("".join(line for line in kept if '"step": 0,' not in line))
    with pytest.raises(UserError, match=r"metrics.jsonl' holds (no exam|exams of steps 4 to 12): its lines") as caught:
        train_inside(config)
    assert len(str(caught.value).splitlines()) == 3
    assert not (run_dir / "report.json").exists()
    metrics.write_text("".join(kept))
    train_inside(config)
    assert (run_dir / "report.json").read_bytes() == (reference_run / "report.json").read_bytes()


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
