"""The one table: numbers, their bars and verdicts. And CPU time by rounds, every way in each round."""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One number; `most` or `least` is its bar."""

    name: str
    value: float
    unit: str = "ratio"
    most: float | None = None
    least: float | None = None

    @property
    def kept(self) -> float:
        """As it is printed and kept."""
        return int(self.value) if self.unit == "count" else float(f"{self.value:.4g}")

    @property
    def bar(self) -> str:
        if self.most is not None:
            return f"<= {self.most:g}"
        return "" if self.least is None else f">= {self.least:g}"

    @property
    def verdict(self) -> str:
        if self.most is not None:
            return "PASS" if self.value <= self.most else "FAIL"
        return "" if self.least is None else ("PASS" if self.value >= self.least else "FAIL")


def show(bench: str, rows: list[Row], left_out: dict[str, str]) -> None:
    """Prints the table, what is not in it and why, and the line that is kept of this benchmark."""
    width = max((len(row.name) for row in rows), default=3)
    print(f"{'row':{width}} {'value':>10} {'unit':12} {'bar':>9}")
    for row in rows:
        print(f"{row.name:{width}} {row.kept:10g} {row.unit:12} {row.bar:>9} {row.verdict}".rstrip())
    for name, why in left_out.items():
        print(f"left out: {name}: {why}")
    plain: list[dict[str, Any]] = [{"name": row.name, "value": row.kept, "unit": row.unit} for row in rows]
    print(json.dumps({"bench": bench, "rows": plain}))


class Taken:
    """CPU seconds (user and system, all threads of this process) that each way took in each round.

    A round runs all ways, so what slows the machine for a while slows them all: ratios are medians of those of rounds.
    One round more comes first and is not counted; neither is `before`, which runs before each way.
    """

    def __init__(
        self, ways: dict[str, Callable[[], None]], rounds: int, before: Callable[[], None] = lambda: None
    ) -> None:
        self.cpu_s: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, run in ways.items():
                before()
                started = time.process_time()
                run()
                if number:
                    self.cpu_s[name].append(time.process_time() - started)

    def ratio(self, name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(self.cpu_s[name], self.cpu_s[other]))

    def rows(self, gigabytes: float) -> list[Row]:
        """The medians themselves."""
        return [
            Row(f"{name}_cpu", statistics.median(taken) / gigabytes, "CPU-s/GB") for name, taken in self.cpu_s.items()
        ]
