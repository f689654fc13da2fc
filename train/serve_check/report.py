"""What a serve check found: as JSON with the definitions beside the numbers, and as printed text. Pure data."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .diagnosis import Diagnosis
from .outputs import Answers
from .profile import Profile, distance, relative_error
from .tokens import TokenCheck

FORMAT = 1
SHOWN = 5

DEFINITIONS = {
    "acceptance_length": "1 + accepted drafts / cycles over all prompts; a draft counts as accepted where the target "
    "would have said it, behind the end of the text too, as engines count",
    "per_position": "share of all cycles whose first k drafts were all accepted, k = 1 ... block_size - 1",
    "ours": "our drafter with the folder's number format of weights, in the engine's number format, along the engine's "
    "own texts",
    "relative_error": "difference of the two acceptance lengths, as a share of ours",
    "distance": "the larger of relative_error and of the largest difference of a position's shares",
    "num_equal": "prompts whose answer from the engine equals the target's plain greedy answer here, token for token",
    "num_ties": "others that part where the target's two logits are nearer than tie_gap; they are no fault",
    "agrees": "the folder is the run's, tokens are equal, answers are equal but for near ties, and "
    "distance <= tolerance",
    "named": "altered facts with which our drafter gives the engine's numbers, the nearest first",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One engine's run beside ours; `diagnosis` only where acceptance disagrees."""

    engine: Profile
    ours: Profile
    answers: Answers
    tokens: TokenCheck
    diagnosis: Diagnosis | None

    @property
    def distance(self) -> float:
        return distance(self.engine, self.ours)

    @property
    def relative_error(self) -> float:
        return relative_error(self.engine, self.ours)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeCheckReport:
    """The result of `dflash serve-check`; `measured` is None where the folder was not served: it is not the run's."""

    run: str
    step: int
    folder: str
    settings: dict[str, Any]
    tolerance: float
    is_compared: bool = True  # the folder with the run; a new export is the run's own
    folder_differences: Sequence[str] = ()
    measured: Measured | None = None
    left_out: Sequence[tuple[str, str]] = ()
    saved: str = ""
    log: str = field(default="")

    @property
    def acceptance_agrees(self) -> bool:
        return self.measured is not None and self.measured.distance <= self.tolerance

    @property
    def agrees(self) -> bool:
        found = self.measured
        return (
            found is not None
            and not self.folder_differences
            and not found.tokens.others
            and found.answers.agree
            and self.acceptance_agrees
        )

    @property
    def folder_state(self) -> str:
        if not self.is_compared:
            return "not compared with the run"
        return "not the run's checkpoint" if self.folder_differences else "the run's checkpoint"

    def as_dict(self) -> dict[str, Any]:
        """JSON types."""
        found: dict[str, Any] = {}
        if self.measured is not None:
            measured = self.measured
            found = {
                "num_prompts": measured.answers.num_prompts,
                **measured.answers.as_dict(),
                "ours": measured.ours.as_dict(),
                "engine": measured.engine.as_dict(),
                "relative_error": measured.relative_error,
                "distance": measured.distance,
                "tokens": measured.tokens.as_dict(),
                "diagnosis": None if measured.diagnosis is None else measured.diagnosis.as_dict(),
            }
        return {
            "format": FORMAT,
            "agrees": self.agrees,
            "run": self.run,
            "step": self.step,
            "folder": self.folder,
            "is_compared": self.is_compared,
            "folder_differences": list(self.folder_differences),
            "tolerance": self.tolerance,
            **self.settings,
            **found,
            "left_out": [{"name": name, "reason": reason} for name, reason in self.left_out],
            "definitions": DEFINITIONS,
        }

    def text(self) -> str:
        lines = [
            f"run        {self.run}, step {self.step}",
            f"folder     {self.folder}, {self.folder_state}",
        ]
        lines += [f"  {difference}" for difference in self.folder_differences[:SHOWN]]
        if (more := len(self.folder_differences) - SHOWN) > 0:
            lines.append(f"  and {more} more")
        lines += (
            self.measured_text() if self.measured is not None else ["engine     not started: mend the folder first"]
        )
        lines += [f"saved      {self.saved}"]
        return "\n".join([*lines, f"verdict    {self.verdict()}"])

    def measured_text(self) -> list[str]:
        found, settings = self.measured, self.settings
        assert found is not None
        answers, tokens = found.answers, found.tokens
        lines = [
            f"engine     {settings['engine_package']}, {settings['dtype']} on {settings['device']}; log {self.log}",
            f"prompts    {answers.num_prompts} from {settings['prompts']}, at most {settings['max_new_tokens']} new "
            f"tokens; {len(self.left_out)} left out",
            *(f"  {name}: {reason}" for name, reason in self.left_out[:SHOWN]),
            f"tokens     {tokens.num_chats} chats and {tokens.num_texts} texts compared with the engine's own; "
            f"{'all equal' if not tokens.others else 'not equal'}",
            *(f"  {other.text()}" for other in tokens.others),
            f"outputs    {answers.num_equal} of {answers.num_prompts} equal the target's own plain greedy decoding"
            + (f", {answers.num_ties} part at a near tie" if answers.num_ties else ""),
            *(parting.text() for parting in answers.partings[:SHOWN]),
            *([f"  and {len(answers.partings) - SHOWN} more"] if len(answers.partings) > SHOWN else []),
            "",
            "cycles whose first k drafts were all accepted, share:",
            "draft position k    ours   the engine's   difference",
        ]
        lines += [
            f"{k:>16}   {own:.3f}   {its:>12.3f}   {its - own:>+10.3f}"
            for k, (own, its) in enumerate(zip(found.ours.shares, found.engine.shares), start=1)
        ]
        lines += [
            "",
            f"acceptance length  {found.ours.acceptance_length:.3f} ours, {found.engine.acceptance_length:.3f} the "
            f"engine's, apart by {100 * found.relative_error:.2f} % ({found.ours.num_cycles} and "
            f"{found.engine.num_cycles} cycles)",
            *(found.diagnosis.text() if found.diagnosis is not None else []),
        ]
        return lines

    def verdict(self) -> str:
        if self.agrees:
            return "the engine does what training measured"
        faults: list[str] = []
        if self.folder_differences:
            faults.append("the folder is not the run's checkpoint")
        if self.measured is not None:
            faults += [f"the {other.kind} differs" for other in self.measured.tokens.others]
            faults += [] if self.measured.answers.agree else ["outputs differ"]
            faults += [] if self.acceptance_agrees else ["acceptance differs"]
        return f"NOT the same: {'; '.join(faults)}"
