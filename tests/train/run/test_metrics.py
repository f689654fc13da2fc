"""metrics.jsonl: one line a number, nothing twice, nothing without a definition."""

import json
import os
import re
from pathlib import Path

import pytest
from dflash_offline import UserError
from dflash_offline.train.facts import read_facts
from dflash_offline.train.metrics import DEFINITIONS, EXAM, ORIGIN, TRAIN, MetricsFile, read_metrics
from dflash_offline.train.worker import train


def write_steps(path: Path, kept: int, steps: range) -> None:
    with MetricsFile(path, kept) as metrics:
        for step in steps:
            metrics.write(TRAIN, step, loss=float(step))
            if step % 2 == 0:
                metrics.write(EXAM, step, acceptance_length=None, num_prompts=0)


def test_lines_come_back_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, -1, range(1, 5))
    assert read_metrics(path, TRAIN) == [{"kind": TRAIN, "step": s, "loss": float(s)} for s in range(1, 5)]
    assert [line["step"] for line in read_metrics(path, EXAM)] == [2, 4]
    assert read_metrics(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize("resumed", range(5))
def test_a_resumed_run_writes_what_an_uninterrupted_one_writes(tmp_path, resumed):
    whole, resumed_path = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    write_steps(whole, -1, range(1, 7))
    write_steps(resumed_path, -1, range(1, 5))
    write_steps(resumed_path, resumed, range(resumed + 1, 7))
    assert resumed_path.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_line_cut_by_a_kill_is_forgotten(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, -1, range(1, 3))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "train", "step": 2, "loss": 2.0}'[:cut])
    MetricsFile(path, 2).close()
    assert path.read_bytes() == whole


def test_a_broken_line_inside_is_named_and_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    text = '{"kind": "train", "step": 1, "loss": 1.0}\nnonsense\n{"kind": "train", "step": 2, "loss": 1.0}\n'
    path.write_text(text)
    with pytest.raises(UserError, match="line 2 of .* is broken: 'nonsense'"):
        MetricsFile(path, 1)
    assert path.read_text() == text


@pytest.mark.parametrize(
    "line, fault",
    [
        ('{"step":4}', "has no kind"),
        ('{"kind":"train","loss":1.0}', "has no step"),
        ('{"step":true,"kind":"train","loss":1.0}', "has the step True"),
        ('{"step":-1,"kind":"train","loss":1.0}', "has the step -1"),
        ('{"step":"4","kind":"train","loss":1.0}', "has the step '4'"),
        ('{"step":4,"kind":["train"],"loss":1.0}', "has the kind"),
        ('{"step":4,"kind":"train"}', "has no loss"),
        ('{"step":4,"kind":"train","loss":null}', "has the loss None"),
        ('{"step":4,"kind":"train","loss":NaN}', "has the loss nan"),
        ('{"step":0,"kind":"exam"}', "has no acceptance_length"),
        ('{"step":0,"kind":"exam","acceptance_length":"a","num_prompts":1}', "has the acceptance_length 'a'"),
        ('{"step":0,"kind":"exam","acceptance_length":null}', "has no num_prompts"),
        ("[" * 100_000, "is broken"),
        ("[]", "is broken"),
        ("{}", "is broken"),
        ("5", "is broken"),
    ],
)
def test_a_whole_line_without_what_a_run_reads_of_it_is_named(tmp_path, line, fault):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, -1, range(1, 3))
    text = path.read_text() + line + "\n"
    path.write_text(text)
    for read in (lambda: MetricsFile(path, 2), lambda: read_metrics(path), lambda: read_metrics(path, TRAIN)):
        with pytest.raises(UserError, match="line 4 of .*metrics.jsonl' is broken: ") as caught:
            read()
        assert fault in caught.value.happened
        assert len(str(caught.value).splitlines()) == 3
    assert path.read_text() == text


def test_an_exam_without_its_origin_is_read_as_before(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, -1, range(1, 3))
    (tmp_path / "other.jsonl").write_text('{"step": 1, "kind": "a kind of a later version"}\n')
    assert len(read_metrics(path, EXAM)) == len(read_metrics(tmp_path / "other.jsonl")) == 1


