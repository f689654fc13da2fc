"""Pictures of a run, as PNG: what `train/report/series.py` says that a chart shows, drawn with matplotlib.

Draws with Agg, so it needs no display. Knows no tensor. What is not there is not drawn.
"""

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from ..store.files import make_folder, publish
from .report.chart import Bars, Chart, Dots, Lines
from .report.metrics_of_run import RunMetrics, read_run_metrics
from .report.scale import log_ticks, padded, short
from .report.series import HELD_OUT, TRAINING, histogram_bars, last_exam, loss_chart, walk_chart

TRAINING_NAME, HISTOGRAM_NAME = "training.png", "accepted-lengths.png"
PREDICTION_NAME = "offline-vs-decoded.png"
WIDTH_PX, HEIGHT_PX, DPI = 900, 400, 100
COLOURS = ("#1f6fb5", "#c4541a", "#23875a", "#7a4fb8", "#b3306e", "#8a6d00", "#0f8a94", "#6b7480")
LOSS_COLOUR, EXAM_COLOUR = COLOURS[TRAINING], COLOURS[HELD_OUT]
MANY_COLOUR, TEXT_COLOUR, GRID_COLOUR = "#b9c1ca", "#1b1f24", "#d8d8d8"
MOST_LABELS = 32  # bars that have room for a number each
MOST_NAMED = 12  # entries of a legend
STRANGE = re.compile(r"[^A-Za-z0-9._-]+")  # in the name of a file


def plot_run(run_dir: Path, evaluation_path: Path | None = None) -> list[Path]:
    """Draws what the run has so far into PNG files in RUN; gives the paths of those it wrote.

    `evaluation_path` is the JSON of an evaluation; without it the histogram is of the last exam
    in metrics.jsonl. Without exams there is no histogram, without metrics no curve.
    """
    written, metrics = [], read_run_metrics(run_dir)
    if metrics.num_updates or metrics.exams:
        written.append(save(training_figure(metrics), run_dir / TRAINING_NAME))
    exam = json.loads(evaluation_path.read_text(encoding="utf-8")) if evaluation_path else last_exam(metrics)
    if sum(exam.get("histogram", [])):
        written.append(save(histogram_figure(exam), run_dir / HISTOGRAM_NAME))
    return written


def plot_prediction(run_dir: Path, points: Sequence[tuple[str, float, float]]) -> Path:
    """Draws (name, offline, decoded) acceptance of each held-out answer into a PNG in RUN; gives its path."""
    return save(prediction_figure(points), run_dir / PREDICTION_NAME)


