"""Whole sweeps: kills of launcher, runs and loaders change nothing; failures are named; more runs may be added."""

import json
import os
import signal
import subprocess
import threading
from multiprocessing.connection import Pipe
from pathlib import Path

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.train.checkpoint import list_steps
from dflash_offline.train.start import run_trainer
from dflash_offline.watch import Channel
from processes import children, is_alive, wait_until

LIMIT_S = 900.0
SHARED = ("step", "acceptance_length", "acceptance_length_cycles", "intervals", "num_cycles")


def same_runs(runs_lab, out: Path, reference: Path) -> None:
    """Asserts that every run has the same last checkpoint, to the bit."""
    for folder in sorted((reference / "runs").iterdir()):
        name = f"runs/{folder.name}/checkpoints/step-{list_steps(folder)[-1]:08d}"
        runs_lab.same_checkpoint(out / name, reference / name)


def kill_run(name: str, run_dir: Path, lines: int) -> threading.Thread:
    """A thread that kills a run's process, a child of this one, once it has written so many lines."""

    def wait_and_kill() -> None:
        path = run_dir / "metrics.jsonl"
        assert wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= lines, LIMIT_S)
        (pid,) = [pid for pid, found in children(os.getpid(), name).items() if found == name]
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=wait_and_kill)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(lab, runs_lab, tiny_store, tmp_path, capfd):
    out = tmp_path / "sweep"
    base = {"checkpoint_every": 2, "steps": 60, "eval_every": 30}  # long enough to be killed on its way
    own = {"fields": {"optim.lr": [0.01, 0.02, 0.03]}, "base": base}
    killer = kill_run("run 2", out / "runs/0002", 4)
    report = lab.train_here(tiny_store, out, **own)
    killer.join()
    assert [run.state for run in report.sweep.runs] == ["finished", "interrupted", "finished"]
    assert not report.is_sound
    assert "run 2 interrupted at step" in report.text()
    assert "run 2 was killed by SIGKILL" in report.text()
    kept = [run.results for run in report.sweep.runs]
    capfd.readouterr()
    report = lab.train_here(tiny_store, out, **own)
    assert report.is_sound
    assert " on cpu: " in (said := capfd.readouterr().err)
    assert "run 1 " not in said, "finished runs are kept"
    assert [run.results for run in report.sweep.runs][::2] == kept[::2]
    alone = tmp_path / "alone"
    settings = {**lab.base, **base, "optim.lr": 0.02}
    config = runs_lab.make_config(tiny_store, alone, *(f"{name}={value}" for name, value in settings.items()))
    _ours, theirs = Pipe()
    run_trainer(Channel(theirs, "trainer"), config)
    for name in ("drafter.safetensors", "optimizer.pt", "state.json"):
        place = f"checkpoints/step-00000060/{name}"
        assert (out / "runs/0002" / place).read_bytes() == (alone / place).read_bytes()
    evaluation = json.loads((out / "runs/0002/evaluation-offline.json").read_text())
    results = lab.content_of(out)["runs"][1]["results"]
    assert {name: results[name] for name in SHARED} == {name: evaluation[name] for name in SHARED}
    assert (out / "effects.png").exists()
    assert not list(out.glob("*.tmp.*"))


TWELVE = """
fields."optim.lr" = [1e-4, 0.01, 0.03]
fields."drafter.num_layers" = [1, 2]
fields."loss.weights" = ["decay", "uniform"]
halving.steps = [8, 16]
halving.keep = 0.5
"""
LONGER = {"steps": 24, "rows.anchors": 32, "eval_every": 24, "checkpoint_every": 3}


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, stderr
    return stdout


def victims_of(process: subprocess.Popen[str], victim: str) -> list[int]:
    """Living processes of a sweep by what they are."""
    runs = list(children(process.pid, "run "))
    loaders = [pid for run in runs for pid in children(run, "loader")]
    return {"launcher": [process.pid], "run": runs, "loader": loaders}[victim]


def count_lines(out: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in out.glob("runs/*/metrics.jsonl"))


def kill_one(process: subprocess.Popen[str], out: Path, victim: str, rng: np.random.Generator) -> bool:
    """Kills one of the victims some updates later; False where it or the sweep ended before."""
    wanted = count_lines(out) + int(rng.integers(0, 30))
    is_time = wait_until(lambda: process.poll() is not None or count_lines(out) > wanted, LIMIT_S)
    assert is_time, "updates"
    assert wait_until(lambda: process.poll() is not None or bool(victims_of(process, victim)), LIMIT_S)
    found = victims_of(process, victim)
    if process.poll() is not None or not found:
        return False
    family = [process.pid, *victims_of(process, "run"), *victims_of(process, "loader")]
    try:
        os.kill(int(rng.choice(found)), signal.SIGKILL)
    except ProcessLookupError:
        return False
    if victim == "launcher":
        process.wait(timeout=LIMIT_S)
        assert wait_until(lambda: not any(map(is_alive, family)), LIMIT_S), "left behind"
    return True


