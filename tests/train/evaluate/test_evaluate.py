"""The exam as a user runs it: decoded and offline on the packaged target, and what it refuses."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.questions import read_lines, read_questions
from dflash_offline.settings import resolve
from dflash_offline.train.evaluate.config import OF_DECODING, OF_SAMPLING, EvaluateConfig
from dflash_offline.train.evaluate.evaluate import evaluate
from dflash_offline.train.export.config import ExportConfig
from dflash_offline.train.export.export import export

TOKENS = 24


def open_nothing(name, device, dtype):
    pytest.fail("the target was opened")


def cycles_of(report) -> list[tuple[str, str]]:
    """Task and cycles of every answer; who wrote it is known of recorded answers only."""
    return sorted((answer.task, repr(answer.cycles)) for answer in report.acceptance.answers)


def same_facts(exam, names) -> list[list[object]]:
    return sorted(([one[name] for name in names] for one in exam["per_prompt"]), key=repr)


def run_exam(tiny_run, tmp_path, *settings, target=None):
    """The report, its JSON, and the names of targets that were opened."""
    opened = []

    def open_target(name, device, dtype):
        assert dtype == config.dtype
        opened.append((name, device))
        return target or tiny_run.target

    own = [f"out={tmp_path / 'exam.json'}", "device=cpu"]
    own += [] if "offline=true" in settings else [f"max_new_tokens={TOKENS}"]
    config = resolve(EvaluateConfig, name="evaluate", overrides=[*own, *settings])
    report = evaluate(tiny_run.run_dir, config, open_target, read_questions, read_lines)
    return report, json.loads((tmp_path / "exam.json").read_text()), opened


def test_decoding_the_held_out_prompts_is_lossless_and_equals_the_walk(tiny_run, tmp_path):
    report, exam, opened = run_exam(tiny_run, tmp_path)
    assert opened == [("tiny", "cpu")]
    assert exam["mode"] == "decoded"
    assert exam["num_equal"] == exam["num_prompts"] == 6
    assert exam["mismatches"] == []
    assert exam["num_new_tokens"] == sum(map(len, tiny_run.answers))
    assert exam["acceptance_length"] > 1.2, "a drafter that is sometimes right, or nothing is compared"
    walked, offline, nobody = run_exam(tiny_run, tmp_path, "offline=true")
    assert nobody == []
    assert offline["mode"] == "offline"
    assert cycles_of(walked) == cycles_of(report)
    numbers = (
        "acceptance_length",
        "acceptance_length_cycles",
        "accepted_drafts",
        "accepted_drafts_cycles",
        "intervals",
    )
    for name in (*numbers, "histogram", "per_position", "num_prompts", "by_task"):
        assert offline[name] == exam[name]
    same = ("name", "prompt_sha256", "task", "num_cycles", "num_tokens", "num_accepted", "histogram")
    assert len(same_facts(exam, same)) == 6
    assert same_facts(offline, same) == same_facts(exam, same)
    assert set(exam["by_task"]) == {task.kind for task in tiny_run.tasks}


def test_the_numbers_are_those_of_the_cycles(tiny_run, tmp_path):
    report, exam, _ = run_exam(tiny_run, tmp_path, "limit=4")
    lengths = [answer.lengths for answer in report.acceptance.answers]
    assert len(lengths) == 4
    assert exam["acceptance_length"] == pytest.approx(np.mean([np.mean(cycles) for cycles in lengths]))
    assert exam["acceptance_length_cycles"] == pytest.approx(np.mean(np.concatenate(lengths)))
    assert exam["speed_up"] == pytest.approx(exam["plain_s"] / exam["speculative_s"])
    assert exam["num_new_tokens"] == sum(map(sum, lengths)) + 4
    numbers = {name for name, value in exam.items() if isinstance(value, int | float | list | dict)}
    assert "speed_up" in numbers
    assert numbers - set(exam["definitions"]) <= {"definitions", "top_p", "top_k"}, "both stand beside the temperature"
    low, high = exam["intervals"]["acceptance_length"]
    assert low < exam["acceptance_length"] < high
    assert f"{exam['acceptance_length']:.3f} [{low:.3f}, {high:.3f}]" in report.text()
    for one in exam["by_task"].values():
        assert (one["intervals"]["acceptance_length"] is None) == (one["num_measured"] < 2)
    kept = exam["per_prompt"]
    assert np.sum([one["histogram"] for one in kept], axis=0).tolist() == exam["histogram"]
    assert [one["num_tokens"] for one in kept] == [sum(cycles) for cycles in lengths]
    assert [one["num_new_tokens"] for one in kept] == [sum(cycles) + 1 for cycles in lengths]
    for name in ("plain_s", "speculative_s"):
        assert sum(one[name] for one in kept) == pytest.approx(exam[name])
    assert all((one["is_equal"], one["parted_at"]) == (True, None) for one in kept)
    text = report.text()
    assert "lossless   4/4" in text
    assert f"{exam['acceptance_length']:.3f}" in text
    assert text.splitlines()[-1] == f"next: dflash export {tiny_run.run_dir}"
    for path in report.saved:
        assert Path(path).is_file()


def prompt_lines(tiny_run):
    first, second, third = tiny_run.tasks[:3]
    chat = [{"role": "user", "content": second.prompt}]
    return [
        json.dumps({"prompt": first.prompt, "answer": first.answer, "task": first.kind, "id": 7}),
        "",
        json.dumps({"messages": [*chat, {"role": "assistant", "content": "old"}], "answer": "no such answer"}),
        "{broken",
        json.dumps({"text": "no prompt"}),
        json.dumps({"messages": [{"role": "oracle", "content": "hm"}]}),
        json.dumps({"prompt": "word " * 2000}),
        json.dumps({"messages": [{"role": "user", "content": third.prompt}]}),
    ]


def test_prompts_of_a_file_are_rendered_answered_and_accounted_for(tiny_run, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(prompt_lines(tiny_run)).encode())
    report, exam, _ = run_exam(tiny_run, tmp_path, f"prompts={path}", "max_new_tokens=60")
    assert exam["num_equal"] == exam["num_prompts"] == 3
    expected = tiny_run.target.generate(tiny_run.prompts[:3], 60)
    assert exam["num_new_tokens"] == sum(map(len, expected)), "the same prompts as the store's"
    first = tiny_run.tasks[0]
    said = tiny_run.target.tokenizer.decode(expected[0], skip_special_tokens=True)
    right = int(said.strip() == first.answer.strip())
    assert exam["answers"] == {first.kind: {"right": right, "known": 1}, "prompts": {"right": 0, "known": 1}}
    assert exam["formats"] == {"chat": 3}, "one of the four has no room"
    assert [(one["name"], one["task"]) for one in exam["per_prompt"]] == [
        ("prompts.jsonl:1 (id 7)", first.kind),
        ("prompts.jsonl:3", "prompts"),
        ("prompts.jsonl:8", "prompts"),
    ]
    left_out = {entry["name"]: entry["reason"] for entry in exam["left_out"]}
    assert list(left_out) == [f"prompts.jsonl:{number}" for number in (4, 5, 6, 7)]
    assert "text, no chat" in left_out["prompts.jsonl:5"]
    assert "unknown role" in left_out["prompts.jsonl:6"]
    assert "the target takes" in left_out["prompts.jsonl:7"]
    assert "4 left out" in report.text()
    assert "formats    chat 3" in report.text()


def test_a_conversation_goes_on_and_the_packaged_prompts_are_at_hand(tiny_run, tmp_path):
    path = tmp_path / "mt.jsonl"
    line = {"question_id": 81, "category": "writing", "turns": [tiny_run.tasks[0].prompt, tiny_run.tasks[1].prompt]}
    path.write_text(json.dumps(line))
    report, exam, _ = run_exam(tiny_run, tmp_path, f"prompts={path}", "max_new_tokens=8")
    assert [one["name"] for one in exam["per_prompt"]] == ["mt.jsonl:1 (id 81)", "mt.jsonl:1 (id 81), answer 2"]
    assert {one["task"] for one in exam["per_prompt"]} == {"writing"}
    assert exam["num_equal"] == exam["num_prompts"] == exam["num_measured"] == 2
    assert exam["formats"] == {"turns": 1}
    assert exam["intervals"]["acceptance_length"] is None, "one conversation"
    assert "[no interval]" in report.text()
    _, exam, _ = run_exam(tiny_run, tmp_path, "prompts=standard", "limit=1", "max_new_tokens=4")
    assert [one["name"] for one in exam["per_prompt"]] == ["prompts-standard.jsonl:1 (id maths-1)"]
    assert (exam["prompts"], set(exam["by_task"])) == ("standard", {"maths"})


def test_float32_taps_are_another_exam_and_stay_lossless(tiny_run, tmp_path):
    _, exam, _ = run_exam(tiny_run, tmp_path, "tap_dtype=float32", "limit=3")
    assert exam["num_equal"] == exam["num_prompts"] == 3
    assert "float32" in exam["taps"]


def test_a_sampled_exam_says_how_it_was_decoded_and_compares_no_tokens(tiny_run, tmp_path):
    report, exam, _ = run_exam(tiny_run, tmp_path, "temperature=0.8", "top_k=50", "batch=3", "limit=3")
    assert (exam["num_equal"], exam["num_exact_ties"], exam["mismatches"]) == (None, None, [])
    assert (exam["temperature"], exam["top_p"], exam["top_k"], exam["seed"], exam["batch"]) == (0.8, 1.0, 50, 0, 3)
    assert exam["acceptance_length"] >= 1
    assert exam["speed_up"] > 0
    text = report.text()
    assert "decoding   temperature 0.8, top-k 50, seed 0; batch 3" in text
    assert "lossless   in distribution" in text


def test_a_result_elsewhere_draws_nothing_into_the_run(tiny_run, tmp_path):
    """It may be of other prompts, and RUN may be somebody else's."""
    run_dir = tmp_path / "run"
    shutil.copytree(tiny_run.run_dir, run_dir)
    before = sorted(path.name for path in run_dir.iterdir())
    own = dataclasses.replace(tiny_run, run_dir=run_dir)
    report, _, _ = run_exam(own, tmp_path, "limit=1")
    assert report.saved == (str(tmp_path / "exam.json"),)
    assert sorted(path.name for path in run_dir.iterdir()) == before
    report, _, _ = run_exam(own, tmp_path, "limit=1", f"out={run_dir / 'again.json'}")
    assert report.saved == (str(run_dir / "again.json"), str(run_dir / "accepted-lengths.png"))


