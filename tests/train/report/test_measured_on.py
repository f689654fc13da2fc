"""Runs side by side that were not measured on the same: what differs in which of them is said."""

import dataclasses
import json
from typing import Any

import pytest
from dflash_offline.train.facts import read_facts
from dflash_offline.train.report.page import comparison_page
from dflash_offline.train.report.sweep_folder import read_runs


@pytest.fixture
def notes_of(make_run, tmp_path):
    """The notes on two runs, the second of which has other facts."""

    def notes(change: dict[str, Any], store: dict[str, Any] | None = None) -> list[str]:
        folders = [make_run(tmp_path / name) for name in ("a", "b")]
        path = folders[1] / "run.json"
        values = json.loads(path.read_text())
        path.write_text(json.dumps(values | change | {"store": values["store"] | (store or {})}))
        return list(read_runs(folders).notes)

    return notes


TARGET = {"name": "tiny", "weights_sha256": "ab" * 32, "num_layers": 6}


@pytest.mark.parametrize(
    "change, store, told",
    [
        ({"eval_samples": 3}, {}, "the number of answers of an exam is 5 in a, 3 in b"),
        ({"num_held_out": 300}, {}, "the number of held-out answers is 5 in a, 300 in b"),
        ({"segments": "0-3"}, {"num_segments": 9}, 'segments is "all" in a, "0-3" in b'),
        ({"snapshot": "11"}, {}, 'snapshot is "00" in a, "11" in b'),
        ({}, {"codec": "int8"}, 'store.codec is "raw" in a, "int8" in b'),
        ({}, {"plan_sha256": "ef" * 32}, 'store.plan_sha256 is "cdcdcdcdcdcdcdcdcdcd... in a, "efef'),
        ({}, {"target": TARGET | {"name": "other"}}, 'store.target.name is "tiny" in a, "other" in b'),
        ({}, {"target": TARGET | {"weights_sha256": "cd" * 32}}, "store.target.weights_sha256 is"),
        ({}, {"window": 9}, 'store.window is "(absent)" in a, 9 in b'),
    ],
    ids=str,
)
def test_what_differs_is_said_of_which_runs(notes_of, change, store, told):
    (note,) = notes_of(change, store)
    assert "so do not rank them by acceptance" in note
    assert told in note


@pytest.mark.parametrize(
    "change, store",
    [
        ({"eval_samples": 64, "seed": 7, "store_path": "/copy"}, {}),  # both are more than the held-out samples
        ({}, {"data": {"report": {"prompts": 5}}}),
        ({}, {"target": TARGET | {"config_sha256": "00"}}),  # stores that were written before have none
    ],
    ids=str,
)
def test_what_leaves_the_answers_the_same_is_no_difference(notes_of, change, store):
    assert notes_of(change, store) == []


def test_a_drafter_of_some_taps_is_measured_like_one_of_all(make_run, tmp_path):
    folders = [make_run(tmp_path / name) for name in ("a", "b")]
    facts = read_facts(folders[1])
    spec = dataclasses.replace(facts.spec, num_taps=1, tap_layers=(facts.spec.tap_layers[0],))
    (folders[1] / "run.json").write_bytes(dataclasses.replace(facts, spec=spec).as_json())
    assert read_runs(folders).notes == []


def test_of_many_runs_and_facts_the_first_are_named(make_run, lab, tmp_path):
    folders = [make_run(tmp_path / f"r{number}") for number in range(8)]
    for folder in folders[1:7]:
        values = json.loads((folder / "run.json").read_text())
        values |= {"eval_samples": 2, "num_held_out": 6, "segments": "0", "snapshot": "11"}
        values["store"] |= {"num_segments": 3, "codec": "int8"}
        (folder / "run.json").write_text(json.dumps(values))
    comparison = read_runs(folders)
    (note,) = comparison.notes
    assert "is 5 in r0 and r7, 2 in r1, r2, r3, r4 and 2 more;" in note
    assert note.endswith("; and 2 facts more")
    assert note in lab.Page(comparison_page(comparison)).text
