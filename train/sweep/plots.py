"""The picture of a sweep: acceptance by value of each field. Draws with matplotlib's Agg; knows no tensor."""

from pathlib import Path

from ..plots import COLOURS, dress, new_figure, save
from .effects import grouped, share_text
from .record import EFFECTS_NAME, Sweep

PANEL_PX, HEAD_PX = 240, 20
MOST_PANELS = 8


def plot_effects(sweep: Sweep) -> Path | None:
    """Draws the strongest effects, one panel a field; None where there is none."""
    effects = sweep.effects[:MOST_PANELS]
    if not effects:
        return None
    figure = new_figure(HEAD_PX + PANEL_PX * len(effects))
    for axes, effect in zip(figure.subplots(len(effects), 1, squeeze=False)[:, 0], effects):
        names = [value["label"] for value in effect["values"]]
        groups = grouped(sweep, effect["field"], effect["step"])
        dots = [(names.index(label), length) for label, runs in groups.items() for _, length in runs]
        axes.plot(*zip(*dots), "o", color=COLOURS[0], alpha=0.5, label="a run")
        means = [value["mean"] for value in effect["values"]]
        axes.plot(range(len(names)), means, color=COLOURS[1], marker="D", linewidth=2, label="mean of the value")
        axes.set_xticks(range(len(names)), names)
        axes.margins(x=0.1, y=0.15)
        at = "at the end" if effect["step"] is None else f"at step {effect['step']}"
        dress(axes, f"{effect['field']}: {share_text(effect)}, {at}", "acceptance length", effect["field"])
        axes.legend(frameon=False, fontsize=8)
    return save(figure, sweep.folder / EFFECTS_NAME)
