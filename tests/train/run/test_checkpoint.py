"""Checkpoints appear whole, survive kills and full disks, and give back the same bits."""

import json
import os
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import torch
from dflash_offline import UserError
from dflash_offline.store.files import temporary_path
from dflash_offline.train import checkpoint
from dflash_offline.train.checkpoint import (
    LoopState,
    checkpoint_dir,
    find_step,
    list_steps,
    load,
    load_drafter,
    prune,
    save,
)
from dflash_offline.train.facts import read_facts
from safetensors.torch import load_file, save_file


def weights_of(step: int, size: int = 1000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"layer.{i}": torch.randn(size, generator=generator) for i in range(4)}


def optimizer_of(step: int) -> dict:
    state = {0: {"momentum_buffer": torch.full((3, 5), float(step)), "step": torch.tensor(float(step))}}
    return {"num_steps": step, "names": ["layer.0"], "parts": [{"state": state, "param_groups": [{"lr": 0.1}]}]}


def write(run_dir: Path, step: int, best: int | None = None, size: int = 1000) -> None:
    save(run_dir, LoopState(step=step, epoch=1, row=7, best_step=best), weights_of(step, size), optimizer_of(step))


def forget_checksums(folder: Path) -> None:
    """As an earlier version wrote it."""
    path = folder / "state.json"
    values = json.loads(path.read_text())
    del values["crc32c"]
    path.write_text(json.dumps(values))


def test_a_checkpoint_gives_back_what_it_was_given(tmp_path, lab):
    state = LoopState(step=12, epoch=3, row=4, acceptance_length=2.5, best_step=9, best_acceptance_length=2.0000000001)
    weights = {**weights_of(1), "odd": torch.tensor([float("inf"), -0.0, 1e-45])}
    save(tmp_path, state, weights, optimizer_of(12))
    loaded = load(tmp_path, 12)
    assert loaded.state == state
    lab.assert_same(dict(sorted(loaded.weights.items())), dict(sorted(weights.items())), "weights")
    lab.assert_same(loaded.optimizer, optimizer_of(12), "optimizer")


def test_the_newest_and_the_best_stay(tmp_path):
    for step in (3, 6, 9, 12, 15):
        write(tmp_path, step, best=6)
    prune(tmp_path, 2, 6)
    assert list_steps(tmp_path) == [6, 12, 15]
    prune(tmp_path, 1, None)
    assert list_steps(tmp_path) == [15]


def test_which_checkpoint(tmp_path, reference_run):
    for step in (3, 6, 100000000):
        write(tmp_path, step, best=6)
    assert [find_step(tmp_path, which) for which in ("latest", "best", "3")] == [100000000, 6, 3]
    for which in ("7", "newest", "-3", ""):
        with pytest.raises(UserError, match="there are: steps 3, 6, 100000000"):
            find_step(tmp_path, which)
    write(tmp_path, 100000001, best=None)
    with pytest.raises(UserError, match="after an exam with held-out samples"):
        find_step(tmp_path, "best")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no run at"):
        find_step(tmp_path / "empty", "latest")
    shutil.copy(reference_run / "run.json", tmp_path / "empty")
    with pytest.raises(UserError, match="none yet"):
        find_step(tmp_path / "empty", "latest")


def test_a_kill_leaves_whole_checkpoints_only(tmp_path, lab):
    rng = np.random.default_rng(0)
    for _ in range(12):
        first = (list_steps(tmp_path) or [0])[-1] + 1
        child = os.fork()
        if child == 0:
            try:
                for step in range(first, first + 10_000):
                    write(tmp_path, step, size=20_000)
                    prune(tmp_path, 2, None)
            finally:
                os._exit(1)
        limit = time.monotonic() + 300.0
        while (list_steps(tmp_path) or [0])[-1] < first and time.monotonic() < limit:
            time.sleep(0.001)
        time.sleep(float(rng.uniform(0, 0.03)))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        steps = list_steps(tmp_path)
        assert steps[-1] >= first
        for step in steps:
            loaded = load(tmp_path, step)
            assert loaded.state.step == step
            lab.assert_same(dict(sorted(loaded.weights.items())), weights_of(step, 20_000), "weights")
            lab.assert_same(loaded.optimizer, optimizer_of(step), "optimizer")
    checkpoint.remove_temporaries(tmp_path)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in list_steps(tmp_path)
    ]