def test_another_checkpoint_is_another_exam(tiny_run, tmp_path):
    _, first, _ = run_exam(tiny_run, tmp_path, "offline=true", 'checkpoint="0"')
    _, latest, _ = run_exam(tiny_run, tmp_path, "offline=true")
    assert (first["step"], latest["step"]) == (0, 48)
    assert first["acceptance_length"] < latest["acceptance_length"]


class Unsteady:
    """A target whose forwards over several tokens, prompts aside, give other logits than single ones."""

    def __init__(self, target):
        self.inner = target
        self.facts, self.tokenizer, self.frozen = target.facts, target.tokenizer, target.frozen

    def open(self, tap_layers):
        session = self.inner.open(tap_layers)
        plain_forward = session.forward

        def forward(ids):
            is_block = session.length > 0 and len(ids) > 1
            logits, taps = plain_forward(ids)
            if is_block:
                logits[:, 5] = logits.max() + 1.0
            return logits, taps

        session.forward = forward
        return session


def test_an_output_that_differs_is_shown(tiny_run, tmp_path):
    report, exam, _ = run_exam(tiny_run, tmp_path, "limit=3", target=Unsteady(tiny_run.target))
    assert (exam["num_equal"], exam["num_prompts"]) == (0, 3)
    found = exam["mismatches"][0]
    assert (found["position"], found["speculative_token"]) == (1, 5)
    text, prompts = None, {tuple(text): prompt for prompt, text in zip(tiny_run.prompts, tiny_run.answers)}
    for text, prompt in prompts.items():
        if text[1] == found["plain_token"]:
            logits = tiny_run.target.model(torch.tensor([[*prompt, text[0]]])).logits[0, -1]
            if found["logit_gap"] == pytest.approx(float(logits[text[1]] - logits[5]), abs=1e-3):
                break
    else:
        pytest.fail(f"no held-out prompt has this difference: {found}")
    assert "lossless   0/3" in report.text()
    assert "logit gap" in report.text()
    assert exam["num_exact_ties"] == 0
    assert "0 of 3 differences are exact ties" in report.text()
    assert [(one["is_equal"], one["parted_at"]) for one in exam["per_prompt"]] == [(False, 1)] * 3


