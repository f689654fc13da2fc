"""The families of chat templates, for every test here."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def families() -> ModuleType:
    """The functions and chats of `families.py`."""
    spec = importlib.util.spec_from_file_location("families", Path(__file__).with_name("families.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
