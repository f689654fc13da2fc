"""A run or a sweep as text: what `dflash inspect` prints. The facts and numbers are those of its page; no torch."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..settings_text import as_lines
from ..store.size import human_bytes
from .evaluate.acceptance import histogram_bars
from .outcome import GREEDY
from .report import compare_words, words
from .report.run_folder import RunFolder, read_run
from .report.series import last_exam
from .report.sweep_folder import Comparison, read_comparison
from .sweep.record import RUNS_NAME
from .sweep.report import NOTE

SHOWN_EXAMS = 12
BAR_WIDTH = 40


def describe_run(run_dir: Path) -> str:
    """Facts of the run, its numbers, exams, memory, settings and the next commands, section by section."""
    run = read_run(run_dir)
    sections = [
        [as_lines(words.overview(run)), *(f"note         {note}" for note in run.notes)],
        number_lines(run),
        exam_lines(run),
        slot_lines(run),
        cycle_lines(run),
        evaluation_lines(run),
        memory_lines(run),
        setting_lines(run),
        ["environment", *indented(as_lines(words.environment(run)).splitlines())],
        ["next", *indented(words.commands(run)), f"  dflash report {shlex.quote(str(run.run_dir))} --html"],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def describe_sweep(folder: Path) -> str:
    """Facts of the sweep, the ranking, what failed, which setting mattered and the next commands."""
    comparison = read_comparison(folder)
    facts = {"sweep": comparison.path, **comparison.facts}
    runs = f"  dflash inspect {shlex.quote(str(folder / RUNS_NAME))}/NUMBER"
    page = f"  dflash report {shlex.quote(str(folder))} --html"
    faults = compare_words.faults(comparison)
    sections = [
        [as_lines(facts), *(f"note         {note}" for note in comparison.notes)],
        ["ranking", *indented(ranking_lines(comparison))],
        ["not at their end", *indented(faults)] if faults else [],
        effect_lines(comparison),
        ["next", *indented(comparison.commands), runs, page],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def ranking_lines(comparison: Comparison) -> list[str]:
    """All runs, the best first, and what their acceptance is."""
    found, _ = compare_words.ranking_columns(comparison)
    rows = [[cell.text or "-" for cell in row] for row in zip(*found.values())]
    return [*columns(list(found), rows), NOTE]


def effect_lines(comparison: Comparison) -> list[str]:
    rows = compare_words.effect_rows(comparison)
    if not rows:
        return []
    shown = columns(compare_words.EFFECT_HEAD, rows)
    return ["which setting mattered", *indented([*shown, compare_words.effects_note(comparison)])]


def indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of texts: the first column on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    return [
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width) for i, (text, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in (head, *rows)
    ]


def number_lines(run: RunFolder) -> list[str]:
    numbers = words.key_numbers(run)
    width = max((len(number.value) for number in numbers), default=0)
    return ["numbers", *(f"  {number.value:>{width}}  {number.meaning}" for number in numbers)] if numbers else []


def exam_lines(run: RunFolder) -> list[str]:
    """A table of at most a dozen exams, the last one always among them."""
    exams = run.metrics.exams
    if not exams:
        return ["exams        none yet"]
    origin = exams[-1].get("origin") or "unknown"
    told = f"exams: walks over held-out answers, bonus token included; origin: {origin}"
    if origin != GREEDY:
        told += f" ({words.NOT_EXACT})"
    rows = words.exam_rows(exams, dict(run.metrics.curves["loss"].points), SHOWN_EXAMS)
    return [told, *indented(columns(("step", "training loss", "acceptance length"), rows))]


def slot_lines(run: RunFolder) -> list[str]:
    rows = words.slot_rows(run)
    return ["slots, given the right tokens before", *indented(columns(words.SLOT_HEAD, rows))] if rows else []


def cycle_lines(run: RunFolder) -> list[str]:
    counts = last_exam(run.metrics).get("histogram", [])
    return ["tokens gained by a cycle, last exam", *histogram_bars(counts, BAR_WIDTH)] if sum(counts) else []


def evaluation_lines(run: RunFolder) -> list[str]:
    rows = words.evaluation_rows(run)
    return ["evaluations", *indented(columns(words.EVALUATION_HEAD, rows))] if rows else []


def memory_lines(run: RunFolder) -> list[str]:
    rows = [(row.name, human_bytes(row.size_bytes), row.grows_with) for row in words.memory_rows(run)]
    width = max((len(name) for name, _, _ in rows), default=0)
    lines = [f"{name:{width}}  {size:>8}  {told}".rstrip() for name, size, told in rows]
    return ["memory", *indented([*lines, words.memory_note(run)])] if rows else []


def setting_lines(run: RunFolder) -> list[str]:
    """The settings that are not at their default, beside it."""
    changed = words.changed_settings(run)
    rows = [(s.name, words.value_text(s.value), words.value_text(s.default)) for s in changed]
    head = ("setting", "value", "default")
    return ["settings that differ from their default", *indented(columns(head, rows))] if rows else []
