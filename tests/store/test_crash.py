"""SIGKILL at every step, and at random moments to many writers at once: nothing lost, nothing twice, nothing left."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def run(program: str, *arguments: str, environment: dict[str, str]) -> dict[str, int]:
    command = [sys.executable, str(Path(__file__).with_name(program)), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_killed_at_every_step(memory_folder: Path, python_environment: dict[str, str]) -> None:
    steps = run("killed_at_every_step.py", str(memory_folder), environment=python_environment)
    assert steps["create"] > 20
    assert steps["fill"] > 10 * steps["segments"]


@pytest.mark.parametrize(
    "codec, kills",
    [
        ("raw", 14),
        pytest.param("raw", 60, marks=pytest.mark.slow),
        pytest.param("zstd", 60, marks=pytest.mark.slow),
        pytest.param("int8:2", 60, marks=pytest.mark.slow),
    ],
)
def test_killed_writers(tmp_path: Path, python_environment: dict[str, str], codec: str, kills: int) -> None:
    """Four to six writers at once, each round another number of them, each killed at its own moment."""
    counts = run("killed_writers.py", str(tmp_path), str(kills), str(kills), codec, environment=python_environment)
    assert counts["kills"] >= kills
    assert counts["rounds"] >= 3
