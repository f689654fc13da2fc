"""Two results of `dflash evaluate` side by side: the difference over the prompts that both have, with its interval.

Knows results as JSON; loads no target, no drafter and no store.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ... import UserError
from ..value_rules import is_count, is_object, is_text, or_none
from .acceptance import format_number
from .evaluate_report import FORMAT, OFFLINE
from .evaluation_file import (
    EVALUATION_NAME,
    KEPT,
    prompts_of,
    read_evaluation,
    strange,
    strange_key,
)
from .intervals import Interval, bootstrap, interval_text, ratio_interval

SAME = {
    "mode": "the same exam: offline with offline, decoded with decoded",
    "target_weights_sha256": "one target",
    "max_new_tokens": "answers of one length",
    "temperature": "one way of sampling",
    "top_p": "one way of sampling",
    "top_k": "one way of sampling",
}
"""Facts that two results share, or they measure different things; a result that lacks one lacks it for both."""
NEEDED = {
    **{"run": is_text, "step": or_none(is_count), "intervals": is_object},
    **dict.fromkeys(("block_size", "num_measured"), is_count),
}
"""What else is printed of a result."""
COMPARED = ("acceptance_length", "acceptance_length_cycles")
SHOWN_NAMES = 5
FEWEST = 8  # conversations of a verdict: of 2, intervals of equal drafters leave 0 out in 48 % of exams, of 8 in 5 %
Key = tuple[str, str, int | None]
Prompt = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Of one task (None: all) over the prompts both have: both numbers, and B less A with its interval."""

    task: str | None
    num_prompts: int
    num_conversations: int
    a: float
    b: float
    interval: Interval | None
    a_cycles: float
    b_cycles: float
    interval_cycles: Interval | None

    def text(self) -> str:
        name = "all" if self.task is None else self.task or "(none)"
        parts = [f"{name:<18} {self.num_prompts:>7}"]
        for a, b, interval in ((self.a, self.b, self.interval), (self.a_cycles, self.b_cycles, self.interval_cycles)):
            parts.append(f"{a:>8.3f} {b:>8.3f} {f'{b - a:+.3f} {interval_text(interval)}':>25}")
        return "   ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareReport:
    """What `dflash evaluate --compare A B` prints."""

    sides: tuple[Mapping[str, Any], Mapping[str, Any]]
    names: tuple[str, str]
    differences: tuple[Difference, ...]  # the first is over all tasks
    unmatched: tuple[tuple[str, ...], tuple[str, ...]]  # names of measured prompts that only A, only B has

    @property
    def verdict(self) -> str:
        """In one line: who is better, by the paired difference over all tasks."""
        whole = self.differences[0]
        gain, interval = whole.b - whole.a, whole.interval
        if interval is None or whole.num_conversations < FEWEST:
            return f"no difference can be told: fewer than {FEWEST} prompts or conversations in common"
        low, high = interval
        if low > 0:
            return f"B is better by {gain:.3f} {interval_text(interval)}"
        if high < 0:
            return f"A is better by {-gain:.3f} {interval_text((-high, -low))}"
        return f"no difference can be told: B less A is {gain:+.3f} {interval_text(interval)}"

    def text(self) -> str:
        lines = []
        for letter, name, side in zip("AB", self.names, self.sides):
            interval = side["intervals"]["acceptance_length"]
            lines += [
                f"{letter}          {name}: {side['run']}{step_text(side)}, block {side['block_size']}",
                f"           acceptance length {format_number(side['acceptance_length'])} "
                f"{interval_text(interval and tuple(interval))} over {side['num_measured']} prompts ({side['mode']})",
            ]
        for letter, names in zip("AB", self.unmatched):
            if names:
                more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
                lines.append(f"only in {letter}  {len(names)}: {', '.join(names[:SHOWN_NAMES])}{more}")
        head = f"{'A':>8} {'B':>8} {'B less A, 95 % interval':>25}"
        lines += [
            "",
            f"{'':<29}{'mean over prompts':^43}   {'mean over cycles':^43}",
            f"{'task':<18} {'prompts':>7}   {head}   {head}",
            *(difference.text() for difference in self.differences),
            "",
            f"verdict    {self.verdict} (acceptance length, mean over the {self.differences[0].num_prompts} prompts "
            "that both have)",
        ]
        return "\n".join(lines)


def step_text(side: Mapping[str, Any]) -> str:
    """The step of a run's checkpoint; a drafter's folder has none."""
    return "" if side.get("step") is None else f", step {side['step']}"


