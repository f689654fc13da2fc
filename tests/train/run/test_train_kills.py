"""SIGKILL and SIGTERM at random moments to launcher, trainers and loaders: the same command ends in the same bits.

Each life of a run is `dflash train` in a process of its own, as a user starts it.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from dflash_offline.train.checkpoint import list_steps
from dflash_offline.train.facts import KERNELS_NAME
from processes import children, is_alive

LIMIT_S = 600.0
OF_THE_MOMENT = ("rate_tflops", "mfu", "memory_peak_bytes", "rows_ready")
EXPECTED = {
    "launcher": "",
    "trainer": r"trainer( \d)? was killed by SIGKILL",
    "loader": r"loader( \d)? was killed by SIGKILL",
    "command": "",  # told to end by SIGTERM
}


def processes_of(launcher: int) -> dict[str, list[int]]:
    """Process ids by name, of those that have been started so far."""
    trainers = list(children(launcher, "trainer"))
    loaders = [pid for trainer in trainers for pid in children(trainer, "loader")]
    return {"launcher": [launcher], "command": [launcher], "trainer": trainers, "loader": loaders}


def count_lines(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], what: str) -> bool:
    """False where the process ended before."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < end, what
        time.sleep(0.003)
    return True


def kill_one(process: subprocess.Popen[str], run_dir: Path, victim: str, rng: np.random.Generator) -> bool:
    """Kills the victim in its start or among its steps and checks what is left; False where the run was faster."""
    before = count_lines(run_dir)
    some = int(rng.integers(0, 8))
    waited = "trainer" if victim == "command" else victim  # before that nobody listens to SIGTERM
    is_there = wait_until(lambda: bool(processes_of(process.pid)[waited]), process, f"the {waited}")
    is_there = is_there and wait_until(
        lambda: count_lines(run_dir) not in range(before, before + some), process, "lines"
    )
    time.sleep(float(rng.uniform(0, 0.04)))
    found = processes_of(process.pid)
    pids = sorted({pid for group in found.values() for pid in group})
    if not is_there or not found[victim]:
        finish(process)
        return False
    number = signal.SIGTERM if victim == "command" else signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(int(rng.choice(found[victim])), number)
    _, stderr = process.communicate(timeout=LIMIT_S)
    if is_at_its_end(process.returncode, run_dir):
        return False
    codes = {"launcher": -signal.SIGKILL, "command": 128 + signal.SIGTERM}
    assert process.returncode == codes.get(victim, 1), stderr
    assert re.search(EXPECTED[victim], stderr), stderr
    end = time.monotonic() + LIMIT_S
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(is_alive, pids)), f"left behind: {found}"
    return True


def is_at_its_end(code: int, run_dir: Path) -> bool:
    """Nobody missed the victim: the run had been trained. The launcher no longer listens to SIGTERM then."""
    return code == 0 or (code == -signal.SIGTERM and (run_dir / "report.json").exists())


def finish(process: subprocess.Popen[str]) -> str:
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, stderr
    return stdout


def compare(lab, run_dir: Path, reference: Path, steps: int) -> None:
    """Everything that a run leaves behind, wall times aside."""
    assert list_steps(run_dir)[-1] == list_steps(reference)[-1] == steps
    for step in set(list_steps(run_dir)) & set(list_steps(reference)):  # one told to end made one more
        name = f"checkpoints/step-{step:08d}"
        lab.same_checkpoint(run_dir / name, reference / name)
    assert not [p.name for p in run_dir.rglob("*.tmp.*")]
    without_times = [
        [{k: v for k, v in line.items() if not k.endswith("_s") and k not in OF_THE_MOMENT} for line in lines]
        for lines in map(lab.metrics_of, (run_dir, reference))
    ]
    assert without_times[0] == without_times[1], "lines twice, missing or different"
    assert [line["step"] for line in lab.metrics_of(run_dir, "train")] == list(range(1, steps + 1))
    assert (run_dir / "report.json").read_bytes() == (reference / "report.json").read_bytes()


