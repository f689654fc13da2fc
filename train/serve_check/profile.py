"""How far drafts were accepted, position by position, and when two such profiles agree.

Pure data. A cycle counts every leading draft that is the target's choice, also those behind the end of the text: so
do serving engines, which learn of the end later. `dflash evaluate` leaves these out: its numbers are a little lower.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Profile:
    """`accepted[k-1]` of `num_cycles` cycles accepted at least their first k drafts, k = 1 .. block_size - 1."""

    num_cycles: int
    accepted: tuple[int, ...]

    @staticmethod
    def of(cycles: Iterable[int], num_drafts: int) -> "Profile":
        """From the accepted drafts of each cycle, 0 .. num_drafts."""
        counts = list(cycles)
        return Profile(len(counts), tuple(sum(count >= k for count in counts) for k in range(1, num_drafts + 1)))

    @property
    def acceptance_length(self) -> float:
        """1 + accepted drafts / cycles; 1 without a cycle."""
        return 1.0 + sum(self.accepted) / self.num_cycles if self.num_cycles else 1.0

    @property
    def shares(self) -> list[float]:
        """Entry k-1: share of cycles that accepted at least the first k drafts."""
        return [count / self.num_cycles if self.num_cycles else 0.0 for count in self.accepted]

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_cycles": self.num_cycles,
            "accepted": list(self.accepted),
            "acceptance_length": self.acceptance_length,
            "per_position": self.shares,
        }


def relative_error(found: Profile, expected: Profile) -> float:
    """Of the acceptance length."""
    return abs(found.acceptance_length - expected.acceptance_length) / expected.acceptance_length


def distance(found: Profile, expected: Profile) -> float:
    """The larger of `relative_error` and of the largest difference of a position's shares."""
    shares = [abs(a - b) for a, b in zip(found.shares, expected.shares, strict=True)]
    return max([relative_error(found, expected), *shares])
