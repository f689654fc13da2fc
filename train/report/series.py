"""Which numbers of a run a chart shows, and under which names: the one owner for the page and for the pictures.

Knows metrics and results of exams; draws nothing. A chart without a number is left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..evaluate.evaluation_file import EVALUATION_NAME, OFFLINE_NAME
from ..value_rules import is_finite
from .chart import Bars, Chart, Group, Line, Lines, Point
from .metrics_of_run import RunMetrics, points_of
from .thin import smoothed

Evaluations = Mapping[str, Mapping[str, Any]]  # by the name of their file in RUN
TRAINING, HELD_OUT, WALKED, DECODING = 0, 1, 2, 3  # colours that mean one thing on every chart
ORIGINS = 4  # colours from here on: answers of single origins
EVALUATIONS = ((OFFLINE_NAME, "walk, offline", WALKED), (EVALUATION_NAME, "decoded", DECODING))
SLOT_LABEL = "slot of the block (draft position)"
MOST_SLOTS = 1024  # of a block
LEAST_LOG = 1e-30  # a curve that goes below has a linear axis
FORCED = "given the right tokens before"


def run_charts(metrics: RunMetrics, evaluations: Evaluations) -> list[Chart]:
    """Every chart of one run that has something to show, in the order of a page."""
    found = [
        loss_chart(metrics),
        walk_chart(metrics),
        forced_chart(metrics),
        lr_chart(metrics),
        accuracy_chart(metrics),
        survival_chart(metrics, evaluations),
        histogram_chart(metrics, evaluations),
        rate_chart(metrics),
        wait_chart(metrics),
        norm_chart(metrics),
        device_chart(metrics),
    ]
    return [chart for chart in found if chart is not None]


def with_mean(points: Sequence[Point], colour: int = TRAINING) -> list[Line]:
    """Each step, faint, and the running mean over it; short curves as they are."""
    width, means = smoothed(points)
    if width == 1:
        return [Line(name="each step", points=points, colour=colour)] if points else []
    return [
        Line(name="each step", points=points, colour=colour, is_faint=True),
        Line(name=f"mean of {width:,} steps", points=means, colour=colour),
    ]


def loss_chart(metrics: RunMetrics) -> Lines | None:
    return falling_chart(metrics, "loss", "loss", "Training loss", "weighted mean over labels")


def falling_chart(metrics: RunMetrics, name: str, key: str, title: str, y_label: str) -> Lines | None:
    """A number of each update with its running mean, on a logarithmic axis where it is never 0."""
    points = metrics.curves[name].points
    if not points:
        return None
    is_log = min(value for _, value in points) > LEAST_LOG
    return Lines(key=key, title=title, y_label=y_label, lines=with_mean(points), is_log=is_log)


def walk_chart(metrics: RunMetrics) -> Lines | None:
    """The walk over held-out answers by both definitions, and for each origin where there are several."""
    main = metrics.exam_points("acceptance_length")
    if not main:
        return None
    origin = metrics.exams[-1].get("origin") or "origin unknown"
    lines = [Line(name=f"answers from: {origin}", points=main, colour=HELD_OUT, is_marked=True)]
    cycles = metrics.exam_points("acceptance_length_cycles")
    if cycles:
        lines.append(Line(name="the same, mean over cycles", points=cycles, colour=WALKED, is_marked=True))
    for number, name in enumerate(sorted({line["origin"] for line in metrics.origins})):
        own = points_of([line for line in metrics.origins if line["origin"] == name], "acceptance_length")
        if own:
            lines.append(Line(name=f"of these: {name}", points=own, colour=ORIGINS + number, is_marked=True))
    return Lines(
        key="acceptance",
        title="Held-out acceptance length, bonus token included; mean over answers",
        y_label="tokens per target forward",
        lines=lines,
        floor=1.0,
    )


def forced_chart(metrics: RunMetrics) -> Lines | None:
    """Acceptance with the right tokens before each block: rosier than the walk, on training rows and held out."""
    name = "acceptance_length_teacher_forced"
    points, held_out = metrics.curves[name].points, metrics.exam_points(f"held_out_{name}")
    lines = [
        Line(name=f"training rows, {line.name}", points=line.points, colour=line.colour, is_faint=line.is_faint)
        for line in with_mean(points)
    ]
    if held_out:
        lines.append(Line(name="held out", points=held_out, colour=HELD_OUT, is_marked=True))
    if not lines:
        return None
    return Lines(
        key="teacher-forced",
        title="Acceptance length with teacher forcing",
        y_label=f"leading right slots + 1, {FORCED}",
        lines=lines,
        floor=1.0,
    )


def lr_chart(metrics: RunMetrics) -> Lines | None:
    points = metrics.curves["lr"].points
    if not points:
        return None
    lines = [Line(name="learning rate", points=points, colour=TRAINING)]
    return Lines(key="learning-rate", title="Learning rate", y_label="of the matrices", lines=lines, floor=0.0)


def accuracy_chart(metrics: RunMetrics) -> Lines | None:
    """Is slot K right? On the newest updates and on the last exam."""
    return slot_chart(metrics, "accuracy", "Accuracy by slot", f"% of labelled slots, {FORCED}", [])


def survival_chart(metrics: RunMetrics, evaluations: Evaluations) -> Lines | None:
    """Are all of the first K right? The same, and in the cycles of evaluations."""
    more = [
        Line(name=name, points=shares(evaluations[file].get("per_position") or ()), colour=colour, is_marked=True)
        for file, name, colour in EVALUATIONS
        if file in evaluations
    ]
    return slot_chart(metrics, "survival", "Acceptance by slot", "% of blocks whose first K drafts are all right", more)


def slot_chart(metrics: RunMetrics, number: str, title: str, y_label: str, more: Sequence[Line]) -> Lines | None:
    """A number of every slot: training rows, held-out samples, and more lines."""
    newest = shares(slot_means(list(metrics.recent), f"{number}_slot_"))
    exam = shares(slot_means(metrics.exams[-1:], f"held_out_{number}_slot_"))
    lines = [
        Line(name=f"training rows, newest {len(metrics.recent)} updates", points=newest, is_marked=True),
        Line(name="held out, last exam", points=exam, colour=HELD_OUT, is_marked=True),
        *more,
    ]
    lines = [line for line in lines if line.points]
    if not lines:
        return None
    return Lines(key=f"{number}-by-slot", title=title, y_label=y_label, x_label=SLOT_LABEL, lines=lines, floor=0.0)


def slot_means(lines: Sequence[Mapping[str, Any]], prefix: str) -> list[float | None]:
    """The mean over the lines of `prefix`K for K = 1, 2, ...; None where no line has it but a later slot's."""
    names = {name for line in lines for name in line if name.startswith(prefix)}
    slots = [int(slot) for name in names if (slot := name[len(prefix) :]).isdecimal() and len(slot) <= 4]
    last = max((slot for slot in slots if slot <= MOST_SLOTS), default=0)
    found: list[float | None] = []
    for slot in range(1, last + 1):
        values = [line[name] for line in lines if is_finite(line.get(name := f"{prefix}{slot}"))]
        found.append(sum(values) / len(values) if values else None)
    return found


