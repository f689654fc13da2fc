"""The lengths of a store's samples as a histogram: bins, bars of text, and a PNG. Knows numbers, no store."""

import io
from pathlib import Path

import numpy as np

from .files import publish

MOST_BINS = 12
BAR_WIDTH = 40
WIDTH_PX, HEIGHT_PX, DPI = 900, 440, 100
COLOUR, GRID_COLOUR, MEAN_COLOUR = "#1f5a94", "#d8d8d8", "#b3541e"


def bin_width(longest: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that needs at most `MOST_BINS` bins up to `longest`."""
    width, factors = 1, (2, 2.5, 2)
    for step in range(100):
        if longest < width * MOST_BINS:
            break
        width = round(width * factors[step % 3])
    return width


def histogram(lengths: np.ndarray) -> tuple[int, np.ndarray]:
    """The width of a bin and how many lengths lie in each; bin b holds b * width to (b + 1) * width - 1."""
    width = bin_width(int(lengths.max(initial=0)))
    return width, np.bincount(lengths // width)


def text_bars(lengths: np.ndarray) -> list[str]:
    """One line a bin: its bounds, its count, a bar; the fullest bin has the longest bar."""
    width, counts = histogram(lengths)
    digits, most = len(str(len(counts) * width)), int(counts.max(initial=1))
    count_digits = len(f"{most:,}")
    lines = []
    for number, count in enumerate(counts.tolist()):
        bar = "#" * -(-count * BAR_WIDTH // most)  # rounded up: a bin with anything in it shows
        bounds = f"{number * width:{digits}}-{(number + 1) * width - 1:<{digits}}"
        lines.append(f"{bounds} {count:{count_digits},} {bar}".rstrip())
    return lines


def plot_lengths(lengths: np.ndarray, path: Path, title: str) -> Path:
    """Draws the histogram, with mean and median, as a PNG that appears whole."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_PX / DPI, HEIGHT_PX / DPI), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    longest = int(lengths.max(initial=1))
    width = max(1, bin_width(longest) // 5)  # there is room for more bars than lines
    counts = np.bincount(lengths // width)
    axes.bar(np.arange(len(counts)) * width, counts, width=width, align="edge", color=COLOUR, edgecolor="white")
    for name, value, style in (("mean", lengths.mean(), "-"), ("median", np.median(lengths), "--")):
        axes.axvline(value, color=MEAN_COLOUR, linestyle=style, linewidth=2, label=f"{name} {value:,.0f}")
    axes.legend(frameon=False)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("tokens of a sample")
    axes.set_ylabel(f"samples in {width:,} tokens")
    axes.set_xlim(0)
    axes.grid(axis="y", color=GRID_COLOUR, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    memory = io.BytesIO()
    figure.savefig(memory, format="png")
    publish(path, memory.getvalue())
    return path
