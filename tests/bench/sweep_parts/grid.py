"""A sweep over block sizes, losses and optimizers: which run wins, and the acceptance length of every one."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from step_parts.table import Part
from sweep_parts.commands import own_settings, sweep

FIELDS: dict[str, list[Any]] = {
    "drafter.block_size": [8, 16, 24],
    "loss.weights": ["decay", "dpace"],
    "optim.name": ["muon", "adamw"],
}
TINY_FIELDS = FIELDS | {"drafter.block_size": [4, 6, 8]}


def measure(
    out: Path, store: Path, devices: Sequence[str], base: dict[str, Any], fields: Mapping[str, Sequence[Any]]
) -> Part:
    """The part's rows: counts, the winner, and every run by its settings."""
    started, is_new = time.perf_counter(), not out.exists()
    content = sweep(out, store, devices, fields, {**own_settings(store), **base})
    part = part_of(content)
    part.facts = {"devices": list(devices), "base": content["base"], "table": table_of(content)}
    if is_new:
        part.put("sweep_wall", time.perf_counter() - started, "s")
    else:
        part.left_out["sweep_wall"] = "the sweep was done in several pieces"
    return part


def part_of(content: Mapping[str, Any]) -> Part:
    """The rows of a sweep, from its sweep.json. Raises SystemExit where no run was finished."""
    runs = {run["number"]: run for run in content["runs"]}
    best_first = [runs[number] for number in content["ranking"] if runs[number]["results"] is not None]
    if not best_first:
        raise SystemExit("no run of the sweep was finished")
    winner, part = best_first[0]["results"], Part("smollm2")
    part.put("runs", len(best_first), "count")
    part.put("winner_acceptance", winner["acceptance_length"], "tokens")
    if bounds := winner["intervals"]["acceptance_length"]:
        part.put("winner_acceptance_low", bounds[0], "tokens")
        part.put("winner_acceptance_high", bounds[1], "tokens")
    part.put("held_out_answers", winner["num_prompts"], "count")
    part.put("train_time", sum(run["results"]["train_s"] for run in best_first), "s")
    for run in best_first:
        part.put(f"acceptance_{settings_text(run)}", run["results"]["acceptance_length"], "tokens")
    for effect in content["effects"]:
        if effect["share"] is not None:
            part.put(f"variance_of_{last_name(effect['field'])}", effect["share"], "share")
    return part


def settings_text(run: Mapping[str, Any]) -> str:
    """Like 16_decay_muon."""
    return "_".join(str(value) for value in run["overrides"].values())


def last_name(field: str) -> str:
    """Without its section, but for a name, which says nothing alone."""
    section, _, last = field.rpartition(".")
    return section if last == "name" else last


def table_of(content: Mapping[str, Any]) -> list[str]:
    """The ranking as lines of Markdown, runs that did not come to their end below it."""
    runs = {run["number"]: run for run in content["runs"]}
    lines = [
        f"| Rank | {' | '.join(content['fields'])} | Acceptance length | 95 % | All cycles | Draft ms | Train s |",
        f"| ---: |{' --- |' * len(content['fields'])} ---: | --- | ---: | ---: | ---: |",
    ]
    for rank, number in enumerate(content["ranking"], start=1):
        run, found = runs[number], runs[number]["results"]
        own = [str(run["overrides"][name]) for name in content["fields"]]
        if found is None:
            lines.append(f"| {rank} | {' | '.join(own)} | {run['state']} at step {run['step']} | | | | |")
            continue
        bounds = found["intervals"]["acceptance_length"]
        numbers = [
            f"{found['acceptance_length']:.3f}",
            f"{bounds[0]:.3f} to {bounds[1]:.3f}" if bounds else "",
            f"{found['acceptance_length_cycles']:.3f}",
            f"{1000 * found['draft_s']:.2f}",
            f"{found['train_s']:.0f}",
        ]
        lines.append(f"| {rank} | {' | '.join([*own, *numbers])} |")
    left = [run for number, run in runs.items() if number not in content["ranking"]]
    lines += [f"not ranked: {settings_text(run)}, {run['state']} at step {run['step']}" for run in left]
    return lines