def shares(values: Sequence[float | None]) -> list[Point]:
    """(K, percent) for K = 1, 2, ..."""
    return [(slot, 100 * value) for slot, value in enumerate(values, start=1) if value is not None]


def last_exam(metrics: RunMetrics) -> dict[str, Any]:
    """Histogram and acceptance length of the newest exam line; empty without one."""
    if not metrics.exams:
        return {}
    exam, counts = metrics.exams[-1], []
    while is_finite(exam.get(name := f"num_cycles_gaining_{len(counts) + 1}")):
        counts.append(exam[name])
    return {"histogram": counts, "acceptance_length": exam.get("acceptance_length")}


def histogram_chart(metrics: RunMetrics, evaluations: Evaluations) -> Bars | None:
    """Tokens gained by a cycle, in the evaluations; without one in the last exam."""
    found = [(evaluations[file], name, colour) for file, name, colour in EVALUATIONS if file in evaluations]
    return histogram_bars(found or [(last_exam(metrics), "last exam", HELD_OUT)])


def histogram_bars(exams: Sequence[tuple[Mapping[str, Any], str, int]]) -> Bars | None:
    """Shares of cycles by tokens gained, 1 to block_size; exams without a cycle are left out."""
    groups = [
        Group(
            name=f"{name}, {sum(exam['histogram']):,} cycles",
            values=[100 * count / sum(exam["histogram"]) for count in exam["histogram"]],
            colour=colour,
            mean=exam["acceptance_length"],
            mean_text=f"acceptance length {exam['acceptance_length']:.2f} (mean over prompts)",
        )
        for exam, name, colour in exams
        if sum(exam.get("histogram") or ()) and is_finite(exam.get("acceptance_length"))
    ]
    if not groups:
        return None
    return Bars(
        key="accepted-lengths",
        title="Tokens gained by a cycle",
        y_label="% of cycles",
        x_label=f"tokens per target forward, bonus token included (block of {len(groups[0].values)})",
        groups=groups,
    )


def rate_chart(metrics: RunMetrics) -> Lines | None:
    points = metrics.curves["rate_tok_s"].points
    if not points:
        return None
    lines = with_mean(points)
    return Lines(key="throughput", title="Throughput", y_label="tokens of samples per second", lines=lines, floor=0.0)


def wait_chart(metrics: RunMetrics) -> Lines | None:
    """The share of each update in which the device had no row to compute on, and that of the wait for other ranks."""
    seconds = dict(metrics.curves["step_s"].points)
    lines = []
    for name, text, colour in (("wait_s", "loader", TRAINING), ("reduce_s", "other ranks and the sum", HELD_OUT)):
        points = [(step, 100 * s / seconds[step]) for step, s in metrics.curves[name].points if seconds.get(step)]
        lines += [
            Line(name=f"{text}, {line.name}", points=line.points, colour=colour, is_faint=line.is_faint)
            for line in with_mean(points)
        ]
    if not lines:
        return None
    return Lines(key="waiting", title="Waiting", y_label="% of an update's time", lines=lines, floor=0.0)


def norm_chart(metrics: RunMetrics) -> Lines | None:
    return falling_chart(metrics, "grad_norm", "gradient-norm", "Gradient norm", "before clipping")


def device_chart(metrics: RunMetrics) -> Lines | None:
    """How much of the device's own speed was reached; on CUDA."""
    points = [(step, 100 * share) for step, share in metrics.curves["mfu"].points]
    if not points:
        return None
    lines = with_mean(points)
    return Lines(key="device", title="Use of the device", y_label="% of a large matrix product", lines=lines, floor=0.0)
