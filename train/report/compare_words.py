"""What is said of several runs, as cells and texts: their page and `dflash inspect SWEEP` both show these."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..sweep.effects import ALONE, share_text
from ..value_rules import is_finite
from . import words
from .markup import Cell
from .scale import short
from .sweep_folder import Comparison, Entry


def ranking_columns(comparison: Comparison) -> tuple[dict[str, list[Cell]], set[str]]:
    """One cell for each run by heading, columns that no run has left out; and which of them are numbers."""
    columns = {"#": [number_cell(e.rank) for e in comparison.entries]}
    columns["run"] = [Cell(e.label, link=e.anchor) for e in comparison.entries]
    columns["state"] = [Cell(e.state) for e in comparison.entries]
    for field in comparison.fields:
        columns[field] = [setting_cell(e.settings.get(field, "?")) for e in comparison.entries]
    measured = {
        name: cells for name, cells in result_columns(comparison.entries).items() if any(cell.text for cell in cells)
    }
    return columns | measured, {"#", *measured}


def result_columns(entries: Sequence[Entry]) -> dict[str, list[Cell]]:
    """The numbers of every run by the heading of their column."""
    return {
        "acceptance length": [measured(e.results, "acceptance_length") for e in entries],
        "over cycles": [measured(e.results, "acceptance_length_cycles") for e in entries],
        "decoded": [measured(e.decoded, "acceptance_length") for e in entries],
        "decoded, over cycles": [measured(e.decoded, "acceptance_length_cycles") for e in entries],
        "decoded, prompts": [count_cell((e.decoded or {}).get("num_prompts")) for e in entries],
        "speed-up": [number_cell((e.decoded or {}).get("speed_up")) for e in entries],
        "step": [number_cell((e.results or {}).get("step")) for e in entries],
        "loss": [number_cell((e.results or {}).get("loss")) for e in entries],
        "parameters": [number_cell((e.results or {}).get("num_parameters")) for e in entries],
        "draft ms": [number_cell((e.results or {}).get("draft_s"), 1000) for e in entries],
        "train s": [number_cell((e.results or {}).get("train_s")) for e in entries],
    }


def measured(found: Mapping[str, Any] | None, name: str) -> Cell:
    """A number with its interval where one is known, sorted by the number."""
    value = (found or {}).get(name)
    if found is None or not is_finite(value):
        return Cell("", sort="")
    interval = (found.get("intervals") or {}).get(name)
    return Cell(f"{value:.3f}{words.interval_text(interval)}", sort=value)


def number_cell(value: Any, factor: float = 1.0) -> Cell:
    return Cell(short(value * factor), sort=value) if is_finite(value) else Cell("", sort="")


def count_cell(value: Any) -> Cell:
    return Cell(str(value), sort=value) if is_finite(value) else Cell("", sort="")


def setting_cell(text: str) -> Cell:
    try:
        return Cell(text, sort=float(text))
    except ValueError:
        return Cell(text)


def faults(comparison: Comparison) -> list[str]:
    """A line for each run that failed, was interrupted, or cannot be read."""
    return [f"{entry.label}: {entry.error}" for entry in comparison.entries if entry.error]


EFFECT_HEAD = ("setting", "share of the variance", "value", "runs", "mean acceptance length", "range")
EFFECT_NUMBERS = (1, 3, 4, 5)


def effect_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """The effects in numbers, one line for each value of a field, as EFFECT_HEAD names them."""
    rows = []
    for effect in comparison.effects:
        share = "-" if effect["share"] is None else f"{100 * effect['share']:.0f} %"
        name = (effect["field"], share)
        for value in effect["values"]:
            spread = f"{value['low']:.3f} to {value['high']:.3f}"
            rows.append((*name, value["label"], str(value["num_runs"]), f"{value['mean']:.3f}", spread))
            name = ("", "")
    return rows


def effects_note(comparison: Comparison) -> str:
    """Of what the effects are, and why some have no share."""
    step = comparison.effects[0]["step"]
    at = "at the end" if step is None else f"at step {step}"
    unsaid = [f"{effect['field']}: {share_text(effect)}." for effect in comparison.effects if effect["share"] is None]
    return " ".join([f"Acceptance length {at}; shares are of {ALONE}.", *unsaid])
