"""Acceptance statistics: what decode and walk count, and every number with its definition.

Pure data: knows no model, no tensor and no file. One *cycle* is one draft and its check by the
target; the first token of an answer comes from the target's forward over the prompt and is no
cycle. Numbers of other code bases under the same name count differently (with or without the
bonus token, per cycle or per prompt): compare only where the definitions agree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .intervals import METHOD, Interval, interval_text, ratio_interval

NOTHING = "nothing to measure"

DEFINITIONS = {
    "acceptance_length": "tokens produced by one cycle, the target's bonus token included, cut at the end of the text; "
    "mean over prompts of each prompt's mean over its cycles (as z-lab)",
    "acceptance_length_cycles": "tokens produced by one cycle, the bonus token included, cut at the end of the text; "
    "mean over all cycles",
    "accepted_drafts": "drafted tokens accepted in one cycle, the bonus token not counted; mean over prompts of each "
    "prompt's mean over its cycles",
    "accepted_drafts_cycles": "drafted tokens accepted in one cycle, the bonus token not counted; mean over all cycles",
    "histogram": "cycles that produced 1, 2, ... block_size tokens, count",
    "per_position": "share of all cycles whose first k drafts were all accepted, k = 1 ... block_size - 1; drafts "
    "behind the end of the text do not count as accepted; the shares add up to accepted_drafts_cycles",
    "per_position_conditional": "share of accepted drafts at position k among those whose predecessors in the block "
    "were all accepted and that do not lie behind the end of the text",
    "intervals": f"of each mean by its name: {METHOD}",
    "num_measured": "prompts whose answer has at least one cycle; each answer of a conversation counts as one prompt",
    "num_cycles": "drafts checked by the target (or by the recorded answer), count",
    "num_tokens": "tokens produced by cycles, count; the first token of each answer is not among them",
}


@dataclass(frozen=True, slots=True)
class Cycle:
    """One draft and its check: accepted drafts, tokens produced, and whether a draft was refused."""

    accepted: int
    produced: int
    is_refused: bool


def judge(leading: int, remaining: int, block_size: int) -> Cycle:
    """The cycle in which `leading` drafts agreed while `remaining` tokens were still to come.

    `leading` counts drafts that equal the target's choice from the first on, 0..block_size-1.
    The text ends after `remaining` (>= 1) further tokens, so at most that many are accepted or
    produced; drafts beyond the end are neither accepted nor refused.
    """
    if not (0 <= leading < block_size and remaining >= 1):
        raise ValueError(f"leading {leading}, remaining {remaining}, block size {block_size}")
    accepted = min(leading, remaining)
    return Cycle(accepted, min(leading + 1, remaining), accepted < min(block_size - 1, remaining))


@dataclass(frozen=True, slots=True)
class AnswerCycles:
    """The cycles of one prompt's answer, in order, the task it belongs to ('' for none), and who wrote it."""

    cycles: tuple[Cycle, ...]
    task: str = ""
    origin: str = ""  # as the samples of a store name it; '' where the target answers during the exam
    name: str = ""
    conversation: str = ""  # the name of the conversation whose turn it is; '' where it is the only one
    prompt_sha256: str = ""  # of what the conversation was asked first, see `ids_sha256`

    @property
    def lengths(self) -> list[int]:
        """Tokens produced by each cycle."""
        return [cycle.produced for cycle in self.cycles]

    @property
    def accepted(self) -> list[int]:
        """Drafts accepted in each cycle."""
        return [cycle.accepted for cycle in self.cycles]

    def as_dict(self, block_size: int) -> dict[str, Any]:
        """What is kept of one prompt, as JSON types; from it every mean and interval can be made again."""
        return {
            "name": self.name,
            "conversation": self.conversation or self.name,
            "prompt_sha256": self.prompt_sha256,
            "task": self.task,
            **({"origin": self.origin} if self.origin else {}),
            "num_cycles": len(self.cycles),
            "num_tokens": sum(self.lengths),
            "num_accepted": sum(self.accepted),
            "histogram": histogram(self.cycles, block_size),
        }


