"""One batch between the device and the writer: what is wanted of it, where it is, and what is found of its states.

Knows tensors, samples' places and statuses; runs no target and waits for nothing.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from ..store.index import STATUS_FAILED, STATUS_NON_FINITE, STATUS_OK
from .copying import Mark, SideStream
from .soundness import Alone, has_zero_state, is_finite
from .writing import Entry

MEASURED_EVERY = 101  # positions; a prime, so that no place in a chunk or a sample is preferred


@dataclass(slots=True)
class Again:
    """A sample that was run a second time, alone, and its states from the batch: taps [Lt, n, H], last [n, H]."""

    alone: Alone
    taps: torch.Tensor
    last: torch.Tensor | None

    @classmethod
    def of(cls, alone: Alone, taps: torch.Tensor, last: torch.Tensor | None, place: int) -> "Again":
        """The sample at a place of a batch: taps [Lt, N, S, H], last [N, S, H]."""
        n = len(alone.ids)
        return cls(alone, taps[:, place, :n], None if last is None else last[place, :n])


@dataclass(slots=True)
class Sent:
    """A batch that was sent to the device: what is wanted of it, and what is computed of it."""

    batch: np.ndarray
    """Rows of the plan [N]."""
    wanted: np.ndarray
    """Places in the batch."""
    rows: torch.Tensor
    """Encoded states [Lt (+1), N, S, row_bytes] u8, on the device."""
    peaks: torch.Tensor
    """The largest magnitude of each state [Lt (+1), N, S] fp32, on the device."""
    errors: torch.Tensor | None
    """Of the measured positions of all wanted samples [Lt (+1), M] fp64, on the device."""
    num_measured: list[int]
    again: dict[int, Again]
    """By place in the batch."""
    computed: Mark


def recorded_part(states: torch.Tensor, first: np.ndarray, n: np.ndarray, side: SideStream) -> torch.Tensor:
    """States [Lt, N, longest n, H] of the tokens first .. first + n - 1 [N] of states [Lt, N, S, H].

    What lies behind a sample's n is padding: repetitions of its last state in the batch.
    """
    if not first.any():
        return states
    places = first[:, None].astype(np.int64) + np.arange(int(n.max()))  # [N, longest n]
    index = side.upload(np.minimum(places, states.shape[2] - 1))
    return states[:, torch.arange(len(n), device=states.device)[:, None], index]


def with_errors(entries: list[Entry], errors: torch.Tensor | None, num_measured: list[int]) -> tuple[Entry, ...]:
    """The entries with the errors [Lt (+1), M] that were measured of them, so many of each; of sound ones only."""
    if errors is None:
        return tuple(entries)
    parts = np.split(errors.numpy(), np.cumsum(num_measured)[:-1], axis=1)  # each [Lt (+1), M]
    return tuple(
        replace(entry, errors=part.reshape(-1) if entry.status == STATUS_OK else part[:, :0].reshape(-1))
        for entry, part in zip(entries, parts)
    )


def measured_places(position: int, n: int) -> np.ndarray:
    """Which of a sample's n recorded positions are measured: every 101st of the segment, whoever records it."""
    return np.arange((MEASURED_EVERY // 2 - position) % MEASURED_EVERY, n, MEASURED_EVERY)


def status_of(peak: np.ndarray) -> int:
    """The status of a sample from the largest absolute value of each of its states, [Lt, n]."""
    if not is_finite(peak):
        return STATUS_NON_FINITE
    return STATUS_FAILED if has_zero_state(peak) else STATUS_OK
