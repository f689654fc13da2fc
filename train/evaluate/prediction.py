"""How well the offline exam foretold decoding: two results of one checkpoint over the same held-out samples.

Knows results as JSON; no target, no store.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import UserError
from .evaluation_file import EVALUATION_NAME, OFFLINE_NAME, prompts_of, read_evaluation

DEFINITION = (
    "the offline and the decoded exam of this checkpoint over the held-out answers that both have (num_prompts), but "
    "for recorded ones longer than max_new_tokens: each one's acceptance_length over them, and relative_error, "
    "offline / decoded - 1; points are (name, offline, decoded) of each answer"
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Mean tokens per cycle of each answer that both exams have: (name, offline, decoded), one or more."""

    points: tuple[tuple[str, float, float], ...]

    @property
    def offline(self) -> float:
        return sum(offline for _, offline, _ in self.points) / len(self.points)

    @property
    def decoded(self) -> float:
        return sum(decoded for _, _, decoded in self.points) / len(self.points)

    @property
    def relative_error(self) -> float:
        return self.offline / self.decoded - 1

    def as_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("offline", "decoded", "relative_error")}
        return {"num_prompts": len(self.points), **own, "points": [list(point) for point in self.points]}

    def text(self) -> str:
        error = f"{100 * self.relative_error:+.1f} %"
        return (
            f"offline    {self.offline:.3f} foretells {self.decoded:.3f} decoded, off by {error} "
            f"(mean over the {len(self.points)} answers that both exams have)"
        )


def foretold(run_dir: Path, result: Mapping[str, Any]) -> Prediction | str | None:
    """A new result beside the run's other kind; the reason where the two cannot be compared, None without another."""
    path = run_dir / (EVALUATION_NAME if result["mode"] == "offline" else OFFLINE_NAME)
    if not path.is_file():
        return None
    try:
        other = read_evaluation(path)
        offline, decoded = (result, other) if result["mode"] == "offline" else (other, result)
        if found := obstacle(offline, decoded):
            return f"not compared with {path.name}: {found}"
        whole = shorter(prompts_of(offline, str(path)), decoded.get("max_new_tokens"))
        points = matched(whole, prompts_of(decoded, str(path)))
    except UserError as error:
        return f"not compared with {path.name}: {error.happened}"
    return Prediction(points) if points else f"not compared with {path.name}: no whole answer to the same prompts"


def obstacle(offline: Mapping[str, Any], decoded: Mapping[str, Any]) -> str | None:
    """Why the one says nothing about the other, in a few words."""
    if (offline["mode"], decoded["mode"]) != ("offline", "decoded"):
        return f"both are {decoded['mode']}"
    if offline.get("step") != decoded.get("step"):
        return f"offline is of step {offline.get('step')}, decoded of step {decoded.get('step')}"
    if decoded.get("temperature", 0):
        return f"the answers were drawn at temperature {decoded['temperature']}, not greedily"
    return None


Kept = Mapping[tuple[str, str], Mapping[str, Any]]


def shorter(offline: Kept, max_new_tokens: int | None) -> Kept:
    """The walked answers that decoding may give whole: their first token comes with the prompt, before the cycles."""
    if max_new_tokens is None:
        return offline
    return {key: one for key, one in offline.items() if one["num_tokens"] < max_new_tokens}


def matched(offline: Kept, decoded: Kept) -> tuple[tuple[str, float, float], ...]:
    return tuple(
        (key[0], one["num_tokens"] / one["num_cycles"], decoded[key]["num_tokens"] / decoded[key]["num_cycles"])
        for key, one in offline.items()
        if key in decoded
    )