@dataclass(frozen=True, slots=True)
class Acceptance:
    """All cycles of an exam, prompt by prompt. A number without data is None, never 0 or NaN."""

    answers: tuple[AnswerCycles, ...]
    block_size: int

    @property
    def measured(self) -> list[AnswerCycles]:
        """The answers that have a cycle; one of a single token has none."""
        return [answer for answer in self.answers if answer.cycles]

    @property
    def cycles(self) -> list[Cycle]:
        return [cycle for answer in self.answers for cycle in answer.cycles]

    @property
    def num_prompts(self) -> int:
        """Answers with at least one cycle."""
        return len(self.measured)

    @property
    def num_cycles(self) -> int:
        return len(self.cycles)

    @property
    def num_tokens(self) -> int:
        return sum(cycle.produced for cycle in self.cycles)

    @property
    def acceptance_length(self) -> float | None:
        """Mean over prompts of the per-prompt mean of tokens per cycle, 1..block_size."""
        return mean([mean(answer.lengths) or 0.0 for answer in self.measured])

    @property
    def accepted_drafts(self) -> float | None:
        """Mean over prompts of the per-prompt mean of accepted drafts, bonus not counted, 0..block_size-1."""
        return mean([mean(answer.accepted) or 0.0 for answer in self.measured])

    @property
    def acceptance_length_cycles(self) -> float | None:
        """Mean over all cycles of tokens per cycle, 1..block_size."""
        return mean([cycle.produced for cycle in self.cycles])

    @property
    def accepted_drafts_cycles(self) -> float | None:
        """Mean over all cycles of accepted drafts, bonus not counted, 0..block_size-1."""
        return mean([cycle.accepted for cycle in self.cycles])

    @property
    def histogram(self) -> list[int]:
        """Cycles by tokens produced; entry i counts those of i + 1 tokens."""
        return histogram(self.cycles, self.block_size)

    @property
    def per_position(self) -> list[float | None]:
        """Entry k-1: share of all cycles whose first k drafts were all accepted."""
        return [mean([cycle.accepted >= k for cycle in self.cycles]) for k in range(1, self.block_size)]

    @property
    def per_position_conditional(self) -> list[float | None]:
        """Entry k-1: share of accepted drafts at k after k-1 accepted ones, of those inside the text."""
        judged = [[c for c in self.cycles if c.accepted + c.is_refused >= k] for k in range(1, self.block_size)]
        return [mean([c.accepted >= k for c in cycles]) for k, cycles in enumerate(judged, start=1)]

    @property
    def intervals(self) -> dict[str, Interval | None]:
        """Of each mean, by its name."""
        groups: dict[str, list[AnswerCycles]] = {}
        for number, answer in enumerate(self.measured):
            groups.setdefault(answer.conversation or f"{number}", []).append(answer)
        units = list(groups.values())

        def of_prompts(values: Callable[[AnswerCycles], list[int]]) -> Interval | None:
            means = np.array([sum(np.mean(values(answer)) for answer in unit) for unit in units])  # [n]
            return ratio_interval(means, np.array([len(unit) for unit in units]))

        def of_cycles(values: Callable[[AnswerCycles], list[int]]) -> Interval | None:
            sums = np.array([sum(sum(values(answer)) for answer in unit) for unit in units])  # [n]
            return ratio_interval(sums, np.array([sum(len(answer.cycles) for answer in unit) for unit in units]))

        lengths, accepted = (lambda answer: answer.lengths), (lambda answer: answer.accepted)
        return {
            "acceptance_length": of_prompts(lengths),
            "acceptance_length_cycles": of_cycles(lengths),
            "accepted_drafts": of_prompts(accepted),
            "accepted_drafts_cycles": of_cycles(accepted),
        }

    def by_task(self) -> dict[str, "Acceptance"]:
        """The same exam task by task, in alphabetical order; empty where no prompt names a task."""
        names = sorted({answer.task for answer in self.answers})
        if names in ([], [""]):
            return {}
        return {n: Acceptance(tuple(a for a in self.answers if a.task == n), self.block_size) for n in names}

    def by_origin(self) -> dict[str, "Acceptance"]:
        """The same exam for the answers of each origin, in alphabetical order."""
        names = sorted({answer.origin for answer in self.answers})
        return {n: Acceptance(tuple(a for a in self.answers if a.origin == n), self.block_size) for n in names}

    def as_dict(self) -> dict[str, Any]:
        """Every number as JSON types; None where there is nothing to measure."""
        return {
            "block_size": self.block_size,
            "acceptance_length": self.acceptance_length,
            "acceptance_length_cycles": self.acceptance_length_cycles,
            "accepted_drafts": self.accepted_drafts,
            "accepted_drafts_cycles": self.accepted_drafts_cycles,
            "intervals": {name: found and list(found) for name, found in self.intervals.items()},
            "num_measured": self.num_prompts,
            "num_cycles": self.num_cycles,
            "num_tokens": self.num_tokens,
            "histogram": self.histogram,
            "per_position": self.per_position,
            "per_position_conditional": self.per_position_conditional,
        }