def live_through_kills(
    lab,
    store: Path,
    folder: Path,
    *,
    victims: int | list[str],
    seed: int,
    settings: tuple[str, ...],
) -> None:
    """One run killed again and again, beside one that nobody touched; `victims` may say how often each is killed."""
    reference = folder / "reference"
    finish(lab.start_command(store, reference, *settings))
    steps = lab.metrics_of(reference, "train")[-1]["step"]
    rng = np.random.default_rng(seed)
    left = rng.permutation([*EXPECTED] * victims).tolist() if isinstance(victims, int) else [*victims]
    assert left
    most_runs = 10 * len(left)
    run_dir, runs = new_run(folder, reference, 0), 1
    while left:
        assert runs <= most_runs, f"{left} are left: runs ended before they could be killed"
        if kill_one(lab.start_command(store, run_dir, *settings), run_dir, left[-1], rng):
            left.pop()
        else:  # it was faster than the kill: the next run begins
            compare(lab, run_dir, reference, steps)
            run_dir, runs = new_run(folder, reference, runs), runs + 1
    finish(lab.start_command(store, run_dir, *settings))
    compare(lab, run_dir, reference, steps)


def new_run(folder: Path, reference: Path, number: int) -> Path:
    """A folder that has the kernels of the reference where a device compiles some: another choice has other bits."""
    run_dir = folder / f"run{number}"
    if (reference / KERNELS_NAME).exists():
        shutil.copytree(reference / KERNELS_NAME, run_dir / KERNELS_NAME)
    return run_dir


FAST = ("steps=30", "rows.rows_per_step=2", "eval_every=7", "checkpoint_every=2", "keep=2")


def test_a_few_kills_change_nothing(lab, tiny_store, tmp_path):
    live_through_kills(lab, tiny_store, tmp_path, victims=1, seed=0, settings=FAST)


def test_kills_of_one_of_two_ranks_change_nothing(lab, tiny_store, tmp_path):
    settings = (*FAST, "devices='cpu,cpu'")
    live_through_kills(lab, tiny_store, tmp_path, victims=["loader", "trainer"], seed=1, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 6])
def test_many_kills_of_one_of_two_ranks_change_nothing(lab, tiny_store, tmp_path, seed):
    settings = ("steps=60", "rows.rows_per_step=3", "eval_every=7", "checkpoint_every=5", "devices='cpu,cpu'")
    live_through_kills(lab, tiny_store, tmp_path, victims=3, seed=seed, settings=settings)


@pytest.mark.slow
def test_sigterm_at_the_same_run_again_and_again(lab, tiny_store, tmp_path):
    """Also while an exam is under way: it is broken off, and held when the run goes on."""
    settings = ("steps=40", "eval_every=1", "checkpoint_every=10", "keep=2")
    live_through_kills(lab, tiny_store, tmp_path, victims=["command"] * 8, seed=7, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_kills_change_nothing(lab, tiny_store, tmp_path, seed):
    names = [("optim.name=adamw",), ("dtype=bfloat16",), ("loss.weights=dpace",), ("checkpoint_every=1", "keep=1")]
    settings = ("steps=60", "rows.rows_per_step=2", "eval_every=7", "checkpoint_every=5", *names[seed - 1])
    live_through_kills(lab, tiny_store, tmp_path, victims=4, seed=seed, settings=settings)


@pytest.mark.gpu
def test_kills_on_a_gpu_change_nothing(lab, tiny_store, tmp_path):
    """With CUDA graphs and compiled kernels, which lie in the run's folder and are found there again."""
    settings = ("steps=80", "rows.rows_per_step=2", "eval_every=25", "checkpoint_every=2", "keep=2")
    settings += ("devices=cuda:0", "drafter.head_dim=32", "stall_s=600")
    live_through_kills(lab, tiny_store, tmp_path, victims=2, seed=3, settings=settings)
