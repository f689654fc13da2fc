"""What an exam found: as JSON with every definition beside its number, and as printed text.

Pure data; knows no model and no file.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from .acceptance import DEFINITIONS, NOTHING, Acceptance, acceptance_text
from .decode import Mismatch

FORMAT = 1
SHOWN_MISMATCHES = 5

DECODED, OFFLINE = "decoded", "offline"

EXAM_DEFINITIONS = {
    "mode": "'decoded': the target decoded every prompt, plainly and speculatively; 'offline': drafts were compared "
    "with the recorded answers of a store, which equals decoding where the target wrote them greedily",
    "num_prompts": "prompts decoded, or recorded answers walked (each answer of a conversation is one)",
    "num_equal": "prompts whose speculative answer equals the target's own plain greedy answer, token for token",
    "mismatches": "the first difference of every other prompt; logit_gap is the target's logit of its plain token less "
    "that of the speculative one, near 0 where rounding decided a tie",
    "speed_up": "plain_s / speculative_s",
    "plain_s": "wall time of plain greedy decoding, one token a forward, all prompts, reading them included, seconds",
    "speculative_s": "wall time of speculative decoding of the same prompts on the same machine, reading included",
    "num_new_tokens": "tokens of all speculative answers, stop tokens included",
    "answers": "prompts with a known right answer ('known') and those whose decoded text equals it but for white space "
    "at both ends ('right'), by task",
    "left_out": "lines or samples that gave no prompt, with the reason",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedMismatch:
    """A difference with the prompt it belongs to and the texts of both tokens."""

    prompt: str
    plain_text: str
    speculative_text: str
    difference: Mismatch

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


@dataclass(kw_only=True, slots=True)
class Comparison:
    """Speculative against plain decoding, summed over prompts while the exam runs."""

    num_prompts: int = 0
    num_equal: int = 0
    mismatches: list[NamedMismatch] = field(default_factory=list)
    plain_s: float = 0.0
    speculative_s: float = 0.0
    num_new_tokens: int = 0
    answers: dict[str, list[int]] = field(default_factory=dict)  # task -> [right, known]

    @property
    def speed_up(self) -> float | None:
        return self.plain_s / self.speculative_s if self.speculative_s else None

    def as_dict(self) -> dict[str, Any]:
        own = ("num_equal", "speed_up", "plain_s", "speculative_s", "num_new_tokens")
        return {name: getattr(self, name) for name in own} | {
            "mismatches": [mismatch.as_dict() for mismatch in self.mismatches],
            "answers": {task: {"right": right, "known": known} for task, (right, known) in self.answers.items()},
        }

    def text(self) -> list[str]:
        if not self.num_prompts:
            return [f"lossless   {NOTHING}"]
        lines = [f"lossless   {self.num_equal}/{self.num_prompts} outputs equal the target's own plain greedy decoding"]
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
    step: int
    acceptance: Acceptance
    comparison: Comparison | None
    settings: dict[str, Any]
    left_out: list[tuple[str, str]]
    next_command: str
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
            "left_out": [{"name": name, "reason": reason} for name, reason in self.left_out],
            "definitions": EXAM_DEFINITIONS | DEFINITIONS,
        }

    def text(self) -> str:
        settings = self.settings
        drafter = f"drafter {settings['drafter_dtype']} on {settings['device']}, taps {settings['taps']}"
        if self.comparison is None:
            target, limit = f"{settings['target']}, not loaded", ""
        else:
            target = f"{settings['target']}, {settings['target_dtype']}"
            limit = f", at most {settings['max_new_tokens']} new tokens"
        lines = [
            f"run        {self.run}, step {self.step}",
            f"target     {target}; {drafter}",
            f"prompts    {len(self.acceptance.answers)} from {settings['prompts']}{limit}; "
            f"{len(self.left_out)} left out",
            *(f"  {name}: {reason}" for name, reason in self.left_out[:SHOWN_MISMATCHES]),
            "",
            acceptance_text(self.acceptance),
            "",
            *([] if self.comparison is None else self.comparison.text()),
            *(f"saved      {path}" for path in self.saved),
        ]
        return "\n".join([*lines, f"next: {self.next_command}"])
