"""The part of a page that compares runs: ranking, main effects, overlaid curves, what is typed next."""

from collections.abc import Sequence
from html import escape

from .chart import Chart
from .compare_series import effect_charts, overlay_charts
from .compare_words import EFFECT_HEAD, EFFECT_NUMBERS, effect_rows, effects_note, faults, ranking_columns
from .markup import facts, pre, table
from .svg import figure
from .sweep_folder import Comparison

OVERLAID_POINTS = 300


def comparison_sections(comparison: Comparison) -> str:
    """Everything above the sections of the runs themselves."""
    parts = [f'<h2 id="ranking">Ranking</h2>\n{ranking(comparison)}', definitions(comparison)]
    if comparison.commands:
        parts.append(f"<h2>What is next</h2>\n{pre(comparison.commands)}")
    effects = effect_charts(comparison)
    if effects:
        told = f"<p>{escape(effects_note(comparison))}</p>"
        shown = table(EFFECT_HEAD, effect_rows(comparison), numbers=EFFECT_NUMBERS)
        parts.append(f'<h2 id="effects">Which setting mattered</h2>\n{told}\n{shown}\n{charts_html(effects)}')
    overlaid = overlay_charts(comparison.entries)
    parts.append('<h2 id="overlaid">Curves of all runs</h2>')
    parts.append(charts_html(overlaid) if overlaid else "<p>There is nothing to draw yet.</p>")
    return "\n".join(parts)


def charts_html(charts: Sequence[Chart]) -> str:
    return f'<div class="charts">{"".join(figure(chart, OVERLAID_POINTS) for chart in charts)}</div>'


def ranking(comparison: Comparison) -> str:
    """One line for each run, and why some did not come to their end."""
    columns, numbers = ranking_columns(comparison)
    right = [place for place, name in enumerate(columns) if name in numbers]
    told = "".join(f"<p>{escape(fault)}</p>" for fault in faults(comparison))
    return table(list(columns), list(zip(*columns.values())), numbers=right, is_sortable=True) + told


def definitions(comparison: Comparison) -> str:
    if not comparison.definitions:
        return ""
    return f"<details><summary>What the numbers mean</summary>{facts(comparison.definitions)}</details>"
