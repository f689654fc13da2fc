"""Which altered fact explains an engine's profile: a pure function of profiles.

Each hypothesis is our own drafter with one fact altered, run on the same texts. It explains the engine where its
profile agrees with the engine's and lies nearer to it than ours does. Knows no model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .profile import Profile, distance


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An altered fact in words, the profile it gives here, and how far that is from the engine's."""

    fact: str
    profile: Profile
    distance: float

    def as_dict(self) -> dict[str, Any]:
        return {"fact": self.fact, "distance": self.distance, **self.profile.as_dict()}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All hypotheses, the nearest first; those of the first `num_named` explain the engine."""

    hypotheses: tuple[Hypothesis, ...]
    num_named: int

    @property
    def named(self) -> tuple[Hypothesis, ...]:
        return self.hypotheses[: self.num_named]

    def as_dict(self) -> dict[str, Any]:
        return {
            "named": [hypothesis.fact for hypothesis in self.named],
            "hypotheses": [hypothesis.as_dict() for hypothesis in self.hypotheses],
        }

    def text(self) -> list[str]:
        """What explains the engine's numbers, or that nothing does."""
        if not self.hypotheses:
            return ["cause      unknown: there was nothing to alter"]
        if not self.named:
            nearest = self.hypotheses[0]
            return [
                f"cause      unknown: none of {len(self.hypotheses)} altered facts gives the engine's numbers",
                f"  the nearest is {nearest.fact!r}, acceptance length {nearest.profile.acceptance_length:.3f}, "
                f"off by {nearest.distance:.3f}",
            ]
        first, others = self.named[0], self.named[1:]
        return [
            f"cause      {first.fact}: our drafter altered so gives {first.profile.acceptance_length:.3f}, "
            f"off by {first.distance:.3f} at most",
            *(f"  as well as {other.fact}, off by {other.distance:.3f}" for other in others),
        ]


def diagnose(engine: Profile, ours: Profile, altered: Mapping[str, Profile], tolerance: float) -> Diagnosis:
    """The hypotheses `altered` (fact -> profile) in order of their distance to the engine's profile."""
    found = [Hypothesis(fact, profile, distance(profile, engine)) for fact, profile in altered.items()]
    found.sort(key=lambda hypothesis: hypothesis.distance)
    own = distance(ours, engine)
    return Diagnosis(tuple(found), sum(h.distance <= tolerance and h.distance < own for h in found))