@pytest.mark.parametrize(
    "changes",
    [{"weights_sha256": "other"}, {"hidden_size": 64}, {"vocab_size": 500}, {"tokenizer_sha256": "other"}],
    ids=lambda changes: next(iter(changes)),
)
def test_another_target_is_refused_with_both_values(tiny_run, tmp_path, changes, monkeypatch):
    import dataclasses

    (name, value) = next(iter(changes.items()))
    other = Unsteady(tiny_run.target)
    other.facts = dataclasses.replace(tiny_run.target.facts, **changes)
    with pytest.raises(UserError, match="was trained for another target") as caught:
        run_exam(tiny_run, tmp_path, target=other)
    assert str(value) in caught.value.happened
    assert str(getattr(tiny_run.target.facts, name)) in caught.value.happened
    assert not (tmp_path / "exam.json").exists()


def test_a_store_of_another_target_is_refused(lab, tiny_run, tmp_path):
    ids, text = tiny_run.prompts[0], tiny_run.answers[0]
    mask = np.array([False] * len(ids) + [True] * len(text))
    store = lab.write_store(tmp_path, tiny_run.target, [(ids + text, mask, "heldout", "")], weights_sha256="other")
    for offline in ("true", "false"):
        with pytest.raises(UserError, match="was trained for another target"):
            run_exam(tiny_run, tmp_path, f"offline={offline}", f"store={store}")


