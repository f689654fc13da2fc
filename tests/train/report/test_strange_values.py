"""Values that no run writes: a report names them or leaves them out, and never ends on them."""

import json

import pytest
from dflash_offline import UserError
from dflash_offline.train.report.page import run_page
from dflash_offline.train.report.run_folder import read_run
from dflash_offline.train.report.sweep_folder import read_comparison, read_runs
from dflash_offline.train.summary import describe_run, describe_sweep


@pytest.mark.parametrize(
    "numbers",
    [
        {"loss": 10**400},
        {"step": 10**30},
        {"step": True},
        {"loss": 1e308, "lr": -1e308},
        {"loss": 5e-324},
        {"accuracy_slot_999999999": 0.5},
    ],
    ids=str,
)
def test_numbers_out_of_any_range_do_not_end_a_page(make_run, lab, tmp_path, numbers) -> None:
    lines = [*lab.usual_lines(), *(lab.train_line(step) | numbers for step in (11, 12))]
    run = read_run(make_run(tmp_path / "run", lines))
    assert "acceptance length" in run_page(run)
    assert len(run.metrics.curves["grad_norm"]) >= 10


def test_an_acceptance_length_that_is_text_is_not_ranked(make_run, lab, tmp_path) -> None:
    strange = make_run(tmp_path / "a", [*lab.usual_lines(), lab.exam_line(11, "2.0")])
    run_page(read_run(strange))
    entries = read_runs([strange, make_run(tmp_path / "b")]).entries
    assert [(entry.label, entry.rank) for entry in entries] == [("b", 1), ("a", None)]


@pytest.mark.parametrize(
    "key, value",
    [("histogram", "xyz"), ("histogram", [-1, 2]), ("histogram", [None]), ("per_position", 5), ("intervals", "x")],
)
def test_an_evaluation_of_strange_values_is_named(make_run, tmp_path, key, value) -> None:
    run_dir = make_run(tmp_path / "run")
    result = {"mode": "decoded", "definitions": {}, "acceptance_length": 2.0, "histogram": [1, 1], key: value}
    (run_dir / "evaluation.json").write_text(json.dumps(result))
    run = read_run(run_dir)
    assert f"evaluation.json is broken and left out: see {key}" in run.notes
    run_page(run)


def test_an_evaluation_of_nothing_gives_a_page(make_run, tmp_path) -> None:
    run_dir = make_run(tmp_path / "run")
    for length in ({"acceptance_length": None}, {}):
        result = {"mode": "decoded", "definitions": {}, "histogram": [1, 1]} | length
        (run_dir / "evaluation.json").write_text(json.dumps(result))
        run_page(read_run(run_dir))


@pytest.mark.parametrize("plan", [{}, {"parts": [1], "largest": "x", "peak_bytes": 1, "card_bytes": 1}, {"parts": 5}])
def test_a_memory_plan_that_is_none_is_named(make_run, tmp_path, plan) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "environment.json").write_text(json.dumps({"memory_plan": plan}))
    run = read_run(run_dir)
    assert "environment.json is broken: its memory plan is left out" in run.notes
    run_page(run)


@pytest.mark.parametrize(
    "change", [{"spec": None}, {"zzz": 1}, {"store": "x"}, {"init": {}}, {"snapshot": "\ud800"}, None], ids=ascii
)
def test_facts_that_are_none_are_refused(make_run, tmp_path, change) -> None:
    run_dir = make_run(tmp_path / "run")
    path = run_dir / "run.json"
    path.write_text(json.dumps(None if change is None else json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match="is broken") as caught:
        read_run(run_dir)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    "place, name, value",
    [
        *(("spec", "num_kv_heads", value) for value in (0, -1, "2")),
        *(("store.target", "eos_ids", value) for value in (7, "7", ["7"])),
        *(("store.target", name, "7") for name in ("bos_id", "pad_id")),
        *(("store.target", "name", value) for value in (None, "\ud800")),
    ],
    ids=ascii,
)
def test_facts_of_strange_values_are_refused_by_name(make_run, tmp_path, place, name, value) -> None:
    path = make_run(tmp_path / "run") / "run.json"
    values = json.loads(path.read_text())
    inner = values
    for part in place.split("."):
        inner = inner[part]
    inner[name] = value
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"run.json' is broken") as caught:
        describe_run(tmp_path / "run")
    assert len(str(caught.value).encode().splitlines()) == 3


