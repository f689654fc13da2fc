"""The targets and drafters of the tests of `evaluate`, and the stand-in for vLLM."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

HERE = Path(__file__).parent
found = spec_from_file_location("evaluate_conftest", HERE.parent / "evaluate" / "conftest.py")
assert found is not None
assert found.loader is not None
evaluate = module_from_spec(found)
sys.modules[found.name] = evaluate  # its fixture `lab` looks itself up
found.loader.exec_module(evaluate)

lab, make_exam, tiny_run, one_thread = evaluate.lab, evaluate.make_exam, evaluate.tiny_run, evaluate.one_thread


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m vllm.entrypoints.openai.api_server` is the stand-in, in processes that a test starts."""
    root = Path(sys.modules["dflash_offline"].__file__ or "").parent
    package = root.parent if root.name == "dflash_offline" else root
    monkeypatch.setenv("PYTHONPATH", f"{HERE / 'stand_in'}:{package}:{Path.cwd()}")
