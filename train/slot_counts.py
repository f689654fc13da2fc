"""How often each slot of a block was right, and how often all up to it were: counts, and their numbers by name.

Teacher-forced: blocks start at anchors of recorded text, whatever was drafted before them. Plain numbers; no tensor.
"""

from collections.abc import Sequence

import numpy as np


class SlotCounts:
    """Counts over blocks for slots 1..B-1, that of slot k at k-1; `blocks` is how many blocks there were.

    A slot is labelled while every token since the anchor is trained on and of its sample. `survived` counts blocks
    whose slots 1..k are all labelled and right.
    """

    def __init__(self, block_size: int) -> None:
        self.right, self.labelled, self.survived = (np.zeros(block_size - 1, np.int64) for _ in range(3))
        self.blocks = 0

    def add(self, right: np.ndarray, reach: np.ndarray) -> None:
        """Blocks whose drafts were right or not [n, B-1] bool, and how many labelled slots each has [n], 1 or more."""
        labelled = np.arange(1, right.shape[1] + 1) <= reach[:, None]  # [n, B-1]
        right = right & labelled
        self.right += right.sum(0)
        self.labelled += labelled.sum(0)
        self.survived += np.logical_and.accumulate(right, axis=1).sum(0)
        self.blocks += len(right)

    def merge(self, other: "SlotCounts") -> None:
        """Adds what another exam counted, on other samples."""
        self.right += other.right
        self.labelled += other.labelled
        self.survived += other.survived
        self.blocks += other.blocks

    def numbers(self, prefix: str) -> dict[str, float]:
        """See `slot_numbers`; every name begins with `prefix`. Empty where there was no block."""
        if not self.blocks:
            return {}
        found = slot_numbers(self.right.tolist(), self.labelled.tolist(), self.survived.tolist(), self.blocks)
        return {f"{prefix}{name}": value for name, value in found.items()}


def slot_numbers(
    right: Sequence[float], labelled: Sequence[float], survived: Sequence[float], blocks: float
) -> dict[str, float]:
    """The numbers of `SlotCounts`, whose counts these are.

    accuracy: right slots over labelled ones, all of them, and slot by slot. survival_slot_K: share of all blocks whose
    first K drafts are all right; over K they add up to the accepted drafts, and one more is the bonus token.
    """
    accepted = sum(survived) / blocks
    return {
        "accuracy": sum(right) / sum(labelled),
        "accepted_drafts_teacher_forced": accepted,
        "acceptance_length_teacher_forced": accepted + 1.0,
        **{f"accuracy_slot_{k}": hits / n for k, (hits, n) in enumerate(zip(right, labelled), start=1) if n},
        **{f"survival_slot_{k}": n / blocks for k, n in enumerate(survived, start=1)},
    }
