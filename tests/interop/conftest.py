"""z-lab's runtime in an environment of its own, made once per test run."""

from pathlib import Path

import pytest
from environments import make_environment

# Torch and transformers are those that dflash 0.1.0 pins itself. The test is kept for transformers 5.15 to 5.19, and
# zlab_side.py refuses others; it passed with 5.15.0 and 5.19.0 (2026-11-30, CPU).
PACKAGES = ["torch==2.13.0", "transformers==5.15.0", "tqdm", "jinja2", "numpy"]


@pytest.fixture(scope="session")
def zlab_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with `dflash` 0.1.0 and the transformers it asks for."""
    return make_environment(tmp_path_factory.mktemp("zlab"), PACKAGES, ["dflash==0.1.0"])
