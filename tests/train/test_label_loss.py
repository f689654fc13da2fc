"""The Triton kernels of the label losses against the plain arithmetic, on a CUDA device and by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SIDE = Path(__file__).parent / "label_loss_side.py"
TRITON = "triton==3.9.0"


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SIDE.parent))
    import label_loss_side

    return label_loss_side


@pytest.mark.gpu
def test_kernels_on_a_device_are_the_plain_arithmetic(side) -> None:
    """At a vocabulary that a program goes through in many pieces, too."""
    cuda = torch.device("cuda")
    side.look_at_edges(cuda)
    assert side.compare_all(cuda, (5, 4096, 151_936)) == 2 * 4 * 4 * 2 * 3


@pytest.mark.slow
def test_kernels_in_the_interpreter_are_the_plain_arithmetic(tmp_path: Path) -> None:
    """Triton in a folder of its own: beside torch's CPU build nothing else asks for it."""
    folder = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*install, "--target", str(folder), TRITON], check=True)
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))
    done = subprocess.run(
        [sys.executable, str(SIDE)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{2 * 4 * 4 * 2 * 3} comparisons\n"
