"""What becomes of a sample that is too long, and which samples are worth keeping. Pure functions of ids and mask."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..store.samples import MadeSample, made_sample
from .chats.chat import Sample
from .lines.inputs import LeftOut


@dataclass(frozen=True, slots=True)
class LengthRules:
    """The settings `longest` (tokens), `long` ('end', 'turn' or 'drop') and `min_trained` (tokens)."""

    longest: int
    long: str
    min_trained: int


@dataclass(frozen=True, slots=True)
class Uncut:
    """ids [S] and mask [S] of a line that was tokenized before, as lists or arrays."""

    ids: Sequence[int] | np.ndarray
    mask: Sequence[bool] | np.ndarray

    @property
    def ends(self) -> list[int]:
        """The number of tokens up to the end of each run that is trained on: of such a line, its answers."""
        trained = np.asarray(self.mask, dtype=bool)  # [S]
        return (np.flatnonzero(trained & ~np.append(trained[1:], False)) + 1).tolist()


@dataclass(slots=True, eq=False)
class CutSample:
    """What is kept of a sample that had `num_given` tokens, and what is counted of it."""

    made: MadeSample
    num_given: int
    num_trained: int

    @property
    def is_cut(self) -> bool:
        return len(self.made.ids) < self.num_given


def cut(sample: Sample | Uncut, rules: LengthRules) -> CutSample:
    """The sample within the rules. Raises LeftOut with the rule that it breaks.

    'end' keeps the first `longest` tokens; 'turn' those up to the last answer that ends within them; 'drop' keeps
    no longer sample. A tail without a trained token costs nothing: it is not recorded.
    """
    size = len(sample.ids)
    if size > rules.longest and rules.long == "drop":
        raise LeftOut("too long", f"{size} tokens, at most {rules.longest}")
    kept = min(size, rules.longest)
    if size > rules.longest and rules.long == "turn":
        kept = max((end for end in sample.ends if end <= rules.longest), default=0)
        if not kept:
            first = min(sample.ends, default=size)
            raise LeftOut("no turn fits", f"the first answer ends at token {first}, the longest has {rules.longest}")
    ids = np.asarray(sample.ids[:kept], dtype="<u4")  # [S]
    mask = np.asarray(sample.mask[:kept], dtype=bool)  # [S]
    num_trained, is_cut = int(np.count_nonzero(mask)), kept < size
    after = f" in the first {kept} of {size}" if is_cut else f" of {size}"
    if num_trained < rules.min_trained:
        reason = "too few tokens to train on after the cut" if is_cut else "too few tokens to train on"
        raise LeftOut(reason, f"{num_trained}{after}, at least {rules.min_trained} (min_trained)")
    made = made_sample(ids, mask)
    if not made.num_anchors:
        raise LeftOut("no anchor", f"no two of {num_trained} trained tokens{after} are neighbours")
    return CutSample(made, size, num_trained)