def compare(first: str, second: str) -> CompareReport:
    """Two result files, or run folders with their evaluation.json.

    Raises UserError for what is no result, for two that do not measure the same (named with both values), and for two
    without a prompt in common.
    """
    sides = read_side(first), read_side(second)
    require_comparable(first, second, *sides)
    own = [measured(side, name) for side, name in zip(sides, (first, second))]
    shared = [key for key in own[0] if key in own[1]]
    if not shared:
        raise UserError(
            f"{first!r} and {second!r} have no measured prompt in common",
            "two exams over the same prompts, at least some of them",
            "evaluate both with the same --prompts or --store",
        )
    pairs = [(own[0][key], own[1][key]) for key in shared]
    tasks = sorted({a["task"] for a, _ in pairs})
    return CompareReport(
        sides=sides,
        names=(first, second),
        differences=(
            difference(None, pairs),
            *(difference(task, [pair for pair in pairs if pair[0]["task"] == task]) for task in tasks if tasks != [""]),
        ),
        unmatched=(
            tuple(key[0] for key in own[0] if key not in own[1]),
            tuple(key[0] for key in own[1] if key not in own[0]),
        ),
    )


def read_side(given: str) -> dict[str, Any]:
    path = Path(given)
    if path.is_dir() and not (path / EVALUATION_NAME).is_file():
        raise UserError(
            f"the folder {given!r} holds no {EVALUATION_NAME}",
            "a run that was evaluated, or a result file",
            "evaluate it first, or name the file, like evaluation-offline.json in a run",
        )
    path = path / EVALUATION_NAME if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"there is no result at {given!r}", "a result file or a run folder", "check the path")
    result = read_evaluation(path)
    if result.get("format") != FORMAT:
        raise UserError(
            f"{str(path)!r} is a result of format {result.get('format')}: another version wrote it",
            f"format {FORMAT}",
            "evaluate again",
        )
    if name := strange_key(result, NEEDED):
        raise strange(path, name, result.get(name))
    return result


def measured(side: Mapping[str, Any], where: str) -> dict[Key, Prompt]:
    """The measured prompts by name, by what was asked and, offline, by the length of the recorded answer.

    No drafter changes that length: where it differs, two stores hold two answers to one prompt.
    """
    is_offline, found = side["mode"] == OFFLINE, prompts_of(side, where, (*KEPT, "task", "conversation"))
    return {(*key, prompt["num_tokens"] if is_offline else None): prompt for key, prompt in found.items()}


def require_comparable(first: str, second: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Raises UserError, naming the fact with both values, where the two measured different things."""
    for name, expected in SAME.items():
        if a.get(name) != b.get(name):
            raise UserError(
                f"{first!r} has {name} {a.get(name)}, {second!r} has {name} {b.get(name)}",
                f"two results that measure the same: {expected}",
                "evaluate one of them again with the settings of the other",
            )
    for name in COMPARED:
        if a["definitions"].get(name) != b["definitions"].get(name):
            raise UserError(
                f"{first!r} and {second!r} define {name} differently",
                "results of one definition",
                "evaluate both with the same version",
            )


def difference(task: str | None, pairs: Sequence[tuple[Prompt, Prompt]]) -> Difference:
    """Paired: each draw of the bootstrap takes the same conversations of both."""
    groups: dict[str, list[tuple[Prompt, Prompt]]] = {}
    for pair in pairs:
        groups.setdefault(pair[0]["conversation"], []).append(pair)
    units = list(groups.values())

    def summed(side: int, name: str) -> np.ndarray:
        return np.array([sum(pair[side][name] for pair in unit) for unit in units])  # [n]

    gains = np.array([sum(mean_of(b) - mean_of(a) for a, b in unit) for unit in units])  # [n]
    tokens, cycles = ([summed(side, name) for side in (0, 1)] for name in ("num_tokens", "num_cycles"))

    def gain_of_cycles(drawn: np.ndarray) -> np.ndarray:
        a, b = (tokens[side][drawn].sum(1) / cycles[side][drawn].sum(1) for side in (0, 1))
        return b - a

    return Difference(
        task=task,
        num_prompts=len(pairs),
        num_conversations=len(units),
        a=float(np.mean([mean_of(a) for a, _ in pairs])),
        b=float(np.mean([mean_of(b) for _, b in pairs])),
        interval=ratio_interval(gains, np.array([len(unit) for unit in units])),
        a_cycles=float(tokens[0].sum() / cycles[0].sum()),
        b_cycles=float(tokens[1].sum() / cycles[1].sum()),
        interval_cycles=bootstrap(gain_of_cycles, len(units)),
    )


def mean_of(prompt: Prompt) -> float:
    return prompt["num_tokens"] / prompt["num_cycles"]
