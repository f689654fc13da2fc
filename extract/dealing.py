"""What a worker of `extract` and its launcher say to each other. Plain values, so they pickle; knows no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a worker is told at its start; everything that is the store's identity stands in the store."""

    store_dir: str
    target: str
    """Where it lies on this machine; which one it is, the store says."""
    device: str
    token_budget: int
    cpu_threads: int
    slow_kernels: bool
    compile: bool
    stall_s: float


@dataclass(frozen=True, slots=True)
class Note:
    """Told once the target is loaded: a line for the user; the same one from all workers is shown once."""

    text: str


@dataclass(frozen=True, slots=True)
class WantsFrozenWork:
    """Asked once, with the target loaded; True says: write the frozen parts."""


@dataclass(frozen=True, slots=True)
class WantsGroup:
    """Asked for each group; the reply is a Group, or None when there is no more."""


@dataclass(frozen=True, slots=True)
class Group:
    """Segments whose samples are batched together, and those of them that are still to be written."""

    segments: range
    wanted: frozenset[int]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Told after each batch: recorded positions on their way to the disk, not yet committed."""

    num_positions: int
    waited_s: float = 0.0
    """How long this batch waited for the writer: every slot of the ring was full."""


@dataclass(frozen=True, slots=True)
class CheckedAgain:
    """Told after a sample was run a second time, alone: its tokens, and whether it is now marked as failed."""

    num_tokens: int
    has_failed: bool


@dataclass(frozen=True, slots=True)
class Halved:
    """Told when a forward did not fit the device's memory: the worker goes on with smaller batches."""

    device: str
    token_budget: int
    """From now on, padded tokens."""
    detail: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """Told when the target is run in a shape that is compiled for it: how many there are by now."""

    device: str
    num_shapes: int
