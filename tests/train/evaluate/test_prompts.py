"""The prompts of an exam from files of any format, and conversations that go on after the target's answer."""

import gzip
import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dflash_offline import UserError
from dflash_offline.extract.questions import read_lines, read_questions
from dflash_offline.extract.targets.hf import load_target
from dflash_offline.train.evaluate.acceptance import Acceptance
from dflash_offline.train.evaluate.evaluate_report import Comparison, PromptOutcome
from dflash_offline.train.evaluate.prompts import STANDARD, asked_prompts, ids_sha256, opened_lines
from dflash_offline.train.evaluate.turns import examine_turns, fitting

TINY: Any = load_target("tiny", dtype="float32")
LINES = [
    {"question": "How many?", "answer": "#### 4", "id": 9},
    {"messages": [{"role": "user", "content": "Hi."}]},
    {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass\n", "test": "assert True"},
    {"question": "How many?", "answer": "#### 4", "messages": [{"role": "user", "content": "Hi."}]},
    {"nothing": "here"},
]


@pytest.fixture(scope="module")
def ids_of():
    return read_questions("tiny", {})


def asked(path, ids_of, limit=None):
    return asked_prompts(opened_lines(str(path), read_lines), ids_of, limit, str(path))


def write_array(path):
    path.write_text(json.dumps(LINES))


def write_lines(path):
    path.write_text("\n".join(map(json.dumps, LINES)))


def write_packed(path):
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, LINES)).encode()))


def write_table(path):
    pq.write_table(
        pa.Table.from_pylist(
            LINES,
            schema=pa.schema(
                [
                    ("question", pa.string()),
                    ("answer", pa.string()),
                    ("id", pa.int64()),
                    ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
                    ("task_id", pa.string()),
                    ("prompt", pa.string()),
                    ("canonical_solution", pa.string()),
                    ("test", pa.string()),
                    ("nothing", pa.string()),
                ]
            ),
        ),
        path,
    )


@pytest.mark.parametrize(
    "name, write",
    [
        ("bench.json", write_array),
        ("bench.jsonl", write_lines),
        ("bench.jsonl.gz", write_packed),
        ("bench.parquet", write_table),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_of_any_format_asks_the_same(tmp_path, ids_of, name, write):
    write(tmp_path / name)
    found = asked(tmp_path / name, ids_of)
    assert [(p.name, p.task) for p in found.prompts] == [
        (f"{name}:1 (id 9)", "gsm8k"),
        (f"{name}:2", "bench"),
        (f"{name}:3 (id HumanEval/0)", "humaneval"),
    ]
    assert found.formats == {"gsm8k": 1, "chat": 1, "humaneval": 1}
    assert [name for name, _ in found.left_out] == [f"{name}:4", f"{name}:5"]
    assert "fits 2 formats, gsm8k and chat" in found.left_out[0][1]
    assert "unknown shape" in found.left_out[1][1]
    text = TINY.tokenizer.decode(found.prompts[0].ids)
    assert "How many?\nPlease reason step by step" in text
    assert found.prompts[1].ids == ids_of({"prompt": "Hi."})


def test_a_limit_counts_prompts(tmp_path, ids_of):
    write_lines(tmp_path / "bench.jsonl")
    found = asked(tmp_path / "bench.jsonl", ids_of, limit=2)
    assert len(found.prompts) == 2
    assert found.formats == {"gsm8k": 1, "chat": 1}
    assert found.left_out == []


@pytest.mark.parametrize("name", ["none.jsonl", "exam.txt"])
def test_a_file_that_is_not_there_or_not_read_is_refused_at_once(tmp_path, name):
    (tmp_path / "exam.txt").write_text("{}")
    with pytest.raises(UserError, match=name):
        opened_lines(str(tmp_path / name), read_lines)


def test_the_packaged_prompts_are_all_asked(ids_of):
    found = asked(STANDARD, ids_of)
    assert (len(found.prompts), found.left_out) == (48, [])
    assert len({prompt.name for prompt in found.prompts}) == 48
    assert max(len(prompt.ids) for prompt in found.prompts) < TINY.facts.max_positions


@dataclass
class Parrot:
    """Answers with the numbers of its answers; remembers what it was asked."""

    asked: list

    def examine(self, prompts):
        self.asked.append([TINY.tokenizer.decode(prompt.ids) for prompt in prompts])
        outcomes = []
        for prompt in prompts:
            said = TINY.tokenizer(f"said {sum(map(len, self.asked))}", add_special_tokens=False)["input_ids"]
            facts = {"num_new_tokens": len(said), "plain_s": 1.0, "speculative_s": 1.0}
            tokens = (*said, TINY.facts.eos_ids[0])
            outcomes.append(PromptOutcome(name=prompt.name, task=prompt.task, plain_tokens=tokens, **facts))
        return Acceptance(tuple(prompt.answered(()) for prompt in prompts), 4), Comparison(outcomes=outcomes)


def test_a_later_turn_follows_the_targets_own_answer(tmp_path, ids_of):
    lines = [
        {"turns": ["one", "two", "three"], "category": "a", "question_id": 1},
        {"prompt": "alone"},
        {"turns": ["first", "second"]},
    ]
    (tmp_path / "mt.jsonl").write_text("\n".join(map(json.dumps, lines)))
    parrot = Parrot([])
    prompts = asked(tmp_path / "mt.jsonl", ids_of)
    acceptance, comparison, everything = examine_turns(parrot.examine, prompts, ids_of, TINY)
    assert [len(turns) for turns in parrot.asked] == [3, 2, 1]
    assert comparison.num_prompts == len(acceptance.answers) == len(everything.prompts) == 6
    names = ["mt.jsonl:1 (id 1)", "mt.jsonl:2", "mt.jsonl:3"]
    later = [f"{names[0]}, answer 2", f"{names[2]}, answer 2", f"{names[0]}, answer 3"]
    assert (
        [answer.name for answer in acceptance.answers]
        == [outcome.name for outcome in comparison.outcomes]
        == names + later
    )
    assert [answer.task for answer in acceptance.answers] == ["a", "mt", "mt", "a", "mt", "a"]
    last = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "said 3"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "said 5"},
        {"role": "user", "content": "three"},
    ]
    rendered = TINY.tokenizer.apply_chat_template(last, tokenize=False, add_generation_prompt=True)
    assert parrot.asked[2] == [rendered]
    first, other = acceptance.answers[0], acceptance.answers[2]
    assert [a.conversation for a in acceptance.answers] == [names[0], "", names[2], names[0], names[2], names[0]]
    assert {a.prompt_sha256 for a in acceptance.answers if a.conversation == names[0]} == {first.prompt_sha256}
    assert first.prompt_sha256 == ids_sha256(prompts.prompts[0].ids) != other.prompt_sha256
    assert acceptance.answers[1].prompt_sha256 == ids_sha256(prompts.prompts[1].ids)


