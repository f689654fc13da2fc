"""Two results side by side: the paired difference against a plain count, the verdict, and what is not compared."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from dflash_offline import UserError
from dflash_offline.cli import dflash
from dflash_offline.train.evaluate.acceptance import Acceptance, AnswerCycles, judge
from dflash_offline.train.evaluate.compare import SAME, compare
from dflash_offline.train.evaluate.config import EvaluateConfig
from dflash_offline.train.evaluate.evaluate_report import EvaluateReport
from dflash_offline.train.evaluate.intervals import ratio_interval

BLOCK = 8
SETTINGS = {
    "target": "tiny",
    "target_weights_sha256": "ab",
    "prompts": "exam.jsonl",
    "device": "cpu",
    "taps": "as recorded",
    "drafter_dtype": "float32",
    "max_new_tokens": 64,
}


def lengths_of(seed: int, gain: float, count: int = 30) -> list[list[int]]:
    """Tokens of the cycles of `count` prompts; the same seed gives prompts of the same ease."""
    rng = np.random.default_rng(seed)
    ease = rng.uniform(1, 6, count)
    return [np.clip(np.round(rng.normal(e + gain, 0.5, 12)), 1, BLOCK).astype(int).tolist() for e in ease]


def result(lengths, **changes):
    answers = [
        AnswerCycles(
            tuple(judge(length - 1, 99, BLOCK) for length in own),
            task="list" if i % 3 else "count",
            name=f"exam.jsonl:{i}",
            prompt_sha256=f"{i}",
        )
        for i, own in enumerate(lengths)
    ]
    report = EvaluateReport(
        run="run",
        step=4,
        acceptance=Acceptance(tuple(answers), BLOCK),
        comparison=None,
        settings=dict(SETTINGS),
        left_out=[],
        next_command="",
    )
    return report.as_dict() | {"mode": "decoded"} | changes


PROMPT = {"name": "a", "prompt_sha256": "b", "num_cycles": 1, "num_tokens": 2, "task": "", "conversation": "a"}


@pytest.fixture
def write(tmp_path):
    def written(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
        return str(path)

    return written


def test_the_difference_is_that_of_each_prompt(write):
    first, second = lengths_of(0, 0.0), lengths_of(0, 0.3)
    report = compare(write("a.json", result(first)), write("b.json", result(second)))
    whole = report.differences[0]
    assert whole.interval is not None
    gains = np.array([np.mean(b) - np.mean(a) for a, b in zip(first, second)])
    assert (whole.task, whole.num_prompts) == (None, 30)
    assert whole.b - whole.a == pytest.approx(gains.mean())
    assert whole.interval == pytest.approx(ratio_interval(gains, np.ones(30)))
    assert whole.b_cycles - whole.a_cycles == pytest.approx(np.mean(second) - np.mean(first))
    apart = [side["intervals"]["acceptance_length"] for side in report.sides]
    assert apart[0][1] > apart[1][0], "the two intervals overlap; only the pairs tell the drafters apart"
    assert report.verdict == f"B is better by {gains.mean():.3f} [{whole.interval[0]:.3f}, {whole.interval[1]:.3f}]"
    by_task = {one.task: one for one in report.differences[1:]}
    assert {task: one.num_prompts for task, one in by_task.items()} == {"count": 10, "list": 20}
    assert by_task["count"].b - by_task["count"].a == pytest.approx(gains[::3].mean())
    text = report.text()
    for side in report.sides:
        assert f"{side['acceptance_length']:.3f}" in text
    assert text.splitlines()[-1].startswith("verdict    B is better by")


def test_the_other_way_round_it_is_a_and_without_a_difference_neither(write):
    worse, better = write("a.json", result(lengths_of(0, 0.0))), write("b.json", result(lengths_of(0, 0.5)))
    there, back = compare(worse, better), compare(better, worse)
    assert back.verdict.startswith("A is better by ")
    ends = there.differences[0].interval, back.differences[0].interval
    assert np.array(ends[0]) == pytest.approx(-np.array(ends[1])[::-1])
    same = write("c.json", result([np.roll(own, 1).tolist() for own in lengths_of(0, 0.0)]))
    assert compare(worse, same).verdict == "no difference can be told: B less A is +0.000 [0.000, 0.000]"
    folder = write("e.json", result(lengths_of(0, 0.5), step=None, run="drafter"))
    assert "e.json: drafter, block 8" in compare(worse, folder).text()
    few = write("d.json", result(lengths_of(0, 0.5)[:1]))
    report = compare(worse, few)
    assert report.verdict == "no difference can be told: fewer than 8 prompts or conversations in common"
    assert "[no interval]" in report.text()


def test_a_few_prompts_give_no_verdict(write):
    """Of two prompts both gain in every fourth exam by chance, and their interval then leaves 0 out."""
    for count, verdict in ((2, "no difference can be told: fewer"), (7, "no difference"), (8, "B is better")):
        worse, better = (write(f"{gain}.json", result(lengths_of(0, gain, count))) for gain in (0.0, 1.0))
        report = compare(worse, better)
        interval = report.differences[0].interval
        assert interval is not None
        assert interval[0] > 0
        assert report.verdict.startswith(verdict)
        assert report.differences[0].num_conversations == count


def test_the_turns_of_a_conversation_are_one_draw(write):
    sides = []
    for gain in (0.0, 0.4):
        exam = result(lengths_of(0, gain, 6))
        for one in exam["per_prompt"]:
            one["conversation"] = f"talk {int(one['prompt_sha256']) // 2}"
        sides.append(exam)
    gains = np.array([b["num_tokens"] / 12 - a["num_tokens"] / 12 for a, b in zip(*(s["per_prompt"] for s in sides))])
    report = compare(write("a.json", sides[0]), write("b.json", sides[1]))
    expected = ratio_interval(gains.reshape(3, 2).sum(1), np.array([2, 2, 2]))
    assert report.differences[0].interval == pytest.approx(expected)


def test_prompts_that_only_one_has_are_counted_and_named(write):
    lengths = lengths_of(0, 0.0)
    one, other = result(lengths[:20]), result(lengths)
    other["per_prompt"][3]["prompt_sha256"] = "another text"
    del other["per_prompt"][0]
    report = compare(write("a.json", one), write("b.json", other))
    assert report.differences[0].num_prompts == 18
    assert report.unmatched == (
        ("exam.jsonl:0", "exam.jsonl:3"),
        ("exam.jsonl:3", *(f"exam.jsonl:{i}" for i in range(20, 30))),
    )
    text = report.text()
    assert "only in A  2: exam.jsonl:0, exam.jsonl:3" in text
    assert "only in B  11: exam.jsonl:3, exam.jsonl:20, exam.jsonl:21, exam.jsonl:22, exam.jsonl:23 and 6 more" in text


def test_other_recorded_answers_to_a_prompt_are_not_matched_offline(write):
    """Two stores may answer one prompt; what decoding answers may end elsewhere where logits nearly tie."""
    one, other = result(lengths_of(0, 0.0, 20)), result(lengths_of(0, 0.0, 20))
    other["per_prompt"][4]["num_tokens"] += 1
    assert compare(write("a.json", one), write("b.json", other)).unmatched == ((), ())
    sides = [exam | {"mode": "offline"} for exam in (one, other)]
    found = compare(write("a.json", sides[0]), write("b.json", sides[1]))
    assert found.unmatched == (("exam.jsonl:4",), ("exam.jsonl:4",))
    assert found.differences[0].num_prompts == 19


OTHERS = {
    "mode": "offline",
    "target_weights_sha256": "cd",
    "max_new_tokens": 128,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
}


@pytest.mark.parametrize("name", SAME)
def test_other_exams_are_refused_with_both_values(write, name):
    exam = result(lengths_of(0, 0.0))
    a, b = write("a.json", exam), write("b.json", exam | {name: OTHERS[name]})
    with pytest.raises(UserError, match=rf"has {name} {exam.get(name)}, .* has {name} {OTHERS[name]}") as caught:
        compare(a, b)
    assert len(str(caught.value).splitlines()) == 3


def test_other_definitions_are_refused(write):
    exam = result(lengths_of(0, 0.0))
    other = exam | {"definitions": exam["definitions"] | {"acceptance_length": "without the bonus token"}}
    with pytest.raises(UserError, match="define acceptance_length differently"):
        compare(write("a.json", exam), write("b.json", other))


@pytest.mark.parametrize(
    "content, said",
    [
        ({"format": 1}, "of format 1: another version wrote it"),
        ({"format": None}, "of format None: another version wrote it"),
        ({"mode": None}, "is broken"),
        ({"per_prompt": None}, "an earlier version wrote it"),
        ({"per_prompt": [{"name": "a", "prompt_sha256": "b", "num_cycles": 1}]}, "no num_tokens of its prompt 0"),
        ({"per_prompt": [7]}, "no name of its prompt 0"),
        ({"per_prompt": [PROMPT | {"num_tokens": {}}]}, "num_tokens = {} of its prompt 0"),
        ({"per_prompt": [PROMPT | {"num_cycles": True}]}, "num_cycles = True of its prompt 0"),
        ({"per_prompt": [PROMPT | {"name": []}]}, r"name = \[\] of its prompt 0"),
        ({"per_prompt": [PROMPT | {"task": 7}]}, "task = 7 of its prompt 0"),
        ({"intervals": {"acceptance_length": [1.0]}}, "has intervals = "),
        ({"intervals": 3}, "has intervals = 3"),
        ({"acceptance_length": "2\n.0"}, "has acceptance_length = "),
        ({"block_size": "8"}, "has block_size = '8'"),
        ({"step": "4"}, "has step = '4'"),
        ({"definitions": []}, "has definitions = "),
    ],
)
def test_what_is_no_result_of_this_version_is_refused(write, content, said):
    exam = result(lengths_of(0, 0.0))
    old = {key: value for key, value in (exam | content).items() if value is not None}
    with pytest.raises(UserError, match=said) as caught:
        compare(write("a.json", exam), write("b.json", old))
    assert len(str(caught.value).splitlines()) == 3


def test_nothing_in_common_is_refused(write):
    exam, other = result(lengths_of(0, 0.0)), result(lengths_of(0, 0.0))
    for one in other["per_prompt"]:
        one["name"] = "other " + one["name"]
    with pytest.raises(UserError, match="no measured prompt in common"):
        compare(write("a.json", exam), write("b.json", other))


def test_the_command_takes_files_and_runs_and_no_run(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dflash.toml").write_text('[evaluate]\ndevice = "cpu"\n')
    a = write("one/evaluation.json", result(lengths_of(0, 0.0)))
    write("two/evaluation.json", result(lengths_of(0, 0.3)))
    done = CliRunner().invoke(dflash, ["evaluate", "--compare", a, str(tmp_path / "two")])
    assert done.exit_code == 0, done.output
    assert "verdict    B is better by" in done.output
    (tmp_path / "three").mkdir()
    for words, said in (
        (["--compare", a, str(tmp_path / "three")], "holds no evaluation.json"),
        (["--compare", a, str(tmp_path / "four")], "there is no result at"),
        (["--compare", a, a, "--offline"], "offline = True does nothing with --compare"),
    ):
        done = CliRunner().invoke(dflash, ["evaluate", *words])
        assert isinstance(done.exception, UserError)
        assert said in str(done.exception)
    for words, said in (([], "Missing argument"), (["run", "--compare", a, a], "beside --compare")):
        done = CliRunner().invoke(dflash, ["evaluate", *words])
        assert done.exit_code == 2
        assert said in done.output


NAMES = {one.name for one in dataclasses.fields(EvaluateConfig)} - {"compare", "top_p", "top_k", "seed"}
GIVEN: dict[str, Any] = {"limit": 4, "max_new_tokens": 4, "batch": 4, "offline": True, "temperature": 0.7}
GIVEN |= {"dtype": "float32", "tap_dtype": "float32"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_nothing_else_is_read_beside_compare(name):
    given: dict[str, Any] = {name: GIVEN.get(name, "x")}
    with pytest.raises(UserError, match=f"{name} = .* does nothing with --compare"):
        EvaluateConfig(compare=("a", "b"), **given)
