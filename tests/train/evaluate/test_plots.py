"""Pictures: their size, what they show, and that nothing is drawn from nothing."""

import json
import struct

import numpy as np
import pytest
from dflash_offline.train.metrics import EXAM, METRICS_NAME, ORIGIN, TRAIN, MetricsFile
from dflash_offline.train.plots import WIDTH_PX, histogram_figure, plot_run, training_figure
from dflash_offline.train.report.metrics_of_run import RunMetrics, read_run_metrics
from dflash_offline.train.report.series import last_exam
from matplotlib.patches import Rectangle


def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


@pytest.fixture
def run_dir(tmp_path):
    with MetricsFile(tmp_path / METRICS_NAME, -1) as metrics:
        metrics.write(EXAM, 0, acceptance_length=1.0)
        for step in range(1, 201):
            metrics.write(TRAIN, step, loss=6.0 / step**0.3)
            if step % 50 == 0:
                counts = {f"num_cycles_gaining_{k}": k * step for k in (1, 2, 3)}
                metrics.write(EXAM, step, acceptance_length=1 + step / 60, **counts)
    return tmp_path


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_both_pictures_are_written_whole(run_dir, is_evaluated):
    evaluation = run_dir / "evaluation.json"
    evaluation.write_text(json.dumps({"histogram": [40, 20, 0, 140], "acceptance_length": 3.1}))
    paths = plot_run(run_dir, evaluation if is_evaluated else None)
    assert [path.name for path in paths] == ["training.png", "accepted-lengths.png"]
    assert [png_size(path)[0] for path in paths] == [WIDTH_PX, WIDTH_PX]
    assert sorted(path.name for path in run_dir.iterdir()) == sorted(
        ["accepted-lengths.png", "evaluation.json", "metrics.jsonl", "training.png"]
    )
    assert plot_run(run_dir) == paths, "drawing again replaces them"


def test_the_last_exam_gives_the_histogram(run_dir):
    assert last_exam(read_run_metrics(run_dir)) == {
        "histogram": [200, 400, 600],
        "acceptance_length": 1 + 200 / 60,
    }


def test_without_numbers_nothing_is_drawn(tmp_path):
    assert plot_run(tmp_path) == []
    evaluation = tmp_path / "evaluation.json"
    evaluation.write_text(json.dumps({"histogram": [0, 0], "acceptance_length": None}))
    assert plot_run(tmp_path, evaluation) == []


def test_the_curves_are_the_lines_of_the_file():
    metrics = [{"kind": "exam", "step": 0, "acceptance_length": 1.0}]
    metrics += [{"kind": "train", "step": step, "loss": float(step % 7)} for step in range(1, 101)]
    metrics += [{"kind": "exam", "step": 100, "acceptance_length": 2.5}]
    upper, lower = training_figure(RunMetrics.of(metrics)).axes
    raw, smooth = upper.lines
    assert np.asarray(raw.get_xydata()).tolist() == [[step, step % 7] for step in range(1, 101)]
    assert np.asarray(smooth.get_xydata())[0].tolist() == [2, 1.5]
    assert np.asarray(lower.lines[0].get_xydata()).tolist() == [[0, 1.0], [100, 2.5]]
    assert "weighted mean" in upper.get_ylabel()
    assert "tokens" in lower.get_ylabel()
    assert "step" in lower.get_xlabel()


def test_the_walk_is_drawn_for_each_origin_beside_all():
    metrics = []
    for step in (0, 5):
        metrics += [{"kind": EXAM, "step": step, "origin": "elsewhere, target greedy", "acceptance_length": 2.0}]
        metrics += [{"kind": ORIGIN, "step": step, "origin": "elsewhere", "acceptance_length": 1.5 + step}]
        metrics += [{"kind": ORIGIN, "step": step, "origin": "target greedy", "acceptance_length": 2.5 + step}]
    metrics.append({"kind": TRAIN, "step": 5, "loss": 1.0})
    _, lower = training_figure(RunMetrics.of(metrics)).axes
    assert [np.asarray(line.get_xydata()).tolist() for line in lower.lines] == [
        [[0, 2.0], [5, 2.0]],
        [[0, 1.5], [5, 6.5]],
        [[0, 2.5], [5, 7.5]],
    ]
    assert [line.get_label() for line in lower.lines] == [
        "answers from: elsewhere, target greedy",
        "of these: elsewhere",
        "of these: target greedy",
    ]


def test_a_run_without_held_out_answers_has_one_curve():
    metrics = [{"kind": "train", "step": 1, "loss": 2.0}, {"kind": "exam", "step": 1, "acceptance_length": None}]
    (only,) = training_figure(RunMetrics.of(metrics)).axes
    assert len(only.lines) == 1
    assert "step" in only.get_xlabel()


def test_a_run_without_a_step_shows_its_exam():
    (only,) = training_figure(RunMetrics.of([{"kind": "exam", "step": 0, "acceptance_length": 1.0}])).axes
    assert np.asarray(only.lines[0].get_xydata()).tolist() == [[0, 1.0]]


def test_the_bars_are_shares_of_cycles():
    (axes,) = histogram_figure({"histogram": [1, 0, 3], "acceptance_length": 2.5}).axes
    assert [bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)] == [25.0, 0.0, 75.0]
    assert "%" in axes.get_ylabel()
    assert "tokens" in axes.get_xlabel()