@pytest.mark.slow
def test_a_sweep_of_twelve_runs_with_kills_in_the_middle_changes_nothing(lab, runs_lab, tiny_store, tmp_path):
    """One sweep after another, a new one when one ended in spite of its kills, until so many of each kind."""
    file = lab.write_file(tmp_path, TWELVE, LONGER)
    reference = tmp_path / "reference"
    text = finish(lab.start_command(file, tiny_store, reference))
    content = lab.content_of(reference)
    assert [run["state"] for run in content["runs"]].count("finished") == 3
    assert [run["state"] for run in content["runs"]].count("out") == 9
    assert "effects on the acceptance length at step 8" in text
    rng = np.random.default_rng(0)
    left, number = ["launcher", "run", "loader"] * 2, 0
    while left:
        assert number < 12, f"{left} are left: sweeps ended before they could be killed"
        process = lab.start_command(file, tiny_store, tmp_path / f"killed-{number}")
        if kill_one(process, tmp_path / f"killed-{number}", left[0], rng):
            left.pop(0)
        _, stderr = process.communicate(timeout=LIMIT_S)
        assert process.returncode in (0, 1, -signal.SIGKILL), stderr
        if process.returncode == 1:
            assert "interrupted at step" in stderr
        number += process.returncode == 0
    for out in sorted(tmp_path.glob("killed-*")):
        finish(lab.start_command(file, tiny_store, out))
        assert lab.lasting(out) == lab.lasting(reference)
        same_runs(runs_lab, out, reference)
        assert not [path for path in out.glob("*.tmp.*")]


@pytest.mark.slow
def test_sigterm_leaves_checkpoints_and_the_same_command_goes_on(lab, tiny_store, tmp_path):
    file = lab.write_file(tmp_path, "fields.seed = [1, 2]", {"steps": 4000, "checkpoint_every": 4000})
    out = tmp_path / "out"
    process = lab.start_command(file, tiny_store, out)
    paths = [out / f"runs/000{number}/metrics.jsonl" for number in (1, 2)]
    assert wait_until(lambda: all(path.exists() and path.read_bytes().count(b"\n") > 5 for path in paths), LIMIT_S)
    process.terminate()
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM
    for run in lab.content_of(out)["runs"]:
        assert (run["state"], run["error"]) == ("interrupted", "told to end, with a checkpoint")
        assert list_steps(out / run["folder"])[-1] == run["step"] > 0


@pytest.mark.slow
def test_runs_may_be_added_and_nothing_else_changed(lab, tiny_store, tmp_path):
    out = tmp_path / "out"
    fields = {"optim.lr": {"low": 1e-3, "high": 1e-1, "scale": "log"}}
    own = {"strategy": "random", "fields": fields, "base": {"steps": 4}}
    lab.train_here(tiny_store, out, count=2, **own)
    before = {run["number"]: run for run in lab.content_of(out)["runs"]}
    with pytest.raises(UserError, match="train.steps was 4 and is now 5"):
        lab.train_here(tiny_store, out, strategy="random", fields=fields, base={"steps": 5}, count=2)
    report = lab.train_here(tiny_store, out, count=3, **own)
    assert report.is_sound
    runs = lab.content_of(out)["runs"]
    assert [run["number"] for run in runs] == [1, 2, 3]
    assert {run["number"]: run for run in runs[:2]} == before
    with pytest.raises(UserError, match="run 3 .* is no longer among them"):
        lab.train_here(tiny_store, out, count=2, **own)
    kept = (out / "sweep.toml").read_text()
    file = tmp_path / "again.toml"
    file.write_text(kept)
    process = lab.start_command(file, tiny_store, out)
    assert "sweep of 3 runs: 3 finished" in finish(process)


@pytest.mark.slow
def test_the_exit_code_is_1_where_a_run_failed(lab, tiny_store, tmp_path):
    """A learning rate that spoils the weights ends its own run alone, and comes last at its rung."""
    runs = '{ "optim.lr" = 1e6, "optim.weight_decay" = 1e6 }, { "optim.lr" = 0.01 }, { "optim.lr" = 0.02 }'
    text = f"strategy = 'list'\nruns = [{runs}]\nhalving.steps = [6]\nhalving.keep = 0.6"
    file = lab.write_file(tmp_path, text, {"optim.clip": 0.0, "optim.name": "adamw", "dtype": "bfloat16"})
    process = lab.start_command(file, tiny_store, tmp_path / "out")
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, stderr
    states = {run["number"]: run["state"] for run in lab.content_of(tmp_path / "out")["runs"]}
    assert states == {1: "failed", 2: "finished", 3: "finished"}
    assert "run 1 failed at step" in stdout
    assert "run 1 failed at step" in stderr
