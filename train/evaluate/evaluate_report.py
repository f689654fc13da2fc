"""What an exam found: as JSON with every definition beside its number, and as printed text.

Pure data; knows no model and no file.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .acceptance import DEFINITIONS, NOTHING, Acceptance, acceptance_text
from .decode import Mismatch
from .evaluation_file import PER_PROMPT
from .prediction import DEFINITION, Prediction

FORMAT = 2
SHOWN_MISMATCHES = 5

DECODED, OFFLINE = "decoded", "offline"

EXAM_DEFINITIONS = {
    "mode": "'decoded': the target decoded every prompt, plainly and speculatively; 'offline': drafts were compared "
    "with the recorded answers of a store, which equals decoding where the target wrote them greedily",
    "format": "version of this file's keys",
    "step": "updates of the run whose checkpoint this is; null for a drafter's folder",
    "block_size": "tokens of a block: the anchor, which is known, and block_size - 1 drafts",
    "max_new_tokens": "most tokens of an answer, the first one and the stop token included; fewer where the target's "
    "context ends",
    "temperature": "of target and drafter, 0 is greedy; then top_k (0: all) and top_p (1: all) cut what is drawn from",
    "seed": "of all draws, together with a prompt's name; null where nothing is drawn",
    "batch": "prompts decoded together, count; batch_note says why it is 1 where more were asked for",
    "threads": "CPU threads of torch",
    "by_task": "the same numbers over the prompts of each task",
    "num_prompts": "prompts decoded, or recorded answers walked (each answer of a conversation is one)",
    "num_equal": "prompts whose speculative answer equals the target's own plain greedy answer, token for token; null "
    "where tokens were sampled: two draws of one distribution differ",
    "mismatches": "the first difference of every other prompt; logit_gap is the target's logit of its plain token less "
    "that of the speculative one, near 0 where rounding decided a tie, as plain decoding computes them, verify_gap the "
    "same as the check of the drafts computes them",
    "num_exact_ties": "of these the ones where one of the two computes the same number for both, so that neither token "
    "is the target's",
    "speed_up": "plain_s / speculative_s",
    "plain_s": "wall time of plain decoding, one token a forward, all prompts, reading them included, seconds; prompts "
    "that are decoded together (batch) share it",
    "speculative_s": "wall time of speculative decoding of the same prompts on the same machine, reading included",
    "num_new_tokens": "tokens of all speculative answers, stop tokens included",
    "answers": "prompts with a known right answer ('known') and those whose decoded text equals it but for white space "
    "at both ends ('right'), by task",
    "left_out": "lines or samples that gave no prompt, and turns that could not be asked, with the reason",
    "formats": "prompts by the format that their lines have, count; the turns of a conversation are one",
    PER_PROMPT: "every prompt: its name, the conversation whose turn it is, a digest of what that was asked first, "
    "cycles, tokens produced by them and drafts accepted by them, cycles by tokens produced; decoded: num_new_tokens, "
    "the wall time of both decodings in seconds, is_equal, and parted_at, the first answer token that differs",
    "offline_vs_decoded": DEFINITION,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedMismatch:
    """A difference with the prompt it belongs to and the texts of both tokens."""

    prompt: str
    plain_text: str
    speculative_text: str
    difference: Mismatch

    @property
    def is_exact_tie(self) -> bool:
        """See `Mismatch`."""
        return self.difference.is_exact_tie

    def as_dict(self) -> dict[str, Any]:
        own = {"prompt": self.prompt, "plain_text": self.plain_text, "speculative_text": self.speculative_text}
        return own | asdict(self.difference)

    def text(self) -> str:
        d = self.difference
        gap = "" if d.logit_gap is None else f", logit gap {d.logit_gap:.3g}"
        return (
            f"  {self.prompt}, answer token {d.position}: plain {d.plain_token} {self.plain_text!r}, "
            f"speculative {d.speculative_token} {self.speculative_text!r}{gap}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOutcome:
    """Both decodings of one prompt: how long they took, whether they are equal, and whether the answer is right."""

    name: str
    task: str
    plain_tokens: tuple[int, ...]
    num_new_tokens: int
    plain_s: float
    speculative_s: float
    is_compared: bool = True  # False where tokens were sampled
    mismatch: NamedMismatch | None = None
    is_right: bool | None = None  # None where the right answer is not known

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_new_tokens": self.num_new_tokens,
            "plain_s": self.plain_s,
            "speculative_s": self.speculative_s,
            "is_equal": self.mismatch is None if self.is_compared else None,
            "parted_at": None if self.mismatch is None else self.mismatch.difference.position,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Speculative against plain decoding, prompt by prompt in the order of the exam."""

    outcomes: list[PromptOutcome] = field(default_factory=list)

    @property
    def num_prompts(self) -> int:
        return len(self.outcomes)

    @property
    def mismatches(self) -> list[NamedMismatch]:
        return [outcome.mismatch for outcome in self.outcomes if outcome.mismatch is not None]

    @property
    def is_compared(self) -> bool:
        return all(outcome.is_compared for outcome in self.outcomes)

    @property
    def num_equal(self) -> int | None:
        return self.num_prompts - len(self.mismatches) if self.is_compared else None

    @property
    def num_exact_ties(self) -> int | None:
        return sum(mismatch.is_exact_tie for mismatch in self.mismatches) if self.is_compared else None

    @property
    def plain_s(self) -> float:
        return sum(outcome.plain_s for outcome in self.outcomes)

    @property
    def speculative_s(self) -> float:
        return sum(outcome.speculative_s for outcome in self.outcomes)

    @property
    def num_new_tokens(self) -> int:
        return sum(outcome.num_new_tokens for outcome in self.outcomes)

    @property
    def speed_up(self) -> float | None:
        return self.plain_s / self.speculative_s if self.speculative_s else None

    @property
    def answers(self) -> dict[str, tuple[int, int]]:
        """For each task with known right answers: how many were given, and how many are known."""
        known = [outcome for outcome in self.outcomes if outcome.is_right is not None]
        found: dict[str, tuple[int, int]] = {}
        for outcome in known:
            right, count = found.get(outcome.task, (0, 0))
            found[outcome.task] = (right + bool(outcome.is_right), count + 1)
        return found

    def as_dict(self) -> dict[str, Any]:
        own = ("num_equal", "num_exact_ties", "speed_up", "plain_s", "speculative_s", "num_new_tokens")
        return {name: getattr(self, name) for name in own} | {
            "mismatches": [mismatch.as_dict() for mismatch in self.mismatches],
            "answers": {task: {"right": right, "known": known} for task, (right, known) in self.answers.items()},
        }

    def text(self) -> list[str]:
        if not self.num_prompts:
            return [f"lossless   {NOTHING}"]
        found = "in distribution: tokens were sampled, outputs are not compared"
        if self.is_compared:
            found = f"{self.num_equal}/{self.num_prompts} outputs equal the target's own plain greedy decoding"
        lines = [f"lossless   {found}"]
        if self.mismatches:
            lines.append(
                f"           {self.num_exact_ties} of {len(self.mismatches)} differences are exact ties of two logits"
            )
        lines += [mismatch.text() for mismatch in self.mismatches[:SHOWN_MISMATCHES]]
        if len(self.mismatches) > SHOWN_MISMATCHES:
            lines.append(f"  and {len(self.mismatches) - SHOWN_MISMATCHES} more")
        lines.append(
            f"speed      {self.speed_up or 0:.2f} times plain decoding: {self.speculative_s:.2f} s against "
            f"{self.plain_s:.2f} s for {self.num_new_tokens:,} tokens, prompts included"
        )
        if self.answers:
            right, known = (sum(counts[i] for counts in self.answers.values()) for i in (0, 1))
            tasks = ", ".join(f"{task or '(no task)'} {r}/{k}" for task, (r, k) in sorted(self.answers.items()))
            lines.append(f"answers    {right}/{known} exactly right ({tasks})")
        return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateReport:
    """The result of `dflash evaluate`; `settings` says on what and with what it was measured."""

    run: str
    step: int | None  # of the run; None of a drafter's folder
    acceptance: Acceptance
    comparison: Comparison | None
    settings: dict[str, Any]
    left_out: list[tuple[str, str]]
    next_command: str
    prediction: Prediction | str | None = None  # a text says why there is none
    saved: tuple[str, ...] = ()

    @property
    def mode(self) -> str:
        return OFFLINE if self.comparison is None else DECODED

    def as_dict(self) -> dict[str, Any]:
        """JSON types; numbers that could not be measured are None."""
        return {
            "format": FORMAT,
            "mode": self.mode,
            "run": self.run,
            "step": self.step,
            **self.settings,
            "num_prompts": len(self.acceptance.answers),
            **self.acceptance.as_dict(),
            **({} if self.comparison is None else self.comparison.as_dict()),
            "by_task": {task: part.as_dict() for task, part in self.acceptance.by_task().items()},
            **({"offline_vs_decoded": self.prediction.as_dict()} if isinstance(self.prediction, Prediction) else {}),
            "left_out": [{"name": name, "reason": reason} for name, reason in self.left_out],
            PER_PROMPT: self.per_prompt(),
            "definitions": EXAM_DEFINITIONS | DEFINITIONS,
        }

    def per_prompt(self) -> list[dict[str, Any]]:
        """What is kept of each prompt, in the order of the exam."""
        answers = [answer.as_dict(self.acceptance.block_size) for answer in self.acceptance.answers]
        outcomes = [{}] * len(answers) if self.comparison is None else [o.as_dict() for o in self.comparison.outcomes]
        return [answer | outcome for answer, outcome in zip(answers, outcomes, strict=True)]

    def text(self) -> str:
        settings = self.settings
        drafter = f"drafter {settings['drafter_dtype']} on {settings['device']}, taps {settings['taps']}"
        if self.comparison is None:
            target, limit = f"{settings['target']}, not loaded", ""
        else:
            target = f"{settings['target']}, {settings['target_dtype']}"
            limit = f", at most {settings['max_new_tokens']} new tokens"
        lines = [
            f"run        {self.run}, step {self.step}" if self.step is not None else f"folder     {self.run}",
            f"target     {target}; {drafter}",
            f"prompts    {len(self.acceptance.answers)} from {settings['prompts']}{limit}; "
            f"{len(self.left_out)} left out",
            *([f"formats    {counts_text(settings['formats'])}"] if settings.get("formats") else []),
            *(f"  {name}: {' '.join(reason.split())}" for name, reason in self.left_out[:SHOWN_MISMATCHES]),
            *([] if self.comparison is None else [decoding_text(settings)]),
            "",
            acceptance_text(self.acceptance),
            "",
            *([] if self.comparison is None else self.comparison.text()),
            *([] if self.prediction is None else [prediction_text(self.prediction)]),
            *(f"saved      {path}" for path in self.saved),
        ]
        return "\n".join([*lines, f"next: {self.next_command}"])


def decoding_text(settings: Mapping[str, Any]) -> str:
    note = f" ({settings['batch_note']})" if settings["batch_note"] else ""
    return f"decoding   {settings['decoding']}; batch {settings['batch']}{note}"


def counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def prediction_text(prediction: Prediction | str) -> str:
    return f"offline    {prediction}" if isinstance(prediction, str) else prediction.text()
