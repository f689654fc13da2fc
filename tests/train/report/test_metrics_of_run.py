"""metrics.jsonl in one pass: the numbers that are there, whatever else is."""

import json

import pytest
from dflash_offline.train.metrics import read_metrics
from dflash_offline.train.report.metrics_of_run import CURVES, RECENT, RunMetrics, read_run_metrics


def test_curves_are_the_lines_of_the_file(make_run, lab, tmp_path):
    run_dir = make_run(tmp_path / "run", lab.usual_lines(120), steps=120)
    slow, found = read_metrics(run_dir / "metrics.jsonl"), read_run_metrics(run_dir)
    updates = [line for line in slow if line["kind"] == "train"]
    for name in CURVES:
        assert found.curves[name].points == [(line["step"], line[name]) for line in updates if name in line], name
    assert list(found.recent) == updates[-RECENT:]
    assert found.exams == [line for line in slow if line["kind"] == "exam"]
    assert (found.num_updates, found.last_step, found.notes) == (120, 120, [])
    assert found.wait_share() == pytest.approx(0.2)
    assert found.rate_tok_s() == pytest.approx(1000)
    assert found.peak_bytes() == 3 * 10**8


def test_a_half_written_last_line_is_told_and_does_not_count(make_run, tmp_path):
    run_dir = make_run(tmp_path / "run")
    path = run_dir / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "train", "step": 11, "lo')
    found = read_run_metrics(run_dir)
    assert found.last_step == 10
    assert any("half-written" in note for note in found.notes)


@pytest.mark.parametrize(
    "line", ["nonsense", "[1, 2]", '{"step": "5", "kind": "train"}', '{"kind": "train"}', "\x00\xff"]
)
def test_broken_lines_are_counted_and_named(make_run, tmp_path, line):
    run_dir = make_run(tmp_path / "run")
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[2:2] = [line, line]
    path.write_text("\n".join(lines) + "\n")
    (note,) = read_run_metrics(run_dir).notes
    assert "2 lines" in note
    assert "line 3" in note


def test_what_is_no_number_is_no_point():
    line = {"kind": "train", "step": 1, "loss": float("nan"), "lr": None, "grad_norm": True, "step_s": "0.1"}
    found = RunMetrics.of([line, json.loads(json.dumps(line)) | {"step": 2, "loss": 2.0}])
    assert found.curves["loss"].points == [(2, 2.0)]
    assert not any(found.curves[name].points for name in ("lr", "grad_norm", "step_s"))
    assert found.wait_share() is None
    assert found.rate_tok_s() is None


def test_without_a_file_there_is_a_note(tmp_path):
    found = read_run_metrics(tmp_path)
    assert found.num_updates == 0
    assert "metrics.jsonl" in found.notes[0]