def test_half_a_character_is_refused_or_left_out(make_run, make_sweep, lab, tmp_path) -> None:
    """`"\\ud800"` is JSON and no text: no terminal prints it."""
    half = json.dumps("\ud800")
    run_dir = make_run(tmp_path / "run", [*lab.usual_lines(), lab.exam_line(10, origin="\ud800")])
    (run_dir / "environment.json").write_text(f'{{"device": {half}}}')
    (run_dir / "evaluation.json").write_text(f'{{"mode": "decoded", "definitions": {{}}, "device": {half}}}')
    text = describe_run(run_dir)
    text.encode()
    assert "1 lines of metrics.jsonl are broken" in text
    assert "environment.json is broken: UnicodeEncodeError" in text
    assert "evaluation.json' is broken: UnicodeEncodeError" in text
    make_sweep(tmp_path / "sweep", error="\ud800")
    with pytest.raises(UserError, match=r"sweep.json' is broken: UnicodeEncodeError") as caught:
        describe_sweep(tmp_path / "sweep")
    assert len(str(caught.value).encode().splitlines()) == 3


@pytest.mark.parametrize(
    "change",
    [
        *({"ranking": ranking} for ranking in ([99], "x", [1, 1], [[1]], [5])),
        *({"effects": effects} for effects in (None, [{}], [{"field": "seed", "values": [{"label": True}]}])),
        *({name: None} for name in ("devices", "base", "fields", "store")),
        *({"halving": halving} for halving in ({}, {"steps": ["a"], "keep": 0.5})),
        *({"runs": []}, {"count": "ten"}, {"seed": True}, {"segments": 7}),
    ],
    ids=str,
)
def test_a_sweep_of_strange_values_is_refused(make_sweep, tmp_path, change) -> None:
    make_sweep(tmp_path / "sweep")
    path = tmp_path / "sweep" / "sweep.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=f"see {next(iter(change))}"):
        read_comparison(tmp_path / "sweep")


@pytest.mark.parametrize(
    "change",
    [
        {"overrides": None},
        *({"state": state} for state in (None, "done", [1])),
        *({"step": step} for step in ("x", -1, True)),
        {"rungs": [{"step": 4, "acceptance_length": 1.5, "acceptance_length_cycles": None, "is_kept": True}]},
        {"rungs": [{"step": 4, "acceptance_length": 1.5, "acceptance_length_cycles": 1.5}]},
        {"rungs": [{"step": 4, "is_kept": True}]},
        {"decoded": "x"},
        {"results": "x"},
    ],
    ids=str,
)
def test_a_run_of_strange_values_in_a_sweep_is_refused(make_sweep, tmp_path, change) -> None:
    refused_run(make_sweep, tmp_path, change)


@pytest.mark.parametrize(
    "change",
    [
        {"acceptance_length": float("nan")},
        {"acceptance_length_cycles": None},
        {"num_parameters": None},
        {"draft_s": "fast"},
        *({"intervals": intervals} for intervals in (None, {"acceptance_length": [1.0]})),
    ],
    ids=str,
)
def test_results_of_strange_values_in_a_sweep_are_refused(make_sweep, tmp_path, change) -> None:
    whole = {"step": 10, "acceptance_length": 2.0, "acceptance_length_cycles": 1.9, "intervals": {}}
    whole |= {"draft_s": 0.002, "num_parameters": 1000, "train_s": 1.0, "loss": 0.5}
    refused_run(make_sweep, tmp_path, {"results": whole | change})


def refused_run(make_sweep, tmp_path, change) -> None:
    make_sweep(tmp_path / "sweep")
    path = tmp_path / "sweep" / "sweep.json"
    content = json.loads(path.read_text())
    content["runs"][0] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="see run 1") as caught:
        read_comparison(tmp_path / "sweep")
    assert len(str(caught.value).splitlines()) == 3
