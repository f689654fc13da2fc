"""Where the result of an exam may be written, and how it is read back."""

import json

import pytest
from dflash_offline import UserError
from dflash_offline.train.evaluate.config import EvaluateConfig
from dflash_offline.train.evaluate.evaluate import evaluate
from dflash_offline.train.evaluate.evaluation_file import read_evaluation, result_path
from dflash_offline.train.export.config import ExportConfig
from dflash_offline.train.export.export import export

RESULT = json.dumps({"mode": "offline", "definitions": {}})


def open_nothing(name, device, dtype):
    pytest.fail("the exam began")


def read_nothing(*given):
    pytest.fail("prompts are read")


@pytest.mark.parametrize(
    "content", ["mine\n", "", "[1]", '{"mode": 1}', "[" * 100_000, "\udcff"], ids=lambda text: repr(text[:9])
)
def test_a_file_of_something_else_is_not_replaced(tiny_run, tmp_path, content):
    out = tmp_path / "precious"
    out.write_bytes(data := content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match="is there and is not the result of an evaluation") as caught:
        evaluate(tiny_run.run_dir, EvaluateConfig(out=str(out), device="cpu"), open_nothing, read_nothing, read_nothing)
    assert len(str(caught.value).splitlines()) == 3
    assert out.read_bytes() == data


def test_the_facts_of_a_run_are_not_replaced(tiny_run):
    out = tiny_run.run_dir / "run.json"
    before = out.read_bytes()
    with pytest.raises(UserError, match=r"run\.json' is there"):
        evaluate(
            tiny_run.run_dir,
            EvaluateConfig(out=str(out), offline=True, device="cpu"),
            open_nothing,
            read_nothing,
            read_nothing,
        )
    assert out.read_bytes() == before


@pytest.mark.parametrize("out", ["f.txt/x.json", "/proc/no-such-folder/y.json", "/proc/no-such-file.json", "."])
def test_a_place_that_takes_no_file_is_seen_before_the_exam(tiny_run, tmp_path, out):
    (tmp_path / "f.txt").write_text("mine\n")
    with pytest.raises(UserError, match=r"writing .* failed|is a folder") as caught:
        evaluate(
            tiny_run.run_dir,
            EvaluateConfig(out=str(tmp_path / out), device="cpu"),
            open_nothing,
            read_nothing,
            read_nothing,
        )
    assert len(str(caught.value).splitlines()) == 3


def test_new_files_and_earlier_results_are_taken(tmp_path):
    new = result_path(tmp_path, str(tmp_path / "deep" / "new.json"), False)
    assert new.parent.is_dir()
    assert list(new.parent.iterdir()) == []
    new.write_text(RESULT)
    assert result_path(tmp_path, str(new), False) == new
    assert new.read_text() == RESULT


def test_the_names_in_a_run_are_ours_even_when_broken(tmp_path):
    (tmp_path / "evaluation.json").write_text("{torn")
    assert result_path(tmp_path, None, False) == tmp_path / "evaluation.json"
    assert result_path(tmp_path, None, True) == tmp_path / "evaluation-offline.json"


@pytest.mark.parametrize("content", ["{torn", "[]", "{}"])
def test_an_export_says_which_result_is_broken(lab, tiny_run, tmp_path, content):
    run_dir = tmp_path / "run"
    lab.save_step(run_dir, lab.make_run(tiny_run.store, run_dir), 1)
    (run_dir / "evaluation.json").write_text(content)
    with pytest.raises(UserError, match=r"evaluation\.json' is broken") as caught:
        export(run_dir, ExportConfig(out=str(tmp_path / "out")))
    assert len(str(caught.value).splitlines()) == 3
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_seen_before_the_exam(lab, tiny_run, tmp_path):
    run_dir = tmp_path / "run"
    lab.save_step(run_dir, lab.make_run(tiny_run.store, run_dir), 1)
    next((run_dir / "checkpoints").glob("*/state.json")).write_text("{torn")
    with pytest.raises(UserError, match=r"checkpoint .* cannot be read"):
        evaluate(run_dir, EvaluateConfig(device="cpu"), open_nothing, read_nothing, read_nothing)


EXAM = {
    **{"mode": "decoded", "step": 1, "acceptance_length": 2.0, "num_prompts": 3, "num_equal": 3, "max_new_tokens": 8},
    **{"definitions": {"acceptance_length": "tokens of a cycle"}, "by_task": {"a": {"acceptance_length": 2.0}}},
}


@pytest.mark.parametrize(
    "change",
    [
        {"by_task": 3.5},
        {"by_task": {"a": {"acceptance_length": 2.0, "intervals": {"acceptance_length": [1.0, "x"]}}}},
        {"intervals": {"acceptance_length": 5}},
        {"acceptance_length": "2"},
        {"definitions": {}},
        {"max_new_tokens": None},
        {"num_equal": "all"},
    ],
    ids=str,
)
def test_an_export_whose_card_would_say_something_strange_names_it(lab, tiny_run, tmp_path, change):
    run_dir = tmp_path / "run"
    lab.save_step(run_dir, lab.make_run(tiny_run.store, run_dir), 1)
    config = ExportConfig(out=str(tmp_path / "out"), checkpoint="1")
    (run_dir / "evaluation.json").write_text(json.dumps(EXAM | change))
    with pytest.raises(UserError, match=rf"evaluation\.json' has {next(iter(change))} = ") as caught:
        export(run_dir, config)
    assert len(str(caught.value).splitlines()) == 3
    assert not (tmp_path / "out").exists()
    (run_dir / "evaluation.json").write_text(json.dumps(EXAM))
    export(run_dir, config)
    assert "| a | 2.00 |" in (tmp_path / "out" / "README.md").read_text()


def test_a_result_is_read_back(tmp_path):
    (tmp_path / "x.json").write_text(RESULT)
    assert read_evaluation(tmp_path / "x.json") == json.loads(RESULT)
