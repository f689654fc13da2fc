"""The demo's commands on a CUDA device, from prompts to an export, on both packaged targets.

Needs a GPU: generation, extraction, training, both evaluations and the export all run there.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
TIE = 0.25
"""Largest gap of two bfloat16 logits that rounding may turn over; the logits here reach 30, whose step is 0.125."""


def dflash(*line: str) -> str:
    command = [sys.executable, "-m", "dflash_offline.cli", *line]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module", params=["tiny", "tiny-hybrid"])
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished demo."""
    if request.param == "tiny-hybrid":
        pytest.importorskip("fla", reason="a hybrid on CUDA needs flash-linear-attention")
    out = tmp_path_factory.mktemp(request.param) / "demo"
    print(dflash("demo", "--out", str(out), "--target", request.param))
    return out


def evaluation(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_it_ran_on_the_device_in_bfloat16(demo: Path) -> None:
    found = evaluation(demo / "run" / "evaluation.json")
    assert found["device"].startswith("cuda")
    assert found["target_dtype"] == found["drafter_dtype"] == "bfloat16"
    assert (
        json.loads((demo / "store" / "zarr.json").read_text())["attributes"]["dflash"]["target"]["dtype"] == "bfloat16"
    )
    assert (demo / "export" / "model.safetensors").is_file()


def test_it_learns_and_the_offline_walk_says_so_too(demo: Path) -> None:
    decoded = evaluation(demo / "run" / "evaluation.json")["acceptance_length"]
    walked = evaluation(demo / "run" / "evaluation-offline.json")["acceptance_length"]
    lines = [json.loads(line) for line in (demo / "run" / "metrics.jsonl").read_text().splitlines()]
    untrained = next(line["acceptance_length"] for line in lines if line["kind"] == "exam")
    print(f"acceptance length: untrained {untrained:.3f}, decoded {decoded:.3f}, walked {walked:.3f}")
    assert untrained < 1.1
    assert decoded > 5.0
    assert abs(decoded - walked) < 0.2


def test_in_bfloat16_answers_differ_only_at_ties(demo: Path) -> None:
    found = evaluation(demo / "run" / "evaluation.json")
    print(f"equal in bfloat16: {found['num_equal']}/{found['num_prompts']}")
    assert found["num_prompts"] == 64
    assert found["num_equal"] >= 58
    for mismatch in found["mismatches"]:
        assert abs(mismatch["logit_gap"]) <= TIE


def test_in_float32_all_64_answers_are_the_target_s_own(demo: Path) -> None:
    out = demo / "float32.json"
    line = ["evaluate", str(demo / "run"), "--prompts", str(demo / "exam.jsonl"), "--max-new-tokens", "192"]
    dflash(*line, "--set", "dtype=float32", "--out", str(out))
    found = evaluation(out)
    print(f"equal in float32: {found['num_equal']}/{found['num_prompts']}, acceptance {found['acceptance_length']:.3f}")
    assert (found["num_equal"], found["num_prompts"]) == (64, 64)
    assert found["target_dtype"] == "float32"
