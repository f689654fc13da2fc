"""Charts as inline SVG with their title and legend: no script is needed to read them, none is loaded.

Every text is escaped here. Colours are classes, so that the page's style decides them for light, dark and paper.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .chart import Bars, Chart, Dots, Line, Lines
from .scale import Range, integer_ticks, linear_ticks, log_ticks, padded, short, tick_texts
from .thin import thinned

WIDTH, HEIGHT = 560.0, 236.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 10.0, 40.0
MOST_POINTS = 1500  # of a curve; what is left out is never a highest or lowest point of its neighbourhood
PALETTE = 8
MOST_LABELS = 20  # bars that have room for a number each
MOST_LEGEND = 8
MOST_DOTS = 40  # of a curve that is marked; more would hide it


@dataclass(frozen=True, slots=True)
class Plane:
    """From numbers to the picture's own units."""

    x: Range
    y: Range
    is_log: bool = False

    def across(self, value: float) -> float:
        low, high = self.x
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)

    def down(self, value: float) -> float:
        low, high, value = (math.log(v) if self.is_log else v for v in (*self.y, value))
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)


def figure(chart: Chart, most_points: int = MOST_POINTS) -> str:
    """The chart as a <figure>, its curves thinned to so many points each."""
    if isinstance(chart, Lines):
        body, legend = lines_svg(chart, most_points), lines_legend(chart)
    elif isinstance(chart, Bars):
        body, legend = bars_svg(chart), bars_legend(chart)
    else:
        body, legend = dots_svg(chart), ""
    return (
        f'<figure class="chart" data-key="{escape(chart.key)}">\n<figcaption><b>{escape(chart.title)}</b>'
        f"<span>{escape(chart.y_label)}</span></figcaption>\n{legend}{body}\n</figure>"
    )


def colour(place: int | None) -> str:
    return "many" if place is None else f"c{place % PALETTE}"


def lines_legend(chart: Lines) -> str:
    """Names, each with its last value; none for a single curve."""
    if len(chart.lines) == 1:
        (line,) = chart.lines
        return f'<ul class="legend"><li>{escape(line.name)} <i>last {short(line.points[-1][1])}</i></li></ul>\n'
    shown = [line for line in chart.lines if line.colour is not None][:MOST_LEGEND]
    items = [
        f'<li><svg class="key {colour(line.colour)}{" faint" if line.is_faint else ""}" viewBox="0 0 16 8">'
        f'<path d="M0 4H16"/></svg>{escape(line.name)} <i>{short(line.points[-1][1])}</i></li>'
        for line in shown
    ]
    left = len(chart.lines) - len(shown)
    if left:
        items.append(f'<li><svg class="key many" viewBox="0 0 16 8"><path d="M0 4H16"/></svg>{left} others</li>')
    return f'<ul class="legend">{"".join(items)}</ul>\n'


def bars_legend(chart: Bars) -> str:
    items = [
        f'<li><svg class="key {colour(group.colour)}" viewBox="0 0 16 8"><rect width="10" height="8" x="3"/></svg>'
        f"{escape(group.name)} <i>{escape(group.mean_text)}</i></li>"
        for group in chart.groups
    ]
    return f'<ul class="legend">{"".join(items)}</ul>\n'


def lines_svg(chart: Lines, most_points: int) -> str:
    xs = [x for line in chart.lines for x in (line.points[0][0], line.points[-1][0])]
    ys = [y for line in chart.lines for _, y in line.points]
    x = (min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 0.5, max(xs) + 0.5)
    plane = Plane(x, padded(ys, chart.is_log, chart.floor), chart.is_log)
    y_ticks = log_ticks(*plane.y) if chart.is_log else linear_ticks(*plane.y)
    behind = [line for line in chart.lines if line.is_faint or line.colour is None]
    ordered = [*behind, *(line for line in reversed(chart.lines) if line not in behind)]
    curves = "\n".join(curve(line, plane, most_points) for line in ordered)
    told = f'data-x="{x[0]:g} {x[1]:g}" data-y="{plane.y[0]:.6g} {plane.y[1]:.6g}" data-log="{int(chart.is_log)}"'
    unit = chart.x_label.split(" ")[0]
    return framed(
        f"{axes(plane, integer_ticks(*x), y_ticks, chart.x_label)}\n{curves}",
        f"{chart.title}: {', '.join(line.name for line in chart.lines[:MOST_LEGEND])}",
        f'class="plot lines" {told} data-unit="{escape(unit)}"',
    )


