"""A run that really trained, as page and as text; and on what it ran."""

import importlib.metadata
import json

from dflash_offline.train.environment import plan_facts
from dflash_offline.train.memory import Moment, Part, Plan
from dflash_offline.train.memory_choice import Choice
from dflash_offline.train.report.page import run_page
from dflash_offline.train.report.run_folder import FINISHED, read_run
from dflash_offline.train.summary import describe_run


def test_a_run_writes_on_what_it_ran(reference_run):
    found = json.loads((reference_run / "environment.json").read_text())
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert {"python", "dflash-offline", "numpy"} <= set(found["versions"])
    assert found["device"].startswith("CPU")
    assert (found["num_ranks"], found["threads"], found["memory_plan"]) == (1, 1, None)


def test_the_plan_of_memory_is_kept_part_by_part():
    held, moment = Part("weights", 100, "drafter"), Moment("loss", (Part("logits", 60, "loss.chunk_blocks"),))
    found = plan_facts(Choice(64, False, True, Plan((held,), (moment, Moment("exam", ()))), 1000))
    assert found is not None
    assert (found["peak_bytes"], found["largest"], found["card_bytes"]) == (160, "loss", 1000)
    assert [(part["name"], part["size_bytes"]) for part in found["parts"]] == [("weights", 100), ("logits", 60)]
    assert plan_facts(None) is None


def test_a_trained_run_is_shown_whole(reference_run, lab):
    run = read_run(reference_run)
    assert (run.state, run.notes) == (FINISHED, ())
    html, text = run_page(run), describe_run(reference_run)
    exam = lab.metrics_of(reference_run, "exam")[-1]
    assert html.count("<figure") == 10
    for shown in (html, text):
        assert f"{exam['acceptance_length']:.3f}" in shown
        assert f"torch {importlib.metadata.version('torch')}" in shown
    assert run.config is not None
    assert run.config.optim.lr == 0.01
