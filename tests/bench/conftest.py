"""The benchmarks are scripts: what one imports lies beside it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def parts_in_reach() -> Iterator[None]:
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)
