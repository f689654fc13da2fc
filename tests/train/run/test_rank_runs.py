"""`dflash train` on several ranks (gloo on a CPU): the same run as on one, also when it goes on with another number."""

import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest
from dflash_offline.train.checkpoint import list_steps, load
from dflash_offline.train.facts import read_facts
from processes import children, is_alive, wait_until

LIMIT_S = 600.0
STEADY = ("optim.name=adamw", "optim.lr=0.002", "rows.rows_per_step=4", "steps=6", "eval_every=3", "keep=9")
COUNTS = ("step", "epoch", "num_samples", "num_tokens", "num_blocks", "fill")


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    """What a command wrote to stderr."""
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, stderr
    return stderr


def devices(count: int) -> str:
    return f"devices='{','.join(['cpu'] * count)}'"


@pytest.fixture(scope="module")
def one_rank(lab, tiny_store, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("one") / "run"
    ended(lab.start_command(tiny_store, run_dir, *STEADY))
    return run_dir


def same_run(lab, run_dir: Path, reference: Path) -> None:
    """Asserts the same rows, the same exams, and numbers within fp32's rounding."""
    ours, theirs = (lab.metrics_of(folder, "train") for folder in (run_dir, reference))
    assert [[line[name] for name in COUNTS] for line in ours] == [[line[name] for name in COUNTS] for line in theirs]
    for name in ("loss", "weight", "grad_norm", "accuracy"):
        np.testing.assert_allclose([line[name] for line in ours], [line[name] for line in theirs], rtol=2e-5)
    exams = [
        [{k: v for k, v in line.items() if not k.endswith("_s")} for line in lab.metrics_of(folder, "exam")]
        for folder in (run_dir, reference)
    ]
    assert exams[0] == exams[1]
    last = list_steps(reference)[-1]
    weights = load(reference, last).weights
    for name, tensor in load(run_dir, last).weights.items():
        np.testing.assert_allclose(tensor.numpy(), weights[name].numpy(), rtol=1e-4, atol=2e-5, err_msg=name)
    assert load(run_dir, last).state == load(reference, last).state


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_does_not_depend_on_the_number_of_ranks(lab, tiny_store, tmp_path, one_rank, two_ranks, count):
    """Invariant 17 of dflash-spec over processes; 3 ranks share 4 rows unevenly."""
    run_dir = two_ranks if count == 2 else tmp_path / "run"
    if count != 2:
        ended(lab.start_command(tiny_store, run_dir, *STEADY, "checkpoint_every=2", devices(count)))
    same_run(lab, run_dir, one_rank)
    assert all(line["reduce_s"] > 0 for line in lab.metrics_of(run_dir, "train"))
    assert read_facts(run_dir).identity() == read_facts(one_rank).identity()


@pytest.fixture(scope="module")
def two_ranks(lab, tiny_store, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("two") / "run"
    ended(lab.start_command(tiny_store, run_dir, *STEADY, "checkpoint_every=2", devices(2)))
    return run_dir


def test_another_number_of_ranks_goes_on_with_the_same_rows(lab, tiny_store, tmp_path, one_rank, two_ranks):
    """Invariant 27 of dflash-spec for another number of ranks: its rows, not its last bits."""
    run_dir = shutil.copytree(two_ranks, tmp_path / "run")
    (run_dir / "report.json").unlink()
    for step in list_steps(run_dir):
        if step > 2:
            shutil.rmtree(run_dir / f"checkpoints/step-{step:08d}")
    own = [setting for setting in STEADY if not setting.startswith("rows.rows_per_step")]  # the run knows its own
    ended(lab.start_command(tiny_store, run_dir, *own, "checkpoint_every=2"))
    same_run(lab, run_dir, one_rank)


def test_one_rank_that_is_told_to_end_ends_all_at_one_step(lab, tiny_store, tmp_path):
    run_dir = tmp_path / "run"
    process = lab.start_command(tiny_store, run_dir, "rows.rows_per_step=2", "steps=100000", devices(2))
    assert wait_until(lambda: len(children(process.pid, "trainer")) == 2, LIMIT_S)
    trainers = {name: pid for pid, name in children(process.pid, "trainer").items()}
    path = run_dir / "metrics.jsonl"
    assert wait_until(lambda: path.exists() and b'"kind": "train"' in path.read_bytes(), LIMIT_S)
    os.kill(trainers["trainer 1"], signal.SIGTERM)
    stderr = ended(process, 128 + signal.SIGTERM)
    (step,) = map(int, re.findall(r"ended at step (\d+), with a checkpoint", stderr))
    assert list_steps(run_dir)[-1] == load(run_dir, step).state.step == step
    assert [line["step"] for line in lab.metrics_of(run_dir, "train")] == list(range(1, step + 1))
    assert not any(map(is_alive, trainers.values()))


def held_port(held: socket.socket) -> int:
    """A free port that the system gives to nobody else while `held` is open, and that a server may still listen at."""
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held.getsockname()[1]


def test_ranks_of_an_environment_meet_at_its_address(lab, tiny_store, tmp_path, one_rank, monkeypatch):
    """As `torchrun` starts them: one command for each rank; the report is that of rank 0."""
    with socket.socket() as held:
        port = held_port(held)
        processes = []
        for rank in range(2):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            for name, value in own.items():
                monkeypatch.setenv(name, str(value))
            processes.append(lab.start_command(tiny_store, tmp_path / "run", *STEADY))
        texts = [process.communicate(timeout=LIMIT_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    assert "trained 6 steps" in texts[0][0]
    assert texts[1][0] == ""
    same_run(lab, tmp_path / "run", one_rank)


def test_more_ranks_than_rows_are_refused_before_anything_is_written(lab, tiny_store, tmp_path):
    stderr = ended(lab.start_command(tiny_store, tmp_path / "run", "rows.rows_per_step=1", devices(2)), 1)
    assert "rows.rows_per_step = 1 with 2 ranks" in stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_stopped_rank_is_named_within_the_limit(lab, tiny_store, tmp_path):
    run_dir = tmp_path / "run"
    settings = ("steps=100000", "rows.rows_per_step=2", "checkpoint_every=5", "stall_s=40", devices(2))
    process = lab.start_command(tiny_store, run_dir, *settings)
    assert wait_until(lambda: list_steps(run_dir), LIMIT_S)
    pids = {name: pid for pid, name in children(process.pid, "trainer").items()}
    loaders = [pid for trainer in pids.values() for pid in children(trainer, "loader")]
    os.kill(pids["trainer 1"], signal.SIGSTOP)
    stderr = ended(process, 3)
    told = r"a sign of life from trainer 1 \((waits[^)]*, )?stopped by a signal\) for 40\.0 s"
    assert re.search(told, stderr), stderr
    assert "stacks of trainer 0" in stderr
    assert wait_until(lambda: not any(map(is_alive, [*pids.values(), *loaders])), LIMIT_S)
    assert load(run_dir, list_steps(run_dir)[-1]).state.step == list_steps(run_dir)[-1]


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_that_fills_up_ends_the_run_with_its_checkpoints_intact(lab, tiny_store, small_disk):
    """Written beside the loop, so the run may be a step further when it hears of it."""
    run_dir = small_disk / "run"
    settings = ("steps=60", "checkpoint_every=1", "keep=60", "eval_every=60")
    stderr = ended(lab.start_command(tiny_store, run_dir, *settings), 1)
    error = stderr[stderr.index("error:") :].strip().splitlines()
    assert len(error) == 3, stderr
    assert "ENOSPC" in error[0]
    steps = list_steps(run_dir)
    assert steps
    assert steps == list(range(1, len(steps) + 1))
    for step in steps:
        assert load(run_dir, step).state.step == step
    assert not list(run_dir.rglob("*.tmp.*"))
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    ended(lab.start_command(tiny_store, run_dir, *settings))
    assert [line["step"] for line in lab.metrics_of(run_dir, "train")] == list(range(1, 61))


def test_an_exploding_run_stops_before_it_saves_and_names_its_samples(lab, tiny_store, tmp_path):
    run_dir = tmp_path / "run"
    settings = ("optim.lr=1e6", "optim.name=adamw", "rows.rows_per_step=2", "checkpoint_every=1", devices(2))
    stderr = ended(lab.start_command(tiny_store, run_dir, *settings), 1)
    error = stderr[stderr.index("error:") :].strip().splitlines()
    assert len(error) == 3, stderr
    found = re.search(r"update (\d+) has the norm (nan|inf).*row (\d+) of epoch 0 \(samples [\d, ]+\)", error[0])
    assert found, error
    number = int(found[1])
    assert int(found[3]) in (2 * number, 2 * number + 1), "the rows of that very update"
    assert max(list_steps(run_dir), default=0) <= number
    for step in list_steps(run_dir):
        assert all(tensor.isfinite().all() for tensor in load(run_dir, step).weights.values())
