"""z-lab's runtime in an environment of its own, made once per test run."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

PACKAGES = ["torch==2.13.0", "transformers==5.15.0", "tqdm", "jinja2", "numpy"]


@pytest.fixture(scope="session")
def zlab_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with `dflash` 0.1.0 and the transformers it asks for."""
    folder = tmp_path_factory.mktemp("zlab")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*install, *PACKAGES], check=True, stdout=sys.stderr)
    subprocess.run([*install, "--no-deps", "dflash==0.1.0"], check=True, stdout=sys.stderr)
    return python
