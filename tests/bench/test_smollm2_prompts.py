"""The prompts of the SmolLM2 benchmark: enough of them, the same every time, and none on both sides of the split."""

import json
import sys
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def bench() -> Any:
    spec = spec_from_file_location("smollm2_prompts", Path(__file__).with_name("smollm2_prompts.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def test_the_default_run_gets_distinct_prompts_of_every_kind(bench: Any) -> None:
    train = bench.questions(16_000, 0, held_out=False)
    held_out = bench.questions(250, 0, held_out=True)
    texts = {question.text for question in train}
    assert len(texts) == 16_000
    assert len({question.text for question in held_out}) == 250
    assert texts.isdisjoint(question.text for question in held_out)
    kinds = Counter(question.kind for question in train)
    assert len(kinds) >= 12
    assert min(kinds.values()) > 16_000 / len(kinds) / 2
    assert not [text for text in texts if "{" in text or "}" in text]


def test_prompts_follow_from_the_seed(bench: Any) -> None:
    assert bench.questions(50, 3, held_out=False) == bench.questions(200, 3, held_out=False)[:50]
    assert bench.questions(50, 3, held_out=False) != bench.questions(50, 4, held_out=False)


def test_a_line_says_its_side_and_kind(bench: Any) -> None:
    for is_held_out, split in ((False, "train"), (True, "heldout")):
        question = bench.questions(1, 0, held_out=is_held_out)[0]
        line = json.loads(question.line())
        assert line == {
            "messages": [{"role": "user", "content": question.text}],
            "task": question.kind,
            "split": split,
        }


def test_a_gap_that_comes_twice_says_the_same(bench: Any) -> None:
    left = [q.text for q in bench.questions(2000, 0, held_out=False) if q.text.endswith("are left?")]
    assert left
    for text in left:
        fruit = text.split()[3]
        assert text.endswith(f"How many {fruit} are left?")


def test_too_few_words_for_the_prompts_asked_for_are_an_error(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TEMPLATES", {"poem": ("Write a poem of {n} lines.",)})
    with pytest.raises(SystemExit, match=r"only \d of 100 prompts"):
        bench.questions(100, 0, held_out=False)
