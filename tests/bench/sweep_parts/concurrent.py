"""Two runs of a sweep at a time on two devices, one store, against each of them alone on its device.

Each run trains the same rows alone and beside the other, and its time is the median of `step_s` over the same steps:
those that it ended while the other trained, too, so neither start nor compilation of a neighbour counts.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_offline.train.metrics import METRICS_NAME, TRAIN, read_metrics
from step_parts.table import Part
from sweep_parts.commands import own_settings, sweep

SEEDS = (1, 2)  # of the two runs
WARM_UP = 5  # first steps of a run that do not count: kernels are compiled in them
LEAST_STEPS = 20  # of each run beside the other
PIECE = 2**24


@dataclass(slots=True)
class Watched:
    """How many updates each of two runs had written, whenever somebody looked."""

    paths: Sequence[Path]
    looks: list[tuple[int, ...]] = field(default_factory=list)

    def look(self) -> None:
        self.looks.append(tuple(num_updates(path) for path in self.paths))

    def steps_together(self, steps: int, warm_up: int) -> list[range]:
        """The steps of each run between the first and the last look at which all were behind their warm-up, and on."""
        both = [look for look in self.looks if all(warm_up <= done < steps for done in look)]
        if not both:
            return [range(0) for _ in self.paths]
        return [range(first + 1, last + 1) for first, last in zip(both[0], both[-1])]


def num_updates(path: Path) -> int:
    return path.read_bytes().count(b'"kind": "train"') if path.exists() else 0


@dataclass(frozen=True, slots=True)
class Pair:
    """Median step of one run, seconds, and the share of its time that it waited for rows."""

    alone_s: float
    together_s: float
    wait_alone: float
    wait_together: float
    drift: float  # of the alone run: median of the later half of these steps over that of the earlier one, less 1
    num_steps: int

    @property
    def cost(self) -> float:
        return self.together_s / self.alone_s - 1


def pair_of(alone: Sequence[dict[str, Any]], together: Sequence[dict[str, Any]], steps: range) -> Pair:
    """Compares the same steps of two runs, given by their lines of metrics.jsonl."""
    here, beside = ([line for line in lines if line["step"] in steps] for lines in (alone, together))
    halves = [median_s(half) for half in (here[: len(here) // 2], here[len(here) // 2 :])]
    waits = [sum(line["wait_s"] for line in lines) / sum(line["step_s"] for line in lines) for lines in (here, beside)]
    return Pair(median_s(here), median_s(beside), *waits, drift=halves[1] / halves[0] - 1, num_steps=len(steps))


def median_s(lines: Sequence[dict[str, Any]]) -> float:
    return statistics.median(line["step_s"] for line in lines)


def measure(
    out: Path, store: Path, devices: Sequence[str], base: dict[str, Any], rounds: int, least: int = LEAST_STEPS
) -> Part:
    """The part's rows; `devices` are two. Raises SystemExit where the runs did not train beside each other."""
    started, pairs = time.perf_counter(), list[Pair]()
    base = {**own_settings(store), **base, "eval_every": base["steps"], "checkpoint_every": base["steps"]}
    read_whole(store)
    for number in range(rounds):
        pairs += one_round(out / f"round-{number}", store, devices, base, least)
    part = Part("concurrent")
    part.put("concurrent_cost", max(statistics.median(p.cost for p in pairs[i::2]) for i in range(2)))
    for i in range(2):
        own = pairs[i::2]
        part.put(f"concurrent_step_alone_{i}", statistics.median(p.alone_s for p in own), "s")
        part.put(f"concurrent_step_together_{i}", statistics.median(p.together_s for p in own), "s")
    part.put("concurrent_wait_alone", max(p.wait_alone for p in pairs), "share")
    part.put("concurrent_wait_together", max(p.wait_together for p in pairs), "share")
    part.put("concurrent_drift_alone", max(abs(p.drift) for p in pairs), "share")
    part.put("concurrent_steps", min(p.num_steps for p in pairs), "count")
    part.facts = {"devices": list(devices), "rounds": rounds, "base": base, "took_s": time.perf_counter() - started}
    return part


def one_round(folder: Path, store: Path, devices: Sequence[str], base: dict[str, Any], least: int) -> tuple[Pair, Pair]:
    """Each run alone, then both together."""
    folder.mkdir(parents=True)
    for i, seed in enumerate(SEEDS):
        sweep(folder / f"alone-{i}", store, devices[i : i + 1], {"seed": [seed]}, base)
    together = folder / "together"
    paths = [together / "runs" / f"{number:04d}" / METRICS_NAME for number in (1, 2)]
    watched = Watched(paths)
    sweep(together, store, devices, {"seed": list(SEEDS)}, base, watched.look)
    steps = watched.steps_together(base["steps"], min(WARM_UP, base["steps"] // 4))
    if min(map(len, steps)) < least:
        raise SystemExit(f"the runs shared only steps {steps}; at least {least} are compared: give more --steps")
    alone = [read_metrics(folder / f"alone-{i}" / "runs" / "0001" / METRICS_NAME, TRAIN) for i in range(2)]
    first, second = (pair_of(own, read_metrics(path, TRAIN), s) for own, path, s in zip(alone, paths, steps))
    return first, second


def read_whole(store: Path) -> None:
    """Reads the store once, so that all runs find it in the page cache as far as there is room."""
    for path in sorted(path for path in store.rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as file:
            while file.read(PIECE):
                pass
