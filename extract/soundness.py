"""Whether recorded states can be what they claim to be: finite, not zero, nobody's copy, alone as in a batch.

Knows tensors and numbers; no store, and of a target no more than its `record`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from .. import UserError

if TYPE_CHECKING:
    from .targets.hf import HfTarget

TOLERANCE = {"float32": 1e-5, "bfloat16": 0.05}
"""Largest relative L2 error of a position's state, alone against in a batch. In bfloat16 the
share `LOOSE_SHARE` of the positions may exceed it: other matrix shapes round differently."""
LOOSE_SHARE = {"float32": 0.0, "bfloat16": 0.05}


def peaks(states: torch.Tensor) -> np.ndarray:
    """The largest absolute value of each state, NaN and infinity kept: [..., S, H] -> [..., S] fp32."""
    return torch.linalg.vector_norm(states, ord=float("inf"), dim=-1).float().cpu().numpy()


def is_finite(peak: np.ndarray) -> bool:
    return bool(np.isfinite(peak).all())


def has_zero_state(peak: np.ndarray) -> bool:
    return bool((peak == 0).any())


def check_target(
    target: "HfTarget", ids: torch.Tensor, lengths: torch.Tensor, tap_layers: Sequence[int], *, last: bool
) -> None:
    """Refuses a target whose batched states are not those of the sample alone, or tell nothing.

    `ids` [N, S] long, right-padded, and `lengths` [N] are a batch as it will be run. Its shortest
    sample that is sound, the one with the most padding, is run again alone and unpadded.
    Raises UserError naming the tap, the error and the tolerance.
    """
    taps, final = target.record(ids, lengths, tap_layers, last=last)
    row = shortest_sound_row(peaks(taps), lengths.tolist())
    n = int(lengths[row])
    alone, alone_final = target.record(ids[row : row + 1, :n], lengths[row : row + 1], tap_layers, last=last)
    for index, layer in enumerate(tap_layers):
        check_alike(f"tap {layer}", taps[index, row, :n], alone[index, 0])
    if final is not None and alone_final is not None:
        check_alike("the last state", final[row, :n], alone_final[0])
    check_telling(alone[:, 0], tap_layers, has_distinct_ids=bool((ids[row, :n] != ids[row, 0]).any()))


def shortest_sound_row(peak: np.ndarray, lengths: Sequence[int]) -> int:
    """The row to look at: one bad sample says nothing against the target, a batch of them does."""
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        own = peak[:, row, : lengths[row]]  # [Lt, n]
        if is_finite(own) and not has_zero_state(own):
            return row
    raise UserError(
        f"the target's states are zero or not finite in all {len(lengths)} samples of the first batch",
        "finite states",
        "check the target's weights, or give another --set dtype",
    )


def check_alike(name: str, batched: torch.Tensor, alone: torch.Tensor) -> None:
    """Compares states [n, H] of one sample, run in a batch and run alone."""
    kind = str(alone.dtype).removeprefix("torch.")
    reference = torch.linalg.vector_norm(alone.float(), dim=-1)  # [n]
    error = torch.linalg.vector_norm(batched.float() - alone.float(), dim=-1) / reference  # [n]
    worst = float(torch.quantile(error, 1.0 - LOOSE_SHARE[kind]))
    if not worst <= TOLERANCE[kind]:
        raise UserError(
            f"{name} of a sample differs between its batch and the sample alone: relative error {worst:.2g}",
            f"at most {TOLERANCE[kind]:g} in {kind}",
            "record samples one by one with --token-budget 1, and report this target",
        )


def check_telling(taps: torch.Tensor, tap_layers: Sequence[int], *, has_distinct_ids: bool) -> None:
    """Refuses sound taps [Lt, n, H] of one sample that are constant, or one another's copy."""
    for index, layer in enumerate(tap_layers):
        fault = ""
        if bool((taps[index] == taps[index, 0, 0]).all()):
            fault = "one constant"
        elif has_distinct_ids and bool((taps[index] == taps[index, 0]).all()):
            fault = "the same at every position"
        for other in range(index):
            if torch.equal(taps[index], taps[other]):
                fault = f"identical to tap {tap_layers[other]}"
        if fault:
            raise UserError(
                f"tap {layer} of the target is {fault}",
                "states that differ by layer and token",
                "check the target's weights, or record other taps",
            )