def test_temporaries_of_dead_processes_go_and_nothing_else(tmp_path):
    write(tmp_path, 3)
    (tmp_path / "checkpoints" / "step-00000006.tmp.host-1.77").mkdir()
    (tmp_path / "checkpoints" / "step-00000006.tmp.host-1.77" / "drafter.safetensors").write_bytes(b"x")
    (tmp_path / "run.json.tmp.host.5").write_bytes(b"{")
    (tmp_path / "notes.tmp").write_text("mine")
    removed = checkpoint.remove_temporaries(tmp_path)
    assert sorted(p.name for p in removed) == ["run.json.tmp.host.5", "step-00000006.tmp.host-1.77"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "notes.tmp"]
    assert list_steps(tmp_path) == [3]


def test_a_checkpoint_larger_than_the_disk_is_refused_before_a_byte(tmp_path):
    write(tmp_path, 3)
    giant = {"layer.0": torch.empty(2**55, dtype=torch.float32, device="meta")}
    with pytest.raises(UserError, match="step-00000006' failed: No space left on device") as caught:
        save(tmp_path, LoopState(step=6, epoch=0, row=0), giant, {})
    assert "training goes on from the newest checkpoint" in str(caught.value)
    assert str(2**57)[:6] in str(caught.value), "the bytes it needs"
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("is_foreseen", [True, False])
def test_a_full_disk_keeps_the_checkpoint_before(tmp_path, small_disk, lab, monkeypatch, is_foreseen):
    write(small_disk, 3, size=40_000)  # 640 KB
    if not is_foreseen:  # as when another process fills the disk after our look at its free space
        answers = iter([os.statvfs(tmp_path)])
        real = os.statvfs
        monkeypatch.setattr(os, "statvfs", lambda path: next(answers, None) or real(path))
    with pytest.raises(UserError, match="No space left on device"):
        write(small_disk, 6, size=200_000)  # 3.2 MB
    assert [p.name for p in (small_disk / "checkpoints").iterdir()] == ["step-00000003"]
    lab.assert_same(dict(sorted(load(small_disk, 3).weights.items())), weights_of(3, 40_000), "weights")


@pytest.mark.parametrize("name", ["drafter.safetensors", "optimizer.pt", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "nonsense"])
def test_a_damaged_checkpoint_is_named(tmp_path, name, damage):
    write(tmp_path, 3)
    path = tmp_path / "checkpoints" / "step-00000003" / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"nonsense" * 8)
    with pytest.raises(UserError, match="step-00000003' cannot be read"):
        load(tmp_path, 3)