def histogram(cycles: Sequence[Cycle], block_size: int) -> list[int]:
    """Cycles by tokens produced; entry i counts those of i + 1 tokens."""
    counts = [0] * block_size
    for cycle in cycles:
        counts[cycle.produced - 1] += 1
    return counts


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def format_number(value: float | None, digits: int = 3) -> str:
    """The number, or that there is nothing to measure."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def acceptance_text(acceptance: Acceptance, width: int = 40) -> str:
    """The printed exam: both means, the histogram as bars, acceptance by position, by task."""
    if not acceptance.num_cycles:
        return f"acceptance length: {NOTHING} (no cycle)"
    prompts, cycles = acceptance.num_prompts, acceptance.num_cycles

    def shown(name: str) -> str:
        return f"{format_number(getattr(acceptance, name))} {interval_text(intervals[name])}"

    intervals = acceptance.intervals
    lines = [
        f"acceptance length  {shown('acceptance_length')} tokens per target forward, bonus included "
        f"(mean over {prompts} prompts of the per-prompt mean; block {acceptance.block_size})",
        f"over all cycles    {shown('acceptance_length_cycles')} (mean over {cycles} cycles)",
        f"without the bonus  {shown('accepted_drafts')} accepted drafts (mean over prompts), "
        f"{shown('accepted_drafts_cycles')} (over all cycles)",
        "in brackets        95 % intervals, bootstrap over prompts; none of fewer than 2",
        "",
        "tokens per cycle   share of cycles",
        *histogram_bars(acceptance.histogram, width),
        "",
        "draft position k   first k all accepted   k accepted after k-1",
        *(
            f"{k:>16}   {format_number(up_to):>20}   {format_number(at):>20}"
            for k, (up_to, at) in enumerate(zip(acceptance.per_position, acceptance.per_position_conditional), start=1)
        ),
    ]
    tasks = acceptance.by_task()
    if tasks:
        lines += ["", "task               acceptance length (mean over its prompts)   prompts"]
        for name, part in tasks.items():
            length = f"{format_number(part.acceptance_length)} {interval_text(part.intervals['acceptance_length'])}"
            lines.append(f"{name or '(none)':<18} {length:>42} {part.num_prompts:>9}")
    return "\n".join(lines)


def histogram_bars(counts: Sequence[int], width: int) -> list[str]:
    """One line for each length: tokens, a bar (the largest is `width` long), share and count."""
    total, largest = sum(counts), max(counts)
    return [
        f"{length:>16}   {'#' * round(width * count / largest):<{width}} {100 * count / total:5.1f} %  {count}"
        for length, count in enumerate(counts, start=1)
    ]