def test_a_store_recorded_with_a_window_gives_the_same_exam_or_is_refused(lab, tiny_run, tmp_path):
    """The drafter of `tiny_run` reads the full context, so only a windowed copy of it may take that store."""
    samples = []
    for prompt, text, task in zip(tiny_run.prompts, tiny_run.answers, tiny_run.tasks):
        mask = np.array([False] * len(prompt) + [True] * len(text))
        samples += [(prompt + text, mask, split, task.kind) for split in ("heldout", "train")]
    cut = lab.write_store(tmp_path / "cut", tiny_run.target, samples, window=6)
    with pytest.raises(UserError) as caught:
        run_exam(tiny_run, tmp_path, "offline=true", f"store={cut}")
    assert "was recorded with window 6, the drafter's window is none" in caught.value.happened
    assert str(cut) in caught.value.happened
    _, decoded, _ = run_exam(tiny_run, tmp_path, f"store={cut}", "limit=1")
    assert decoded["num_prompts"] == 1, "prompts come from the tokens, which are all there"
    exams = []
    for name, store in (("whole", tiny_run.store), ("cut", cut)):
        run_dir = tmp_path / f"run-{name}"
        fresh = lab.make_run(store, run_dir, "drafter.window=6")
        fresh.load_state_dict(tiny_run.drafter.state_dict())
        lab.save_step(run_dir, fresh, 48)
        windowed = dataclasses.replace(tiny_run, run_dir=run_dir)
        report, _, _ = run_exam(windowed, tmp_path, "offline=true", f"store={store}")
        exams.append(cycles_of(report))
        decoded_report, exam, _ = run_exam(windowed, tmp_path, f"store={store}")
        assert exam["num_equal"] == exam["num_prompts"] == 6
        assert cycles_of(decoded_report) == exams[-1]
        assert exam["acceptance_length"] > 1.05
    assert exams[0] == exams[1]