def save_charts(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """One PNG for each chart, named by its key; gives their paths."""
    make_folder(folder)
    return [save(chart_figure(chart), folder / f"{STRANGE.sub('-', chart.key)}.png") for chart in charts]


def training_figure(metrics: RunMetrics) -> Figure:
    """Loss of each step above, acceptance length on held-out answers below, over one axis of steps."""
    charts = [chart for chart in (loss_chart(metrics), walk_chart(metrics)) if chart is not None]
    figure = new_figure(620 if len(charts) == 2 else 380)
    if not charts:
        return figure
    all_axes = figure.subplots(len(charts), 1, sharex=True, squeeze=False)[:, 0]
    for axes, chart in zip(all_axes, charts):
        draw_lines(axes, chart)
        axes.set_xlabel("")
    all_axes[-1].set_xlabel(charts[-1].x_label)
    return figure


def histogram_figure(exam: Mapping[str, Any]) -> Figure:
    """Share of cycles by tokens gained, 1 to block_size, and the acceptance length; the exam has a cycle."""
    bars = histogram_bars([(exam, "this exam", TRAINING)])
    assert bars is not None
    return chart_figure(bars)


def chart_figure(chart: Chart) -> Figure:
    """A picture of one chart."""
    figure = new_figure(HEIGHT_PX)
    axes = figure.subplots()
    if isinstance(chart, Lines):
        draw_lines(axes, chart)
    elif isinstance(chart, Bars):
        draw_bars(axes, chart)
    else:
        draw_dots(axes, chart)
    return figure


def prediction_figure(points: Sequence[tuple[str, float, float]]) -> Figure:
    """Each answer's offline acceptance over its decoded one, the line where they are equal, and both means."""
    offline, decoded = [point[1] for point in points], [point[2] for point in points]
    means = sum(offline) / len(points), sum(decoded) / len(points)
    low, high = min(*offline, *decoded), max(*offline, *decoded)
    figure = new_figure(620)
    axes = figure.subplots()
    axes.plot([low, high], [low, high], color=GRID_COLOUR, linewidth=2, label="offline = decoded")
    axes.scatter(decoded, offline, color=LOSS_COLOUR, s=18, alpha=0.6, zorder=3, label="one answer")
    error = f"means {means[0]:.3f} and {means[1]:.3f}, off by {100 * (means[0] / means[1] - 1):+.1f} %"
    axes.scatter([means[1]], [means[0]], color=EXAM_COLOUR, marker="D", s=60, zorder=4, label=error)
    axes.legend(frameon=False)
    title = f"Offline against decoded acceptance of {len(points):,} held-out answers"
    dress(axes, title, "offline: tokens per cycle", "decoded: tokens per cycle, bonus token included")
    return figure


def draw_lines(axes: Axes, chart: Lines) -> None:
    """Curves; the newest value stands at the end of the first one that has dots."""
    for line in chart.lines:
        axes.plot(
            *zip(*line.points),
            color=colour(line.colour),
            alpha=0.3 if line.is_faint else 1.0,
            linewidth=1 if line.is_faint or line.colour is None else 2,
            marker="o" if line.is_marked else None,
            markersize=4,
            label=line.name,
        )
    marked = next((line for line in chart.lines if line.is_marked), None)
    if marked is not None:
        step, value = marked.points[-1]
        axes.annotate(f"{value:.2f}", (step, value), xytext=(0, 8), textcoords="offset points", ha="right")
    values = [value for line in chart.lines for _, value in line.points]
    low, high = padded(values, chart.is_log, chart.floor)
    axes.set_ylim(low, high)
    if chart.is_log:
        axes.set_yscale("log")
        axes.set_yticks(log_ticks(low, high))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(axes)
    dress(axes, chart.title, chart.y_label, chart.x_label)


def draw_bars(axes: Axes, chart: Bars) -> None:
    """Bars side by side, and the mean of each group as a line."""
    count, width = max(len(group.values) for group in chart.groups), 0.8 / len(chart.groups)
    for number, group in enumerate(chart.groups):
        shift = (number - (len(chart.groups) - 1) / 2) * width
        places = [length + shift for length in range(1, len(group.values) + 1)]
        axes.bar(places, group.values, color=colour(group.colour), width=0.95 * width, label=group.name)
        for place, value in zip(places, group.values) if count * len(chart.groups) <= MOST_LABELS else ():
            text = f"{value:.0f}" if value >= 0.5 or not value else "<1"
            axes.annotate(text, (place, value), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9)
        if group.mean is not None:
            own = TEXT_COLOUR if len(chart.groups) == 1 else colour(group.colour)
            axes.axvline(group.mean, color=own, linewidth=1.5, linestyle="--", label=group.mean_text)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=MOST_LABELS, integer=True))
    axes.margins(y=0.12)
    legend(axes)
    dress(axes, chart.title, chart.y_label, chart.x_label)


def draw_dots(axes: Axes, chart: Dots) -> None:
    """A column of dots for each category, and the means joined."""
    places = range(len(chart.categories))
    axes.plot(places, chart.means, color=TEXT_COLOUR, marker="_", markersize=24, linestyle=":", linewidth=1)
    axes.scatter(
        [place for place, _, _ in chart.dots], [value for _, value, _ in chart.dots], color=COLOURS[0], alpha=0.7
    )
    axes.set_xticks(list(places), list(chart.categories))
    axes.margins(x=0.2, y=0.15)
    dress(axes, chart.title, chart.y_label, "")


def colour(place: int | None) -> str:
    return MANY_COLOUR if place is None else COLOURS[place % len(COLOURS)]


def legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        axes.legend(handles[:MOST_NAMED], labels[:MOST_NAMED], frameon=False, fontsize=9)


def new_figure(height_px: int) -> Figure:
    figure = Figure(figsize=(WIDTH_PX / DPI, height_px / DPI), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes, title: str, y_label: str, x_label: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(y_label)
    axes.set_xlabel(x_label)
    axes.grid(axis="y", color=GRID_COLOUR, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> Path:
    """The figure as a PNG that appears whole."""
    memory = io.BytesIO()
    figure.savefig(memory, format="png")
    publish(path, memory.getvalue())
    return path
