"""The engine's answers beside the target's own plain greedy ones.

A difference is a near tie where the target's logits of both tokens are closer than rounding moves them; from there on
the texts go their own ways, and both are right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..evaluate.target import Target, read_prompt

TIE_GAPS = {"float32": 1e-3, "bfloat16": 0.25}
"""Logits closer than this may change places: two steps of bfloat16 at 16 to 32; kernels in float32 part by less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """Where an engine's answer leaves ours: index in the answer, both tokens (None: that answer had ended) and the
    target's logit of ours less that of the engine's."""

    prompt: str
    position: int
    ours: int | None
    engine: int | None
    logit_gap: float | None
    is_tie: bool

    def as_dict(self) -> dict[str, Any]:
        own = ("prompt", "position", "ours", "engine", "logit_gap", "is_tie")
        return {name: getattr(self, name) for name in own}

    def text(self) -> str:
        where = f"  {self.prompt}, answer token {self.position}: ours {self.ours}, the engine's {self.engine}"
        if self.logit_gap is None:
            return f"{where}: {'the engine goes on' if self.ours is None else 'the engine ended before'}"
        return f"{where}, logit gap {self.logit_gap:.3g}{', a near tie' if self.is_tie else ''}"


def parting(
    target: Target, layers: Sequence[int], prompt: tuple[str, Sequence[int]], ours: Sequence[int], engine: Sequence[int]
) -> Parting | None:
    """The first difference of two answers to a prompt (its name and ids), None where they are equal."""
    if list(ours) == list(engine):
        return None
    name, ids = prompt
    shorter = min(len(ours), len(engine))
    place = next((i for i, (a, b) in enumerate(zip(ours, engine)) if a != b), shorter)
    own, its = (answer[place] if place < len(answer) else None for answer in (ours, engine))
    gap = None
    if own is not None and its is not None:
        logits, _ = read_prompt(target.open(layers), [*ids, *ours[:place]])
        gap = float(logits[own] - logits[its])
    is_tie = gap is not None and gap <= TIE_GAPS[target.facts.dtype]
    return Parting(prompt=name, position=place, ours=own, engine=its, logit_gap=gap, is_tie=is_tie)


@dataclass(frozen=True, slots=True)
class Answers:
    """How many answers were compared, and those that part."""

    num_prompts: int
    partings: tuple[Parting, ...]

    @property
    def num_equal(self) -> int:
        return self.num_prompts - len(self.partings)

    @property
    def num_ties(self) -> int:
        return sum(parting.is_tie for parting in self.partings)

    @property
    def agree(self) -> bool:
        return self.num_ties == len(self.partings)

    def as_dict(self) -> Mapping[str, Any]:
        return {
            "num_equal": self.num_equal,
            "num_ties": self.num_ties,
            "partings": [parting.as_dict() for parting in self.partings],
        }
