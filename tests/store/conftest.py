"""The small store of `small_store.py` as fixtures, and the environment for its program."""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).with_name("small_store.py")


def loaded(path: Path) -> ModuleType:
    """A module beside the tests, which are no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def small() -> ModuleType:
    """The functions of `small_store.py`."""
    return loaded(PROGRAM)


@pytest.fixture(scope="session")
def lab() -> ModuleType:
    """The functions of `recode_stores.py`."""
    return loaded(Path(__file__).with_name("recode_stores.py"))


@pytest.fixture(scope="session")
def python_environment() -> dict[str, str]:
    """Lets a child process import what this one imports."""
    paths = [path for path in sys.path if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def program(small: ModuleType) -> list[str]:
    """The command that runs one killable writer."""
    return [sys.executable, str(PROGRAM)]


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one, for tests that lay down hundreds of small stores."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as name:
        yield Path(name)