def test_files_of_one_name_in_two_folders_keep_their_prompts_apart(tmp_path, ids_of):
    for folder in ("b", "a", "."):
        (tmp_path / folder).mkdir(exist_ok=True)
        write_lines(tmp_path / folder / "bench.jsonl")
    names = [prompt.name for prompt in asked(tmp_path, ids_of).prompts]
    assert len(set(names)) == len(names) == 9
    assert {"a/bench.jsonl:2", "b/bench.jsonl:2", "bench.jsonl:2"} < set(names)


def test_a_name_is_one_line_and_not_much_longer_than_its_id(tmp_path, ids_of):
    lines = [{"prompt": "Hi.", "id": label, "task": "\x1b[31ma\nb"} for label in ("two\nlines", "z" * 270)]
    (tmp_path / "exam.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prompts = asked(tmp_path / "exam.jsonl", ids_of).prompts
    assert [prompt.name for prompt in prompts] == ["exam.jsonl:1 (id two lines)", f"exam.jsonl:2 (id {'z' * 57}...)"]
    assert {prompt.task for prompt in prompts} == {"[31ma b"}


def test_prompts_without_room_are_not_counted_among_the_formats(tmp_path, ids_of):
    lines = [{"prompt": "word " * 2000}, {"prompt": "Hi."}, LINES[0]]
    (tmp_path / "exam.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = fitting(asked(tmp_path / "exam.jsonl", ids_of), TINY.facts.max_positions)
    assert found.formats == {"chat": 1, "gsm8k": 1}
    assert [name for name, _ in found.left_out] == ["exam.jsonl:1"]


def test_a_blank_turn_is_named_and_the_turns_before_it_are_asked(tmp_path, ids_of):
    (tmp_path / "mt.jsonl").write_text(json.dumps({"turns": ["one", "two", None, "four"], "question_id": 1}))
    parrot = Parrot([])
    acceptance, _, everything = examine_turns(parrot.examine, asked(tmp_path / "mt.jsonl", ids_of), ids_of, TINY)
    assert [answer.name for answer in acceptance.answers] == ["mt.jsonl:1 (id 1)", "mt.jsonl:1 (id 1), answer 2"]
    assert everything.left_out == [("mt.jsonl:1 (id 1), answer 3", "the turn is '', not a text")]
    assert everything.formats == {"turns": 1}


def test_a_turn_without_room_is_named_and_ends_its_conversation(tmp_path, ids_of):
    lines = [{"turns": ["one", "word " * 2000, "three"], "id": "long"}, {"turns": ["one", "two"], "id": "short"}]
    (tmp_path / "mt.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prompts = asked(tmp_path / "mt.jsonl", ids_of)
    parrot = Parrot([])
    acceptance, _, everything = examine_turns(parrot.examine, prompts, ids_of, TINY)
    assert [len(turns) for turns in parrot.asked] == [2, 1]
    assert len(acceptance.answers) == 3
    ((name, reason),) = everything.left_out
    assert name == "mt.jsonl:1 (id long), answer 2"
    assert "the target takes" in reason
