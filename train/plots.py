"""Pictures of a run: loss and acceptance over steps, and how many tokens a cycle gained.

Reads metrics.jsonl and the exam's JSON; draws with matplotlib's Agg, so it needs no display.
Knows no tensor. What is not there is not drawn.
"""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..store.files import publish
from .metrics import EXAM, METRICS_NAME, ORIGIN, TRAIN, read_metrics

TRAINING_NAME, HISTOGRAM_NAME = "training.png", "accepted-lengths.png"
WIDTH_PX, DPI = 900, 100
LOSS_COLOUR, EXAM_COLOUR, GRID_COLOUR = "#1f5a94", "#b3541e", "#d8d8d8"
MOST_LABELS = 32  # bars that have room for a number each
SMOOTHED_SHARE = 0.02  # of the steps, the width of the running mean


def plot_run(run_dir: Path, evaluation_path: Path | None = None) -> list[Path]:
    """Draws what the run has so far into PNG files in RUN; gives the paths of those it wrote.

    `evaluation_path` is the JSON of an evaluation; without it the histogram is of the last exam
    in metrics.jsonl. Without exams there is no histogram, without metrics no curve.
    """
    written = []
    metrics = read_metrics(run_dir / METRICS_NAME)
    if metrics:
        written.append(save(training_figure(metrics), run_dir / TRAINING_NAME))
    exam = json.loads(evaluation_path.read_text(encoding="utf-8")) if evaluation_path else last_exam(metrics)
    if sum(exam.get("histogram", [])):
        written.append(save(histogram_figure(exam), run_dir / HISTOGRAM_NAME))
    return written


def last_exam(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Histogram and acceptance length of the newest exam line; empty without one."""
    exams = [line for line in metrics if line["kind"] == EXAM]
    if not exams:
        return {}
    counts = []
    while (name := f"num_cycles_gaining_{len(counts) + 1}") in exams[-1]:
        counts.append(exams[-1][name])
    return {"histogram": counts, "acceptance_length": exams[-1]["acceptance_length"]}


def training_figure(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    """Loss of each step above, acceptance length on held-out answers below, over one axis of steps."""
    losses = points(metrics, TRAIN, "loss")
    exams = points(metrics, EXAM, "acceptance_length")
    figure = new_figure(620 if exams else 380)
    upper, *lower = figure.subplots(2 if exams else 1, 1, sharex=True, squeeze=False)[:, 0]
    steps, values = [step for step, _ in losses], [loss for _, loss in losses]
    width = max(1, round(SMOOTHED_SHARE * len(values)))
    upper.plot(steps, values, color=LOSS_COLOUR, alpha=0.3 if width > 1 else 1.0, linewidth=1, label="each step")
    if width > 1:
        label = f"mean of {width} steps"
        upper.plot(steps[width - 1 :], running_mean(values, width), color=LOSS_COLOUR, linewidth=2, label=label)
        upper.legend(frameon=False)
    upper.set_yscale("log")
    dress(upper, "Training loss", "loss (weighted mean over labels)")
    for axes in lower:
        axes.plot(*zip(*exams), color=EXAM_COLOUR, marker="o", linewidth=2, label=origin_of(metrics))
        for origin, line in lines_by_origin(metrics).items():
            axes.plot(*zip(*line), marker=".", linewidth=1, label=f"of these: {origin}")
        axes.legend(frameon=False)
        step, value = exams[-1]
        axes.annotate(f"{value:.2f}", (step, value), xytext=(0, 8), textcoords="offset points", ha="right")
        axes.margins(y=0.15)
        dress(axes, "Held-out acceptance length (mean over answers, bonus token included)", "tokens per target forward")
    bottom = lower[-1] if lower else upper
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    bottom.set_xlabel("step (optimizer updates)")
    return figure


def origin_of(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Who wrote the answers of the newest exam."""
    origins = [line.get("origin") for line in metrics if line["kind"] == EXAM]
    return f"answers from: {origins[-1] or 'origin unknown'}"


def lines_by_origin(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """(step, acceptance length) of the answers of each origin, where there are several."""
    parts = [line for line in metrics if line["kind"] == ORIGIN]
    origins = sorted({line["origin"] for line in parts})
    found = {o: points([line for line in parts if line["origin"] == o], ORIGIN, "acceptance_length") for o in origins}
    return {origin: line for origin, line in found.items() if line}


def histogram_figure(exam: Mapping[str, Any]) -> Figure:
    """Share of cycles by tokens gained, 1 to block_size, and the acceptance length."""
    counts: list[int] = exam["histogram"]
    shares = [100 * count / sum(counts) for count in counts]
    lengths = range(1, len(counts) + 1)
    figure = new_figure(440)
    axes = figure.subplots()
    axes.bar(lengths, shares, color=LOSS_COLOUR, width=0.8)
    for length, share in zip(lengths, shares) if len(counts) <= MOST_LABELS else ():
        text = f"{share:.0f}" if share >= 0.5 or not share else "<1"
        axes.annotate(text, (length, share), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9)
    mean = exam["acceptance_length"]
    axes.axvline(mean, color=EXAM_COLOUR, linewidth=2, label=f"acceptance length {mean:.2f} (mean over prompts)")
    axes.legend(frameon=False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=MOST_LABELS, integer=True))
    axes.margins(y=0.12)
    dress(axes, f"Tokens gained by a cycle, {sum(counts):,} cycles", "share of cycles (%)")
    axes.set_xlabel(f"tokens per target forward, bonus token included (block of {len(counts)})")
    return figure


def points(metrics: Sequence[Mapping[str, Any]], kind: str, name: str) -> list[tuple[int, float]]:
    """(step, number) of every line of a kind that has the number."""
    return [(line["step"], line[name]) for line in metrics if line["kind"] == kind and line.get(name) is not None]


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Means of each `width` values in a row, one for each place where they fit."""
    return [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]


def new_figure(height_px: int) -> Figure:
    figure = Figure(figsize=(WIDTH_PX / DPI, height_px / DPI), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes, title: str, y_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(y_label)
    axes.grid(axis="y", color=GRID_COLOUR, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> Path:
    """The figure as a PNG that appears whole."""
    memory = io.BytesIO()
    figure.savefig(memory, format="png")
    publish(path, memory.getvalue())
    return path
