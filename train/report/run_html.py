"""The sections of one run on a page: key numbers, curves, exams, memory, configuration, environment, commands."""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from ...store.size import human_bytes
from . import words
from .markup import facts, notes, pre, table
from .run_folder import RunFolder, Setting, settings_of
from .series import run_charts
from .svg import figure

MOST_EXAMS = 24  # rows of the table of walks
SECTIONS = ("Curves", "Exams", "Memory", "Configuration", "Environment", "Commands")


def state_mark(state: str) -> str:
    return f'<span class="state {escape(state)}">{escape(STATE_TEXTS.get(state, state))}</span>'


STATE_TEXTS = {"going": "still going", "stopped": "not finished"}


def anchor(prefix: str, section: str) -> str:
    return f"{prefix}{section.lower()}"


def links(prefix: str = "") -> str:
    items = "".join(f'<a href="#{escape(anchor(prefix, name))}">{name}</a>' for name in SECTIONS)
    return f"<nav>{items}</nav>"


def run_sections(run: RunFolder, prefix: str, level: int, most_points: int) -> str:
    """All of a run below its heading. `prefix` makes its anchors its own, `level` is that of its headings."""
    contents = (
        curves(run, most_points),
        exams(run),
        memory(run),
        configuration(run),
        environment(run),
        commands(run),
    )
    parts = [notes(run.notes), tiles(run)]
    for name, content in zip(SECTIONS, contents):
        parts.append(f'<h{level} id="{escape(anchor(prefix, name))}">{name}</h{level}>\n{content}')
    return "\n".join(parts)


def tiles(run: RunFolder) -> str:
    found = "".join(
        f'<div class="tile"><b>{escape(number.value)}</b><span>{escape(number.meaning)}</span></div>'
        for number in words.key_numbers(run)
    )
    return f'<div class="tiles">{found}</div>' if found else ""


def curves(run: RunFolder, most_points: int) -> str:
    charts = run_charts(run.metrics, run.evaluations)
    if not charts:
        return "<p>There is nothing to draw yet.</p>"
    return f'<div class="charts">{"".join(figure(chart, most_points) for chart in charts)}</div>'


def exams(run: RunFolder) -> str:
    """Evaluations, the walks during training and the slots."""
    parts = []
    rows = words.evaluation_rows(run)
    if rows:
        parts.append(f"<h3>Evaluations</h3>\n{table(words.EVALUATION_HEAD, rows, numbers=range(1, 7))}")
        parts.append('<p class="dim">In brackets: the 95 % interval, where it is known.</p>')
    else:
        parts.append("<p>No evaluation yet: <code>dflash evaluate</code> makes one.</p>")
    if run.metrics.exams:
        losses = dict(run.metrics.curves["loss"].points)
        walked = words.exam_rows(run.metrics.exams, losses, MOST_EXAMS)
        head = ("step", "training loss", "acceptance length")
        parts.append(
            f'<div class="two"><div><h3>Walks during training</h3>\n{table(head, walked, numbers=(0, 1, 2))}</div>'
        )
        slots = words.slot_rows(run)
        shown = table(words.SLOT_HEAD, slots, numbers=range(len(words.SLOT_HEAD))) if slots else ""
        parts.append(f"<div><h3>Slots, given the right tokens before</h3>\n{shown}</div></div>" if shown else "</div>")
    return "\n".join(parts)


def memory(run: RunFolder) -> str:
    rows = words.memory_rows(run)
    told = f"<p>{escape(words.memory_note(run))}</p>"
    if not rows:
        return told
    most = max(row.size_bytes for row in rows if row.kind != "card")
    body = "".join(memory_row(row, most) for row in rows)
    head = '<th>part</th><th class="n">size</th><th></th><th>grows with, or what it is</th>'
    return f'{told}\n<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def memory_row(row: words.MemoryRow, most: int) -> str:
    """A line with a bar as long as its share of `most` bytes; the card has none."""
    bar = f'<span class="meter {escape(row.kind)}" style="width:{100 * row.size_bytes / most:.1f}%"></span>'
    return (
        f'<tr><td>{escape(row.name)}</td><td class="n">{human_bytes(row.size_bytes)}</td>'
        f'<td class="w">{"" if row.kind == "card" else bar}</td><td class="dim">{escape(row.grows_with)}</td></tr>'
    )


def configuration(run: RunFolder) -> str:
    """Every setting, section by section; those that were changed from their default are marked."""
    if run.config is None:
        return "<p>The configuration of this run cannot be read.</p>"
    settings = settings_of(run.config)
    changed = sum(setting.is_changed for setting in settings)
    tables = "".join(
        settings_table(name, list(own)) for name, own in groupby(settings, lambda s: s.name.rpartition(".")[0])
    )
    return (
        f"<p>{changed} of {len(settings)} settings differ from their default and are marked. "
        f'<span class="dim">A default of "-" follows the store, the target or the device.</span></p>\n'
        f'<div class="settings">{tables}</div>'
    )


def settings_table(section: str, settings: Sequence[Setting]) -> str:
    """The settings of one section of the config."""
    rows = []
    for setting in settings:
        default = "-" if setting.default is None else words.value_text(setting.default)
        mark = ' class="changed"' if setting.is_changed else ""
        rows.append(
            f'<tr{mark}><td title="{escape(setting.text)}">{escape(setting.name.rpartition(".")[2])}</td>'
            f'<td>{broken(words.value_text(setting.value))}</td><td class="dim">{escape(default)}</td></tr>'
        )
    head = "".join(f'<th scope="col">{text}</th>' for text in (escape(section or "run"), "value", "default"))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def broken(text: str) -> str:
    """The text, which may go on in a new line behind each comma."""
    return escape(text).replace(",", ",<wbr>")


def environment(run: RunFolder) -> str:
    trained = f"<div><h3>What was trained</h3>{facts(words.overview(run))}</div>"
    return f'<div class="two">{trained}<div><h3>On what</h3>{facts(words.environment(run))}</div></div>'


def commands(run: RunFolder) -> str:
    found = words.commands(run)
    if not found:
        return "<p>There is no checkpoint yet.</p>"
    served, left_out = words.serving(run)
    parts = [pre(found)]
    if served:
        parts.append(f"<p>Once it is exported, it is served with its target, for example:</p>\n{pre(served)}")
    return "\n".join([*parts, *(f"<p>{escape(note)}</p>" for note in left_out)])
