"""Which numbers the charts of several runs show: curves over one another, and main effects. Draws nothing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..sweep.effects import share_text
from .chart import Chart, Dots, Line, Lines, Point
from .metrics_of_run import RunMetrics
from .series import FORCED, SLOT_LABEL, shares, slot_means
from .sweep_folder import Comparison, Entry
from .thin import smoothed

COLOURED = 6  # runs with a colour of their own, the best ones; the others are grey


def overlay_charts(entries: Sequence[Entry]) -> list[Chart]:
    """Loss, acceptance, slots and throughput of all runs; charts without a curve are left out."""
    loss = overlaid(entries, lambda metrics: smoothed(metrics.curves["loss"].points)[1])
    found = [
        lines_chart(
            "loss-of-all",
            "Training loss",
            "running mean",
            loss,
            is_log=all(y > 0 for line in loss for _, y in line.points),
        ),
        lines_chart(
            "acceptance-of-all",
            "Held-out acceptance length",
            "walk, mean over answers",
            overlaid(
                entries, lambda metrics: metrics.exam_points("acceptance_length"), is_marked=len(entries) <= COLOURED
            ),
            floor=1.0,
        ),
        lines_chart(
            "survival-of-all",
            "Acceptance by slot, last exam",
            f"% of held-out blocks whose first K drafts are all right, {FORCED}",
            overlaid(entries, lambda metrics: shares(slot_means(metrics.exams[-1:], "held_out_survival_slot_"))),
            floor=0.0,
            x_label=SLOT_LABEL,
        ),
        lines_chart(
            "throughput-of-all",
            "Throughput",
            "tokens of samples per second, running mean",
            overlaid(entries, lambda metrics: smoothed(metrics.curves["rate_tok_s"].points)[1]),
            floor=0.0,
        ),
    ]
    return [chart for chart in found if chart is not None]


def overlaid(
    entries: Sequence[Entry], points: Callable[[RunMetrics], Sequence[Point]], is_marked: bool = False
) -> list[Line]:
    """One line for each entry that has points, the best ones coloured."""
    lines = []
    for place, entry in enumerate(entries):
        own = points(entry.run.metrics) if entry.run is not None else ()
        if own:
            colour = place if place < COLOURED else None
            lines.append(Line(name=entry.title, points=own, colour=colour, is_marked=is_marked))
    return lines


def lines_chart(key: str, title: str, y_label: str, lines: Sequence[Line], **options: Any) -> Lines | None:
    return Lines(key=key, title=title, y_label=y_label, lines=lines, **options) if lines else None


def effect_charts(comparison: Comparison) -> list[Chart]:
    """The acceptance length of every run by its value of a field, and the mean of each value; strongest first."""
    return [
        Dots(
            key=f"effect-{effect['field']}",
            title=effect["field"],
            y_label=effect_label(effect),
            categories=[value["label"] for value in effect["values"]],
            dots=comparison.dots.get(effect["field"], ()),
            means=[value["mean"] for value in effect["values"]],
        )
        for effect in comparison.effects
    ]


def effect_label(effect: Mapping[str, Any]) -> str:
    at = "" if effect["step"] is None else f" at step {effect['step']}"
    return f"acceptance length{at}; {share_text(effect)}"
