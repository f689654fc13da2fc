"""What the charts of a run show: the numbers of the lines under their names."""

from typing import Any

import pytest
from dflash_offline.train.report.metrics_of_run import RunMetrics
from dflash_offline.train.report.series import histogram_chart, last_exam, run_charts, slot_means, walk_chart


def test_a_whole_run_has_every_chart_and_a_bare_one_has_none(lab):
    keys = [chart.key for chart in run_charts(RunMetrics.of(lab.usual_lines()), {})]
    assert keys == [
        "loss",
        "acceptance",
        "teacher-forced",
        "learning-rate",
        "accuracy-by-slot",
        "survival-by-slot",
        "accepted-lengths",
        "throughput",
        "waiting",
        "gradient-norm",
    ]
    assert run_charts(RunMetrics(), {}) == []


def test_evaluations_stand_beside_training_in_the_slots_and_the_histogram(lab):
    walked = {"per_position": [0.5, 0.25, None], "histogram": [1, 0, 3, 0], "acceptance_length": 2.5}
    charts: dict[str, Any] = {
        c.key: c for c in run_charts(RunMetrics.of(lab.usual_lines()), {"evaluation-offline.json": walked})
    }
    lines = {line.name: line for line in charts["survival-by-slot"].lines}
    assert list(lines["walk, offline"].points) == [(1, 50.0), (2, 25.0)]
    assert [y for _, y in lines["held out, last exam"].points] == pytest.approx([50, 40, 30])
    (group,) = charts["accepted-lengths"].groups
    assert list(group.values) == [25.0, 0.0, 75.0, 0.0]
    assert group.mean == 2.5


def test_slots_are_means_over_the_lines_that_have_them():
    lines = [{"a_slot_1": 0.5, "a_slot_3": 1.0}, {"a_slot_1": 0.25}, {"a_slot_x": 9}]
    assert slot_means(lines, "a_slot_") == [0.375, None, 1.0]
    assert slot_means([], "a_slot_") == []


def test_exams_without_anything_to_measure_are_not_drawn(lab):
    metrics = RunMetrics.of([lab.exam_line(0, None, **{f"num_cycles_gaining_{k}": 0 for k in range(1, 5)})])
    assert walk_chart(metrics) is None
    assert histogram_chart(metrics, {}) is None
    assert last_exam(metrics)["acceptance_length"] is None


def test_waiting_is_a_share_of_each_update(lab):
    lines = [lab.train_line(1, step_s=0.5, wait_s=0.1, reduce_s=0.25), lab.train_line(2, step_s=0.0)]
    chart: Any
    (chart,) = [chart for chart in run_charts(RunMetrics.of(lines), {}) if chart.key == "waiting"]
    assert [(line.name, list(line.points)) for line in chart.lines] == [
        ("loader, each step", [(1, 20.0)]),
        ("other ranks and the sum, each step", [(1, 50.0)]),
    ]
