"""Sweeps on the tiny store of tests/train/run: its functions, and what a sweep leaves behind."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_offline.settings import resolve
from dflash_offline.train.sweep.config import SweepConfig
from dflash_offline.train.sweep.report import SweepReport
from dflash_offline.train.sweep.sweep import sweep

BASE = {
    "steps": 12,
    "rows.row_tokens": 128,
    "rows.anchors": 16,
    "drafter.num_layers": 1,
    "drafter.block_size": 8,
    "optim.lr": 0.01,
    "eval_every": 6,
    "checkpoint_every": 3,
    "cpu_threads": 1,
    "stall_s": 300,
}
OF_THE_MOMENT = ("draft_s", "train_s")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def runs_lab() -> ModuleType:
    """The functions of tests/train/run/conftest.py: test modules cannot import each other."""
    path = Path(__file__).parents[1] / "run" / "conftest.py"
    spec = importlib.util.spec_from_file_location("conftest_of_runs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory: pytest.TempPathFactory, runs_lab: ModuleType) -> Path:
    """A complete store, shared by all tests; nobody writes to it."""
    return runs_lab.make_store(tmp_path_factory.mktemp("tiny"))


def config_of(store: Path, out: Path, **own: Any) -> SweepConfig:
    settings = {"store": str(store), "out": str(out), "devices": "cpu,cpu", **own}
    return resolve(SweepConfig, name="sweep", options=settings)


def train_here(store: Path, out: Path, base: dict[str, Any] | None = None, **own: Any) -> SweepReport:
    """The sweep with this process as its launcher."""
    return sweep(config_of(store, out, **own), BASE | (base or {}), no_exam)


def no_exam(*_: Any) -> Any:
    raise AssertionError("nothing is confirmed here")


def write_file(folder: Path, text: str, base: dict[str, Any] | None = None) -> Path:
    """A config file with these lines below [sweep], and the base settings below [train]."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in (BASE | (base or {})).items()]
    path = folder / "sweep.toml"
    path.write_text("\n".join(["[sweep]", text, "[train]", *lines, ""]))
    return path


def start_command(file: Path, store: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    """`dflash sweep` in a process of its own, as a user runs it."""
    command = [sys.executable, "-m", "dflash_offline.cli", "sweep", "--config", str(file), "--store", str(store)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--out", str(out), "--devices", "cpu,cpu", *options],
        env=environment,
        cwd=file.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def content_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "sweep.json").read_text())


def lasting(out: Path) -> dict[str, Any]:
    """What must be the same however often a sweep was killed: all of sweep.json but times and devices."""
    content = content_of(out)
    for run in content["runs"]:
        run["results"] = {k: v for k, v in (run["results"] or {}).items() if k not in OF_THE_MOMENT}
        del run["device"]
    return {name: content[name] for name in ("runs", "ranking", "effects")}


@pytest.fixture(scope="session")
def lab() -> SimpleNamespace:
    functions = (config_of, train_here, write_file, start_command, content_of, lasting)
    return SimpleNamespace(base=BASE, **{function.__name__: function for function in functions})
