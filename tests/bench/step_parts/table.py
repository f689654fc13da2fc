"""The rows of a part, the file that keeps them, and the table of all parts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from store_parts.rows import Row

Bars = Mapping[str, tuple[str, float] | None]
"""The rows that a benchmark owes, in their order: "least" or "most" and the bar, None for one without."""

BARS: Bars = {
    "draft_positions_per_s_8b": ("least", 68_000),
    "share_of_peak_8b": ("least", 0.79),
    "share_of_peak_27b": ("least", 0.80),
    "share_of_peak_27b_sliding": ("least", 0.80),
    "vs_bare_kernels_8b": ("most", 1.12),
    "vs_bare_kernels_27b": ("most", 1.12),
    "vs_speculators_bf16": ("least", 1.30),
    "peak_memory_vs_speculators": ("most", 0.75),
    "gpu_idle_small": ("most", 0.02),
    "recompiles": ("most", 0),
    "memory_prediction_error": ("most", 0.10),
    "other_kernels_share": ("most", 0.12),
}


@dataclass(slots=True)
class Part:
    """What one part measured; written as DIR/NAME.json."""

    name: str
    values: dict[str, tuple[float, str]] = field(default_factory=dict)  # row name: value, unit
    left_out: dict[str, str] = field(default_factory=dict)  # row name: why
    facts: dict[str, Any] = field(default_factory=dict)  # device, versions, choices

    def put(self, name: str, value: float, unit: str = "ratio") -> None:
        self.values[name] = (value, unit)

    def save(self, folder: Path) -> None:
        rows = [{"name": name, "value": value, "unit": unit} for name, (value, unit) in self.values.items()]
        text = json.dumps({"part": self.name, "rows": rows, "left_out": self.left_out, "facts": self.facts}, indent=1)
        (folder / f"{self.name}.json").write_text(text + "\n")

    @staticmethod
    def read(path: Path) -> "Part":
        kept = json.loads(path.read_text())
        values = {row["name"]: (row["value"], row["unit"]) for row in kept["rows"]}
        return Part(kept["part"], values, kept["left_out"], kept["facts"])


def parts_in(folder: Path, names: Sequence[str]) -> list[Part]:
    """The parts that were kept there."""
    return [Part.read(folder / f"{name}.json") for name in names if (folder / f"{name}.json").exists()]


def merged(parts: list[Part], bars: Bars = BARS) -> tuple[list[Row], dict[str, str]]:
    """All rows, those that are owed first, and what no part measured with its reason."""
    values: dict[str, tuple[float, str]] = {}
    left_out: dict[str, str] = {}
    for part in parts:
        assert not values.keys() & part.values.keys(), f"two parts measured {values.keys() & part.values.keys()}"
        values |= part.values
        left_out |= part.left_out
    for name in bars:
        if name not in values:
            left_out.setdefault(name, "its part was not run")
    rows = []
    for name in [*(name for name in bars if name in values), *(name for name in values if name not in bars)]:
        which, bar = bars.get(name) or ("", 0.0)
        rows.append(Row(name, *values[name], **{which: bar} if which else {}))
    return rows, left_out
