"""A drafter's folder is examined as the run that it came from, with what the folder cannot know given."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.questions import read_lines, read_questions
from dflash_offline.train.evaluate.config import EvaluateConfig
from dflash_offline.train.evaluate.evaluate import evaluate
from dflash_offline.train.export.config import ExportConfig
from dflash_offline.train.export.export import export

TOKENS = 8
BOTH = ["zlab", "speculators"]


def open_nothing(name, device, dtype):
    pytest.fail("the exam began")


def examine(folder, answering, **settings):
    """The report, and the names of targets that were opened."""
    opened = []

    def open_target(name, device, dtype):
        opened.append(name)
        return answering

    tokens = {} if settings.get("offline") else {"max_new_tokens": TOKENS}
    config = EvaluateConfig(device="cpu", **tokens, **settings)
    return evaluate(folder, config, open_target, read_questions, read_lines), opened


def cycles_of(report):
    return sorted((answer.task, repr(answer.cycles)) for answer in report.acceptance.answers)


@pytest.fixture
def folder(request, tiny_run, tmp_path):
    """The run's drafter in a format, fp32 as the run itself."""
    layout = getattr(request, "param", "zlab")
    config = ExportConfig(out=str(tmp_path / "released"), checkpoint="latest", format=layout)
    return export(tiny_run.run_dir, config, dtype=torch.float32).path


@pytest.fixture(scope="module")
def of_run(tiny_run, tmp_path_factory):
    """The cycles of the run itself."""
    out = tmp_path_factory.mktemp("exam") / "run.json"
    return cycles_of(examine(tiny_run.run_dir, tiny_run.target, out=str(out), limit=2)[0])


@pytest.mark.parametrize("folder", BOTH, indirect=True)
def test_a_folder_is_accepted_as_its_run(tiny_run, folder, of_run, tmp_path):
    before = sorted(path.name for path in folder.iterdir())
    given = {"store": str(tiny_run.store), "out": str(tmp_path / "exam.json"), "limit": 2}
    name = {} if "speculators" in (folder / "config.json").read_text() else {"target": "tiny"}
    report, opened = examine(folder, tiny_run.target, **given, **name)
    assert opened == ["tiny"]  # speculators' config names it
    assert cycles_of(report) == of_run
    assert report.acceptance.num_cycles > 0
    exam = json.loads((tmp_path / "exam.json").read_text())
    assert (exam["step"], exam["num_equal"]) == (None, 2)
    assert report.saved == (str(tmp_path / "exam.json"),)
    assert report.text().splitlines()[0] == f"folder     {folder}"
    assert report.text().splitlines()[-1] == f"next: dflash export {folder} --format vllm"
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_folder_walks_a_store(tiny_run, folder, tmp_path):
    given = {"store": str(tiny_run.store), "out": str(tmp_path / "exam.json"), "offline": True}
    report, opened = examine(folder, None, **given)
    assert opened == []
    run, _ = examine(tiny_run.run_dir, None, out=str(tmp_path / "run.json"), offline=True)
    assert cycles_of(report) == cycles_of(run)


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"target": "tiny", "store": "given"}, "is not written into"),
        ({"out": "given", "store": "given"}, "does not say for which target"),
        ({"out": "given", "target": "tiny"}, "knows no store"),
        ({"out": "given", "offline": True}, "knows no store"),
        ({"out": "given", "target": "tiny", "store": "given", "checkpoint": "3"}, "checkpoint = '3' does nothing with"),
    ],
    ids=["out", "target", "prompts", "store", "checkpoint"],
)
def test_what_a_folder_does_not_know_is_asked_for(tiny_run, folder, tmp_path, settings, told):
    places = {"out": str(tmp_path / "exam.json"), "store": str(tiny_run.store)}
    given: dict[str, Any] = {name: places[name] if value == "given" else value for name, value in settings.items()}
    with pytest.raises(UserError, match=told) as caught:
        evaluate(folder, EvaluateConfig(device="cpu", **given), open_nothing, read_questions, read_lines)
    assert len(str(caught.value).splitlines()) == 3
    assert not (tmp_path / "exam.json").exists()


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"hidden_size": 64}, "has hidden_size 64, the drafter was trained for another target"),
        ({"vocab_size": 64}, "has vocab_size 64"),
        ({"num_layers": 5}, "has num_layers 5"),
    ],
    ids=["hidden_size", "vocab_size", "num_layers"],
)
def test_another_target_is_refused(tiny_run, folder, tmp_path, changes, told):
    class Other:
        facts = dataclasses.replace(tiny_run.target.facts, **changes)

    given = {"target": "tiny", "store": str(tiny_run.store), "out": str(tmp_path / "exam.json")}
    with pytest.raises(UserError, match=told) as caught:
        examine(folder, Other(), **given)
    assert len(str(caught.value).splitlines()) == 3
    assert "one that its folder does not name, with" in caught.value.happened


@pytest.mark.parametrize("folder", ["speculators"], indirect=True)
def test_taps_beyond_the_target_are_refused_where_the_folder_does_not_say_its_layers(tiny_run, folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    del config["transformer_layer_config"]["num_target_layers"]
    (folder / "config.json").write_text(json.dumps(config))

    class Short:
        facts = dataclasses.replace(tiny_run.target.facts, num_layers=4)

    given = {"store": str(tiny_run.store), "out": str(tmp_path / "exam.json")}
    with pytest.raises(UserError, match="reads the output of layer 4, and the target 'tiny' has 4 layers"):
        examine(folder, Short(), **given)


def test_a_damaged_folder_is_no_run(folder, tmp_path):
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="cannot be read"):
        examine(folder, None, target="tiny", store="store", out=str(tmp_path / "exam.json"))