@pytest.mark.parametrize("name", ["drafter.safetensors", "optimizer.pt"])
def test_the_checksums_are_those_of_the_files(tmp_path, name):
    write(tmp_path, 3, size=100_000)  # more than a piece
    folder = checkpoint_dir(tmp_path, 3)
    state = json.loads((folder / "state.json").read_text())
    assert state["crc32c"][name] == google_crc32c.value((folder / name).read_bytes())
    with (folder / name).open("r+b") as file:
        file.seek((folder / name).stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(UserError, match=f"step-00000003' cannot be read: {name} has crc32c"):
        load(tmp_path, 3)


def test_a_renewed_state_keeps_the_checksums(tmp_path):
    write(tmp_path, 3)
    path = checkpoint_dir(tmp_path, 3) / "state.json"
    before = json.loads(path.read_text())["crc32c"]
    write(tmp_path, 3, best=2)
    after = json.loads(path.read_text())["crc32c"]
    assert after.pop("state") != before.pop("state")
    assert after == before
    assert load(tmp_path, 3).state.best_step == 2
    forget_checksums(path.parent)
    write(tmp_path, 3, best=1)
    assert "crc32c" not in json.loads(path.read_text())
    assert load(tmp_path, 3).state.best_step == 1


def test_load_drafter_gives_the_trained_weights(reference_run):
    drafter, facts = load_drafter(reference_run, "latest", "cpu")
    assert facts == read_facts(reference_run)
    assert facts.spec == drafter.spec
    assert not drafter.training
    saved = load(reference_run, 12).weights
    assert {n: p.dtype for n, p in drafter.named_parameters()} == dict.fromkeys(saved, torch.float32)
    assert all(torch.equal(p, saved[n]) for n, p in drafter.named_parameters())
    halved, _ = load_drafter(reference_run, "12", torch.device("cpu"), torch.bfloat16)
    assert all(torch.equal(p, saved[n].to(torch.bfloat16)) for n, p in halved.named_parameters())


def test_load_drafter_without_a_run(tmp_path, reference_run):
    with pytest.raises(UserError, match="no run at"):
        load_drafter(tmp_path, "latest", "cpu")
    with pytest.raises(UserError, match=r"no checkpoint '5' .*\n.*there are: steps"):
        load_drafter(reference_run, "5", "cpu")


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.bfloat16])
def test_weights_of_another_number_format_are_not_rounded_in_silence(tmp_path, reference_run, dtype):
    run_dir = shutil.copytree(reference_run, tmp_path / "run")
    step = list_steps(run_dir)[-1]
    path = checkpoint_dir(run_dir, step) / "drafter.safetensors"
    weights = load_file(path)
    name = sorted(weights)[0]
    save_file(weights | {name: weights[name].to(dtype)}, path)
    forget_checksums(path.parent)
    for read in (lambda: load_drafter(run_dir, "latest", "cpu"), lambda: load(run_dir, step)):
        with pytest.raises(UserError, match=f"{name} is {dtype}, not torch.float32"):
            read()


def test_a_deeply_nested_state_is_damage(tmp_path):
    write(tmp_path, 3)
    (checkpoint_dir(tmp_path, 3) / "state.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="cannot be read: RecursionError"):
        load(tmp_path, 3)


def test_a_run_of_another_slot_meaning_is_refused(tmp_path, reference_run):
    run_dir = shutil.copytree(reference_run, tmp_path / "run")
    facts = json.loads((run_dir / "run.json").read_text())
    facts["spec"]["slot_meaning"] = "slot k predicts a+k+1"
    (run_dir / "run.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"a\+k\+1"):
        load_drafter(run_dir, "latest", "cpu")


@pytest.mark.parametrize("large", ["weights", "moments"])
def test_a_disk_that_refuses_is_named_with_its_errno(tmp_path, large):
    """torch and safetensors raise errors of their own; a limit on the size of files stands for any refusal."""
    write(tmp_path, 3)
    weights = weights_of(6, 200_000 if large == "weights" else 10)
    moments = {"moments": torch.zeros(800_000 if large == "moments" else 10)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    try:
        with pytest.raises(UserError, match=r"step-00000006' failed: File too large \(EFBIG\)") as caught:
            save(tmp_path, LoopState(step=6, epoch=0, row=0), weights, moments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(str(caught.value).splitlines()) == 3
    assert "training goes on from the newest checkpoint, step 3" in caught.value.advice
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_without_a_checkpoint_nothing_is_called_safe(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(UserError, match="ENOTDIR|EEXIST") as caught:
        write(tmp_path, 3)
    assert "training starts anew: it has no checkpoint yet" in caught.value.advice


def test_what_cannot_be_removed_is_named(tmp_path):
    for step in (3, 6):
        write(tmp_path, step)
    aside = temporary_path(tmp_path / "checkpoints/step-00000003")
    aside.mkdir()
    (aside / "held").write_text("by somebody else")
    message = r"step-00000003' cannot be removed: Directory not empty \(ENOTEMPTY\)"
    with pytest.raises(UserError, match=message) as caught:
        prune(tmp_path, 1, None)
    assert len(str(caught.value).splitlines()) == 3
    assert "newest checkpoint, step 6" in caught.value.advice
    assert list_steps(tmp_path) == [3, 6]
    (tmp_path / "checkpoints/step-00000009.tmp.host.7").symlink_to(tmp_path / "checkpoints/step-00000006")
    with pytest.raises(UserError, match=r"step-00000009.tmp.host.7' cannot be removed: .* symbolic link") as caught:
        checkpoint.remove_temporaries(tmp_path)
    assert len(str(caught.value).splitlines()) == 3
