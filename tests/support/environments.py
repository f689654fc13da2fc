"""An environment of its own for code that is not ours."""

import subprocess
import sys
import venv
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
