"""What a chart holds, whoever draws it: lines, bars or dots, with names and units. Plain data."""

from collections.abc import Sequence
from dataclasses import dataclass, field

Point = tuple[float, float]
STEP_LABEL = "step (optimizer updates)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A curve. `colour` is a place in the palette, which lines that belong together share; None: one of many."""

    name: str
    points: Sequence[Point]
    colour: int | None = 0
    is_faint: bool = False  # numbers of single steps, behind their mean
    is_marked: bool = False  # few points, each worth a dot


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """Curves over one axis. `floor` is where the y axis begins, unless something lies below it."""

    key: str
    title: str
    y_label: str
    lines: Sequence[Line]
    x_label: str = STEP_LABEL
    is_log: bool = False
    floor: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The bars of one colour, one for each category, and where their mean lies on the axis 1, 2, ..."""

    name: str
    values: Sequence[float]
    colour: int = 0
    mean: float | None = None
    mean_text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Bars side by side for the categories 1, 2, ..."""

    key: str
    title: str
    y_label: str
    x_label: str
    groups: Sequence[Group]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dots:
    """One column of dots for each category, with the mean of each. A dot is (category, value, name)."""

    key: str
    title: str
    y_label: str
    categories: Sequence[str]
    dots: Sequence[tuple[int, float, str]] = field(default_factory=list)
    means: Sequence[float] = field(default_factory=list)


Chart = Lines | Bars | Dots
