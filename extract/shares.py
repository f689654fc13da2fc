"""What one launcher records: the segments that fit the budget, and of their groups the share of its own shards.

Pure functions of the plan and of what the user typed. The plan is always that of all samples, in the order of their
content: a budget takes its first segments, so a larger one takes the same and more, and nothing is moved or redone.
"""

from bisect import bisect_right

import numpy as np

from .. import UserError
from ..store.geometry import states_bytes
from ..store.manifest import Manifest
from ..store.size import human_bytes, parse_size
from .plan import Plan, make_groups


def num_fitting(plan: Plan, manifest: Manifest, budget: str | None) -> int:
    """How many of the first segments fit a budget for the files in `hidden` and `last`; all without one.

    With a codec that compresses the most they may take counts, since no one knows less before they are written.
    Raises UserError where not even one fits.
    """
    if budget is None:
        return plan.num_segments

    def first_bytes(count: int) -> int:
        return segments_bytes(plan, manifest, range(count))

    fits = bisect_right(range(plan.num_segments + 1), parse_size(budget), key=first_bytes) - 1
    if not fits and plan.num_segments:
        least = first_bytes(1)
        raise UserError(
            f"budget = {budget!r} holds no segment; the first one takes {human_bytes(least)} ({least} bytes)",
            "room for at least one segment: a budget takes whole ones",
            "raise --budget",
        )
    return fits


def segments_bytes(plan: Plan, manifest: Manifest, segments: range) -> int:
    """Bytes of the files of neighbouring segments, at most with a codec that compresses."""
    first, last = np.searchsorted(plan.column("segment"), [segments.start, segments.stop])
    return states_bytes(manifest, plan.column("n")[first:last], len(segments))


def own_groups(num_segments: int, num_asked: int, shards: int, only: tuple[int, ...] | None) -> list[range]:
    """The groups that this launcher records, up to the segments asked for.

    Groups are those of the whole plan, since they decide the last bits of a state. With `only` each shard has an equal
    stretch of them: shard i of W has groups i * G / W to (i + 1) * G / W.
    """
    groups = [group for group in make_groups(num_segments) if group.start < num_asked]
    if only is None:
        return groups
    count = len(groups)
    return [group for i in only for group in groups[i * count // shards : (i + 1) * count // shards]]


def joined(groups: list[range], num_asked: int) -> list[range]:
    """The segments of groups in order, up to those asked for, as few ranges."""
    found: list[range] = []
    for group in sorted(groups, key=lambda group: group.start):
        stop = min(group.stop, num_asked)
        if found and found[-1].stop == group.start:
            found[-1] = range(found[-1].start, stop)
        else:
            found.append(range(group.start, stop))
    return found
