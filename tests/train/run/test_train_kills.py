"""SIGKILL at random moments to launcher, trainer and loader: the same command ends in the same bits.

Each life of a run is `dflash train` in a process of its own, as a user starts it.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from dflash_offline.train.checkpoint import list_steps
from processes import is_alive

LIMIT_S = 60.0
EXPECTED = {"launcher": "", "trainer": "trainer was killed by SIGKILL", "loader": "loader was killed by SIGKILL"}


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def processes_of(launcher: int) -> dict[str, int]:
    """Process ids by name, of those that have been started so far."""
    found = {"launcher": launcher}
    for name in ("trainer", "loader"):
        parent = list(found.values())[-1]
        children = children_of(parent)
        if not children:
            break
        found[name] = children[0]
    return found


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
    is_there = wait_until(lambda: victim in processes_of(process.pid), process, f"the {victim}")
    is_there = is_there and wait_until(
        lambda: count_lines(run_dir) not in range(before, before + some), process, "lines"
    )
    time.sleep(float(rng.uniform(0, 0.04)))
    pids = processes_of(process.pid)
    if not is_there or victim not in pids:
        finish(process)
        return False
    os.kill(pids[victim], signal.SIGKILL)
    _, stderr = process.communicate(timeout=LIMIT_S)
    if victim == "loader" and process.returncode == 0:  # its last row was delivered: nobody missed it
        return False
    assert process.returncode == (-signal.SIGKILL if victim == "launcher" else 1), stderr
    assert EXPECTED[victim] in stderr
    end = time.monotonic() + 10.0
    while any(map(is_alive, pids.values())) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(is_alive, pids.values())), f"left behind: {pids}"
    return True


def finish(process: subprocess.Popen[str]) -> str:
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, stderr
    return stdout


def compare(lab, run_dir: Path, reference: Path, steps: int) -> None:
    """Everything that a run leaves behind, wall times aside."""
    assert list_steps(run_dir) == list_steps(reference)
    for step in list_steps(reference):
        name = f"checkpoints/step-{step:08d}"
        lab.same_checkpoint(run_dir / name, reference / name)
    assert not [p.name for p in run_dir.rglob("*.tmp.*")]
    without_times = [
        [{k: v for k, v in line.items() if not k.endswith("_s")} for line in lab.metrics_of(folder)]
        for folder in (run_dir, reference)
    ]
    assert without_times[0] == without_times[1], "lines twice, missing or different"
    assert [line["step"] for line in lab.metrics_of(run_dir, "train")] == list(range(1, steps + 1))
    assert (run_dir / "report.json").read_bytes() == (reference / "report.json").read_bytes()


def live_through_kills(lab, store: Path, folder: Path, *, kills: int, seed: int, settings: tuple[str, ...]) -> None:
    """One run killed again and again, beside one that nobody touched."""
    reference = folder / "reference"
    finish(lab.start_command(store, reference, *settings))
    steps = lab.metrics_of(reference, "train")[-1]["step"]
    rng = np.random.default_rng(seed)
    victims = rng.permutation([*EXPECTED] * (kills // len(EXPECTED))).tolist()
    run_dir, runs = folder / "run0", 1
    while victims:
        if kill_one(lab.start_command(store, run_dir, *settings), run_dir, victims[-1], rng):
            victims.pop()
        else:  # it was faster than the kill: the next run begins
            compare(lab, run_dir, reference, steps)
            run_dir, runs = folder / f"run{runs}", runs + 1
    finish(lab.start_command(store, run_dir, *settings))
    compare(lab, run_dir, reference, steps)


def test_a_dozen_kills_change_nothing(lab, tiny_store, tmp_path):
    settings = ("steps=30", "rows.rows_per_step=2", "eval_every=7", "checkpoint_every=2", "keep=2")
    live_through_kills(lab, tiny_store, tmp_path, kills=12, seed=0, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_kills_change_nothing(lab, tiny_store, tmp_path, seed):
    names = [("optim.name=adamw",), ("dtype=bfloat16",), ("loss.weights=dpace",), ("checkpoint_every=1", "keep=1")]
    settings = ("steps=60", "rows.rows_per_step=2", "eval_every=7", "checkpoint_every=5", *names[seed - 1])
    live_through_kills(lab, tiny_store, tmp_path, kills=15, seed=seed, settings=settings)
