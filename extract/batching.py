"""Which samples share one forward of the target: a pure function of a group's lengths.

Knows lengths only. Nothing here depends on shards, devices or what was done before, so
the numbers a batch gives, and with them the bytes of the store, never do either.
"""

from collections.abc import Sequence

import numpy as np

LEAST_FILL = 0.75  # shortest over longest sample of a batch


def make_batches(
    lengths: Sequence[int] | np.ndarray, token_budget: int, *, bound: int | None = None
) -> list[np.ndarray]:
    """Batches of sample numbers 0..N-1, longest samples first, each sample in exactly one.

    `lengths` (tokens, at least 1) are sorted and cut where the padded tokens, samples times the
    longest of the batch, would exceed `token_budget`, and where a sample is shorter than
    `LEAST_FILL` of the longest: so no batch pads more than a quarter. A sample longer than the
    budget goes alone. Longest first, so that a batch too big for a device fails at the start. Samples of up to `bound`
    tokens share no batch with longer ones: see `targets.base.length_bound`.
    """
    sizes = np.asarray(lengths, dtype=np.int64)  # [N]
    assert (sizes >= 1).all(), "a sample without tokens to forward"
    order = np.argsort(-sizes, kind="stable")  # [N]
    batches: list[np.ndarray] = []
    start = 0
    while start < len(order):
        longest = int(sizes[order[start]])
        batch = order[start : start + max(1, token_budget // longest)]
        batch = batch[sizes[batch] >= LEAST_FILL * longest]
        if bound is not None and longest > bound:
            batch = batch[sizes[batch] > bound]
        batches.append(batch)
        start += len(batch)
    return batches


def in_turns(batches: list[np.ndarray]) -> list[np.ndarray]:
    """The order in which they are run: the first, the last, the second, the last but one, ...

    Short samples make small batches, through which the device is before the host has sent them whole. Behind a large
    one it has something to do meanwhile; several in a row, or one at the end, would leave it idle.
    """
    return [batches[i // 2] if i % 2 == 0 else batches[-1 - i // 2] for i in range(len(batches))]


def padded_tokens(lengths: Sequence[int] | np.ndarray, batches: Sequence[np.ndarray]) -> int:
    """Tokens the target is run on: samples times the longest, summed over the batches."""
    sizes = np.asarray(lengths, dtype=np.int64)  # [N]
    return sum(len(batch) * int(sizes[batch].max()) for batch in batches)