def test_nothing_held_out_is_nothing_to_measure(lab, tiny_run, tmp_path):
    ids, text = tiny_run.prompts[0], tiny_run.answers[0]
    mask = np.array([False] * len(ids) + [True] * len(text))
    store = lab.write_store(tmp_path, tiny_run.target, [(ids + text, mask, "train", "")])
    for offline in ("true", "false"):
        report, exam, _ = run_exam(tiny_run, tmp_path, f"offline={offline}", f"store={store}")
        assert exam["num_prompts"] == 0
        assert exam["acceptance_length"] is None
        assert "nothing to measure" in report.text()


@pytest.mark.parametrize(
    "text, said, is_opened",
    [
        ("", "it is empty", False),
        ("\n \n", "it is empty", False),
        ("{broken\n\n{}\n", r"2 lines were left out, the first is prompts\.jsonl:1: not JSON", True),
        (json.dumps({"prompt": "word " * 2000}), r"1 lines were left out, the first is .* the target takes", True),
        ("[" * 100_000, "maximum recursion depth", True),
    ],
    ids=["empty", "blank", "broken", "long", "deep"],
)
def test_a_prompts_file_without_a_prompt_is_an_error(tiny_run, tmp_path, text, said, is_opened):
    path, opened = tmp_path / "prompts.jsonl", []
    path.write_text(text)

    def open_target(name, device, dtype):
        opened.append(name)
        return tiny_run.target

    config = EvaluateConfig(prompts=str(path), out=str(tmp_path / "exam.json"), device="cpu")
    with pytest.raises(UserError, match=said) as caught:
        evaluate(tiny_run.run_dir, config, open_target, read_questions, read_lines)
    assert len(str(caught.value).splitlines()) == 3
    assert bool(opened) == is_opened
    assert not (tmp_path / "exam.json").exists()


OTHER_VALUES: dict[str, Any] = {
    "target": "tiny",
    "prompts": "exam.jsonl",
    "max_new_tokens": 512,
    "dtype": "float32",
    "tap_dtype": "float32",
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 3,
    "batch": 2,
}


@pytest.mark.parametrize("name", OF_DECODING)
def test_settings_of_decoding_are_refused_offline(name):
    value = OTHER_VALUES[name]
    drawn: dict[str, Any] = {"temperature": 1.0} if name in OF_SAMPLING else {}
    assert getattr(EvaluateConfig(**(drawn | {name: value})), name) == value
    with pytest.raises(UserError, match=f"{name} = {value!r} does nothing with --offline"):
        EvaluateConfig(offline=True, **{name: value})


def test_a_store_beside_prompts_is_refused():
    with pytest.raises(UserError, match="store = 'hs' does nothing with --prompts exam.jsonl"):
        EvaluateConfig(store="hs", prompts="exam.jsonl")
    assert EvaluateConfig(store="hs").answer_tokens == 512


def test_no_run_is_not_a_missing_checkpoint(tmp_path):
    with pytest.raises(UserError, match="no run at"):
        evaluate(tmp_path / "nope", EvaluateConfig(device="cpu"), open_nothing, read_questions, read_lines)


def test_without_a_best_checkpoint_the_next_command_names_another(lab, tiny_run, tmp_path):
    run_dir = tmp_path / "run"
    drafter = lab.make_run(tiny_run.store, run_dir)
    lab.checkpoint.save(run_dir, lab.checkpoint.LoopState(step=3, epoch=0, row=0), drafter.state_dict(), {})
    config = EvaluateConfig(offline=True, limit=1, device="cpu")
    report = evaluate(run_dir, config, open_nothing, read_questions, read_lines)
    assert report.text().splitlines()[-1] == f"next: dflash export {run_dir} --checkpoint latest"
    export(run_dir, ExportConfig(out=str(tmp_path / "out"), checkpoint="latest"))


def test_a_missing_prompts_file_is_seen_before_the_target_is_opened(tiny_run, tmp_path):
    config = EvaluateConfig(prompts=str(tmp_path / "none.jsonl"), out=str(tmp_path / "exam.json"), device="cpu")
    with pytest.raises(UserError, match=r"none\.jsonl"):
        evaluate(tiny_run.run_dir, config, open_nothing, read_questions, read_lines)
