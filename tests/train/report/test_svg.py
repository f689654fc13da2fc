"""Charts as SVG: points lie where their numbers say, texts are escaped, long curves are thinned."""

import re
from typing import Any
from xml.etree import ElementTree

import pytest
from dflash_offline.train.report.chart import Bars, Dots, Group, Line, Lines
from dflash_offline.train.report.svg import BOTTOM, HEIGHT, LEFT, MOST_POINTS, RIGHT, TOP, WIDTH, figure

HOSTILE = """</svg><script>alert("1")</script> & 'x'"""


def parsed(chart, **options) -> Any:
    return ElementTree.fromstring(figure(chart, **options))


def places(path):
    return [tuple(map(float, pair.split())) for pair in path.get("d")[1:].split("L")]


@pytest.mark.parametrize("is_log", [False, True])
def test_points_lie_where_their_numbers_say(is_log):
    points = [(0, 1.0), (50, 100.0), (100, 10.0)]
    svg = parsed(Lines(key="k", title="t", y_label="y", lines=[Line(name="n", points=points)], is_log=is_log)).find(
        "svg"
    )
    (path,) = [p for p in svg.iter("path") if "line" in p.get("class", "").split()]
    (x0, top), (x1, bottom), (x2, middle) = (places(path)[i] for i in (0, 1, 2))
    assert (x0, x2) == (LEFT, WIDTH - RIGHT)
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert TOP <= bottom < middle < top <= HEIGHT - BOTTOM
    share = (top - middle) / (top - bottom)
    assert share == pytest.approx(0.5 if is_log else 9 / 99, abs=0.01)
    assert path.get("data-xs") == "0,50,100"
    assert path.get("data-ys") == "1,100,10"


def test_a_long_curve_is_thinned_and_its_spike_stays():
    points = [(step, 1.0) for step in range(100_000)]
    points[77_777] = (77_777, 9.0)
    text = figure(Lines(key="k", title="t", y_label="y", lines=[Line(name="n", points=points)]))
    (told,) = re.findall(r'data-ys="([^"]*)"', text)
    assert len(told.split(",")) <= MOST_POINTS
    assert "9" in told.split(",")
    assert len(text) < 60_000


@pytest.mark.parametrize(
    "chart",
    [
        Lines(
            key=HOSTILE,
            title=HOSTILE,
            y_label=HOSTILE,
            x_label=HOSTILE,
            lines=[Line(name=HOSTILE, points=[(1, 1.0)])] * 2,
        ),
        Bars(
            key=HOSTILE,
            title=HOSTILE,
            y_label=HOSTILE,
            x_label=HOSTILE,
            groups=[Group(name=HOSTILE, values=[1.0], mean=1.0, mean_text=HOSTILE)],
        ),
        Dots(key=HOSTILE, title=HOSTILE, y_label=HOSTILE, categories=[HOSTILE], dots=[(0, 1.0, HOSTILE)], means=[1.0]),
    ],
    ids=lambda chart: type(chart).__name__,
)
def test_every_text_is_escaped(chart):
    root = parsed(chart)
    assert root.find(".//script") is None
    assert HOSTILE in "".join(root.itertext())


def test_bars_are_as_high_as_their_shares():
    bars = Bars(
        key="k", title="t", y_label="%", x_label="x", groups=[Group(name="a", values=[25.0, 0.0, 75.0], mean=2.5)]
    )
    svg = parsed(bars).find("svg")
    heights = [float(rect.get("height")) for rect in svg.iter("rect")]
    assert heights[1] == 0
    assert heights[2] == pytest.approx(3 * heights[0], abs=0.2)
    (mean,) = [p for p in svg.iter("path") if p.get("class").startswith("mean")]
    middle = [float(rect.get("x")) + float(rect.get("width")) / 2 for rect in svg.iter("rect")]
    assert float(mean.get("d")[1:].split()[0]) == pytest.approx((middle[1] + middle[2]) / 2, abs=0.2)


def test_only_the_best_of_many_curves_are_named():
    lines = [Line(name=f"run {i}", points=[(0, 1.0), (1, i)], colour=i if i < 3 else None) for i in range(9)]
    root = parsed(Lines(key="k", title="t", y_label="y", lines=lines))
    legend = "".join(root.find("ul").itertext())
    assert "run 2" in legend
    assert "run 3" not in legend
    assert "6 others" in legend
    assert len([p for p in root.find("svg").iter("path") if "many" in p.get("class")]) == 6