def test_numbers_need_a_definition_and_must_be_finite(tmp_path):
    with MetricsFile(tmp_path / "metrics.jsonl", -1) as metrics:
        metrics.write(TRAIN, 1, accuracy_slot_12=0.5)
        with pytest.raises(AssertionError, match="speed"):
            metrics.write(TRAIN, 1, speed=1.0)
        with pytest.raises(AssertionError, match="loss"):
            metrics.write(TRAIN, 1, loss=float("nan"))


def test_every_definition_belongs_to_a_number_of_a_real_run(reference_run, lab):
    names = {re.sub(r"_\d+$", "_K", name) for line in lab.metrics_of(reference_run) for name in line}
    elsewhere = {"acceptance_expected", "reduce_s", "mfu"}  # on last states, with several ranks, on CUDA
    assert names == set(DEFINITIONS) - elsewhere


def test_the_numbers_of_an_update_agree_with_each_other(reference_run, lab):
    facts = read_facts(reference_run)
    slots = range(1, facts.spec.block_size)
    for line in lab.metrics_of(reference_run, TRAIN):
        survival = [line[f"survival_slot_{k}"] for k in slots]
        assert survival == sorted(survival, reverse=True)
        assert survival[0] == line["accuracy_slot_1"]
        assert sum(survival) == pytest.approx(line["accepted_drafts_teacher_forced"])
        assert line["acceptance_length_teacher_forced"] == line["accepted_drafts_teacher_forced"] + 1
        assert line["rate_tok_s"] == pytest.approx(line["num_tokens"] / line["step_s"])
        assert line["rate_tflops"] > 0
        assert 0 <= line["rows_ready"] <= 3
        assert 50e6 < line["memory_peak_bytes"] < 50e9
    for line in lab.metrics_of(reference_run, EXAM):
        survival = [line[f"held_out_survival_slot_{k}"] for k in slots]
        assert survival == sorted(survival, reverse=True)
        assert sum(survival) == pytest.approx(line["held_out_accepted_drafts_teacher_forced"])
        assert line["origin"] == "elsewhere"
        assert line["num_prompts"] > 0


def test_the_walk_is_reported_for_each_origin_of_the_held_out_answers(lab, tmp_path):
    """Origins in turn: the lines of one origin add up to the exam of all."""
    store = lab.make_store(tmp_path, num_held_out=6, origins=("target greedy", "elsewhere"))
    train(lab.make_config(store, tmp_path / "run", "steps=2", "eval_every=2"))
    exams = lab.metrics_of(tmp_path / "run", EXAM)
    parts = lab.metrics_of(tmp_path / "run", ORIGIN)
    assert [line["step"] for line in exams] == [0, 2]
    assert [(line["step"], line["origin"]) for line in parts] == [
        (step, origin) for step in (0, 2) for origin in ("elsewhere", "target greedy")
    ]
    for exam in exams:
        assert exam["origin"] == "elsewhere, target greedy"
        own = [line for line in parts if line["step"] == exam["step"]]
        for name in ("num_prompts", "num_cycles"):
            assert sum(line[name] for line in own) == exam[name]
        weighted = sum(line["num_prompts"] * line["acceptance_length"] for line in own)
        assert weighted / exam["num_prompts"] == pytest.approx(exam["acceptance_length"])


def test_lines_are_flat_json_without_nan(reference_run):
    for line in (reference_run / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line, parse_constant=pytest.fail)
        assert all(value is None or isinstance(value, (int, float, str)) for value in values.values())


@pytest.mark.parametrize("act, name", [("write", "ENOSPC"), ("sync", "EINVAL"), ("close", "EBADF")])
def test_a_disk_that_fails_is_named_with_the_file(tmp_path, act, name):
    """Behind its descriptor the file is one that takes nothing, or none at all."""
    metrics = MetricsFile(tmp_path / "metrics.jsonl", -1)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, metrics.fd)
    os.close(full)
    if act == "close":
        os.close(metrics.fd)
    with pytest.raises(UserError, match=rf"metrics.jsonl' failed: .* \({name}\)") as caught:
        metrics.write(TRAIN, 1, loss=1.0) if act == "write" else getattr(metrics, act)()
    assert len(str(caught.value).splitlines()) == 3
    assert "goes on from the newest checkpoint" in caught.value.advice
    if act != "close":
        metrics.close()


def test_the_file_hides_no_other_error(tmp_path):
    with pytest.raises(ValueError, match="elsewhere"), MetricsFile(tmp_path / "metrics.jsonl", -1) as metrics:
        os.close(metrics.fd)
        raise ValueError("elsewhere")
