"""`--responses target`: the answers are exactly what the target writes, one prompt at a time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.config import PrepareConfig
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.responses import generation_batches
from dflash_offline.extract.targets.hf import load_target
from dflash_offline.extract.targets.tasks import distinct_tasks
from dflash_offline.store.samples import SampleTable
from hypothesis import given
from hypothesis import strategies as st

LIMIT = 40


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    """Short tasks of the corpus that the packaged target was trained on, in an order of mixed lengths."""
    tasks = [t for t in distinct_tasks(60, 5, held_out=True) if t.kind in ("list", "function", "multiples")][:12]
    return [{"messages": [{"role": "user", "content": t.prompt}], "task": t.kind} for t in tasks]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory, prompts: list[dict[str, Any]]) -> tuple[Path, dict[str, int]]:
    folder = tmp_path_factory.mktemp("answered")
    (folder / "in.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    config = PrepareConfig(
        target="tiny",
        responses="target",
        out=str(folder / "data"),
        max_new_tokens=LIMIT,
        token_budget=400,
        min_trained=2,
    )
    return folder / "data", prepare(config, [str(folder / "in.jsonl")]).counts


def test_answers_are_the_targets_own_greedy_ids(
    answered: tuple[Path, dict[str, int]], prompts: list[dict[str, Any]]
) -> None:
    """The slow reference: `generate` of transformers, one prompt after another."""
    target = load_target("tiny")
    table = SampleTable(answered[0])
    assert len(table) == len(prompts)
    num_cut = 0
    for row, prompt in enumerate(prompts):
        ids, mask = table.tokens(row)
        asked = target.tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, return_dict=False)
        given_ids = torch.tensor([asked])
        out = target.model.generate(
            given_ids, attention_mask=torch.ones_like(given_ids), max_new_tokens=LIMIT, do_sample=False
        )
        assert ids.tolist() == out[0].tolist()
        assert mask.tolist() == [False] * len(asked) + [True] * (len(ids) - len(asked))
        num_cut += ids[-1] not in target.facts.eos_ids
    assert answered[1]["answers_cut"] == num_cut
    assert 0 < num_cut < len(prompts), "both kinds of end are seen"


def test_generated_data_knows_its_target(answered: tuple[Path, dict[str, int]]) -> None:
    facts = json.loads((answered[0] / "data.json").read_text())["facts"]
    responses = facts["responses"]
    assert (responses["origin"], responses["decoding"], responses["max_new_tokens"]) == ("target", "greedy", LIMIT)
    assert responses["dtype"] == "float32"
    assert responses["weights_sha256"] == load_target("tiny").facts.weights_sha256


def test_token_budget_changes_no_answer(
    answered: tuple[Path, dict[str, int]], prompts: list[dict[str, Any]], tmp_path: Path, write_lines: Any
) -> None:
    config = PrepareConfig(
        target="tiny",
        responses="target",
        out=str(tmp_path / "data"),
        max_new_tokens=LIMIT,
        token_budget=1,
        min_trained=2,
    )
    prepare(config, [write_lines(tmp_path / "in.jsonl", prompts)])
    assert SampleTable(tmp_path / "data").fingerprint() == SampleTable(answered[0]).fingerprint()


def test_given_answers_are_replaced_and_bad_prompts_left_out(tmp_path: Path, write_lines: Any, chat: Any) -> None:
    lines = [
        {"messages": chat("List lamp 3 times.", "no")},
        {"prompt": "List lamp 3 times."},
        {"messages": [{"role": "assistant", "content": "Hello."}]},
        {"prompt": "x" * 2000},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"input_ids": [7, 8, 9], "loss_mask": [1, 1, 1]},
        {"input_ids": [7, 8, 9, 10, 11], "loss_mask": [0, 0, 0, 1, 1]},
        {"text": "L"},
    ]
    config = PrepareConfig(
        target="tiny",
        responses="target",
        out=str(tmp_path / "data"),
        max_new_tokens=60,
        min_trained=2,
        duplicates="keep",
    )
    counts = prepare(config, [write_lines(tmp_path / "in.jsonl", lines)]).counts
    assert counts["left_out"] == {"no question": 2, "prompt fills the window": 1, "template error": 1}
    assert (counts["lines_in"], counts["lines_used"], counts["answers_replaced"]) == (8, 4, 2)
    table = SampleTable(tmp_path / "data")
    assert table.tokens(0)[0].tolist() == table.tokens(1)[0].tolist()
    assert [table.tokens(row)[1].argmax() for row in (2, 3)] == [3, 1]


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:99", "0"])
def test_a_device_that_is_not_there(tmp_path: Path, write_lines: Any, device: str) -> None:
    lines = [write_lines(tmp_path / "in.jsonl", [{"prompt": "q"}])]
    with pytest.raises(UserError, match=f"device = '{device}'") as caught:
        prepare(PrepareConfig(target="tiny", responses="target", out=str(tmp_path / "data"), device=device), lines)
    assert len(str(caught.value).splitlines()) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_answers_stop_at_the_longest_sample(tmp_path: Path, write_lines: Any) -> None:
    config = PrepareConfig(
        target="tiny", responses="target", out=str(tmp_path / "data"), max_new_tokens=500, max_length=40, min_trained=2
    )
    prepare(config, [write_lines(tmp_path / "in.jsonl", [{"prompt": "List lamp 12 times."}])])
    assert SampleTable(tmp_path / "data").column("num_tokens").tolist() == [40]


@given(
    st.lists(st.integers(1, 30), max_size=60),
    st.integers(1, 20),
    st.integers(31, 60),
    st.integers(1, 300),
)
def test_generation_batches(lengths: list[int], max_new: int, longest: int, budget: int) -> None:
    batches = list(generation_batches(lengths, max_new, longest, budget))
    assert sorted(place for places, _ in batches for place in places) == list(range(len(lengths)))
    for places, num_new in batches:
        (length,) = {lengths[place] for place in places}
        assert num_new == min(max_new, longest - length)
        assert len(places) == 1 or len(places) * (length + num_new) <= budget