def curve(line: Line, plane: Plane, most_points: int) -> str:
    """One curve: its path, the numbers that its tooltip tells, and dots where it is marked."""
    points = thinned(line.points, most_points)
    places = [f"{plane.across(x):.1f} {plane.down(y):.1f}" for x, y in points]
    told = f'data-xs="{",".join(f"{x:g}" if x != int(x) else str(int(x)) for x, _ in points)}"'
    told += f' data-ys="{",".join(f"{y:.4g}" for _, y in points)}"'
    named = f'data-name="{escape(line.name)}"'
    kind = f'class="line {colour(line.colour)}{" faint" if line.is_faint else ""}"'
    drawn = f'<path {kind} {named} {told} d="M{"L".join(places)}"/>'
    if (line.is_marked and len(points) <= MOST_DOTS) or len(points) == 1:
        dots = "".join(f'<circle cx="{place.replace(" ", chr(34) + " cy=" + chr(34))}" r="3"/>' for place in places)
        drawn += f'<g class="dots {colour(line.colour)}">{dots}</g>'
    return drawn


def bars_svg(chart: Bars) -> str:
    count = max(len(group.values) for group in chart.groups)
    top = max(value for group in chart.groups for value in group.values)
    plane = Plane((0.5, count + 0.5), (0.0, top * 1.12 or 1.0))
    width = (plane.across(1) - plane.across(0)) * 0.8 / len(chart.groups)
    has_labels = count * len(chart.groups) <= MOST_LABELS
    drawn = []
    for number, group in enumerate(chart.groups):
        for length, value in enumerate(group.values, start=1):
            left, top_px = plane.across(length - 0.4) + number * width, plane.down(value)
            tip = escape(f"{length}: {value:.1f} {chart.y_label}, {group.name}")
            drawn.append(
                f'<rect class="bar {colour(group.colour)}" x="{left + 0.5:.1f}" y="{top_px:.1f}" '
                f'width="{width - 1:.1f}" height="{HEIGHT - BOTTOM - top_px:.1f}" data-tip="{tip}"/>'
            )
            if has_labels:
                text = f"{value:.0f}" if value >= 0.5 or not value else "&lt;1"
                drawn.append(f'<text class="value" x="{left + width / 2:.1f}" y="{top_px - 4:.1f}">{text}</text>')
        if group.mean is not None:
            across = plane.across(group.mean)
            drawn.append(
                f'<path class="mean {colour(group.colour)}" d="M{across:.1f} {TOP}V{HEIGHT - BOTTOM}" '
                f'data-tip="{escape(group.mean_text)}"/>'
            )
    ticks = integer_ticks(1, count, 16)
    frame = axes(plane, ticks, linear_ticks(*plane.y), chart.x_label)
    return framed("\n".join([frame, *drawn]), f"{chart.title}: {len(chart.groups)} groups of bars", 'class="plot bars"')


def dots_svg(chart: Dots) -> str:
    values = [value for _, value, _ in chart.dots]
    plane = Plane((-0.5, len(chart.categories) - 0.5), padded(values))
    drawn = [axes(plane, [], linear_ticks(*plane.y), "")]
    most = max(18, 108 // len(chart.categories))  # characters that have room below a column
    for number, (name, mean) in enumerate(zip(chart.categories, chart.means)):
        across = plane.across(number)
        text = name if len(name) <= most else f"{name[: most - 3]}..."
        drawn.append(
            f'<text class="tick" x="{across:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(text)}</text>'
        )
        drawn.append(
            f'<path class="level" d="M{across - 26:.1f} {plane.down(mean):.1f}H{across + 26:.1f}" '
            f'data-tip="{escape(f"{name}: mean {short(mean)}")}"/>'
        )
    for number, value, name in chart.dots:
        drawn.append(
            f'<circle class="dot c0" cx="{plane.across(number):.1f}" cy="{plane.down(value):.1f}" r="4" '
            f'data-tip="{escape(f"{name}: {short(value)}")}"/>'
        )
    if len(chart.means) > 1:
        line = "L".join(f"{plane.across(i):.1f} {plane.down(mean):.1f}" for i, mean in enumerate(chart.means))
        drawn.insert(1, f'<path class="joined" d="M{line}"/>')
    return framed("\n".join(drawn), f"{chart.title}: means of {len(chart.categories)} values", 'class="plot bars"')


def axes(plane: Plane, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str) -> str:
    bottom = HEIGHT - BOTTOM
    grid = "".join(f"M{LEFT} {plane.down(tick):.1f}H{WIDTH - RIGHT}" for tick in y_ticks)
    marks = "".join(f"M{plane.across(tick):.1f} {bottom}v4" for tick in x_ticks)
    drawn = [f'<path class="grid" d="{grid}"/>', f'<path class="axis" d="M{LEFT} {bottom}H{WIDTH - RIGHT}{marks}"/>']
    drawn += [
        f'<text class="tick" x="{LEFT - 7}" y="{plane.down(tick) + 3.5:.1f}" text-anchor="end">{text}</text>'
        for tick, text in zip(y_ticks, tick_texts(y_ticks))
    ]
    drawn += [
        f'<text class="tick" x="{plane.across(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>'
        for tick, text in zip(x_ticks, tick_texts(x_ticks))
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    drawn.append(f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    return "\n".join(drawn)


def framed(content: str, told: str, attributes: str) -> str:
    frame = f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(told)}"'
    return f"<svg {attributes} {frame}>\n{content}\n</svg>"
