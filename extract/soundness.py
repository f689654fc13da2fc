"""Whether recorded states can be what they claim to be: finite, not zero, nobody's copy, alone as in a batch.

Knows tensors and numbers; no store, and of a target no more than `record`, `run_whole` and `logits`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from .. import UserError

if TYPE_CHECKING:
    from .targets.hf import HfTarget

TOLERANCE = {"float32": 1e-5, "bfloat16": 0.05}
"""Largest relative L2 error of a position's state, alone against in a batch; see `tolerance`. In bfloat16 the
share `LOOSE_SHARE` of the positions may exceed it: other matrix shapes round differently."""
LAYER_ERROR = 12**0.5 * 2.0**-8
"""What a layer adds in bfloat16: some six roundings to 8 bits in each of the two runs, independent of one another."""
LOOSE_SHARE = {"float32": 0.0, "bfloat16": 0.05}
TIE = {"float32": 1e-3, "bfloat16": 0.05}
"""How far the target's own logit of our top token may lie below its largest, as a share of the largest magnitude."""
CAUSAL_TOKENS = 64  # of a sample that is tried with another second half
HEAD_PLACES = 64  # positions of a sample at which the head is applied; all of its logits would not fit


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with the states of a sample, in the three lines of a UserError."""

    happened: str
    expected: str
    advice: str

    def as_error(self) -> UserError:
        return UserError(self.happened, self.expected, self.advice)


def peaks(states: torch.Tensor) -> np.ndarray:
    """The largest absolute value of each state, NaN and infinity kept: [..., S, H] -> [..., S] fp32."""
    return peaks_there(states).cpu().numpy()


def peaks_there(states: torch.Tensor) -> torch.Tensor:
    """The same, left on the device."""
    return torch.linalg.vector_norm(states, ord=float("inf"), dim=-1).float()


def is_finite(peak: np.ndarray) -> bool:
    return bool(np.isfinite(peak).all())


def has_zero_state(peak: np.ndarray) -> bool:
    return bool((peak == 0).any())


def check_target(
    target: "HfTarget", ids: torch.Tensor, lengths: torch.Tensor, tap_layers: Sequence[int], *, last: bool
) -> None:
    """Refuses a target whose batched states are not those of the sample alone, or tell nothing.

    `ids` [N, S] long, right-padded, and `lengths` [N] are a batch as it will be run. Its shortest
    sample that is sound, the one with the most padding, is run again alone, through the whole model. A target that
    is not causal is refused whether or not a sample is padded, see `causal_fault`.
    Raises UserError naming the tap, the error and the tolerance.
    """
    taps, final = target.record(ids, lengths, tap_layers, last=last)
    row = shortest_sound_row(peaks(taps), lengths.tolist())
    n = int(lengths[row])
    own_last = None if final is None else final[row, :n]
    fault = fault_of_sample(target, ids[row, :n], taps[:, row, :n], own_last, tap_layers, with_head=True)
    fault = fault or causal_fault(target, ids[row, :n], tap_layers)
    if fault is not None:
        raise fault.as_error()


def causal_fault(target: "HfTarget", ids: torch.Tensor, tap_layers: Sequence[int]) -> Fault | None:
    """What is wrong where a state depends on the tokens behind it: one short forward of two rows with other ends.

    The first tokens of a sample of ids [n], and the same with other tokens in their second half: of a causal target,
    recurrent or not, the states of the half that they share are the same. Two rows of one length in one batch have
    the same rotary angles (longrope) and the same kernels. A sample of one token is tried before two different ones.
    """
    own = ids[:CAUSAL_TOKENS]  # [m]
    if len(own) == 1:
        own = own.repeat(2)
    shared = len(own) // 2 | 1  # odd, so that no chunk of a layer ends there
    other = torch.cat([own[:shared], (own[shared:] + 1) % target.facts.vocab_size])  # [m]
    taps, _ = target.record(torch.stack([own, other]), torch.tensor([len(own)] * 2), tap_layers)  # [Lt, 2, m, H]
    for index, layer in enumerate(tap_layers):
        error = relative_error(taps[index, 1, :shared], taps[index, 0, :shared])
        most = tolerance(kind_of(taps), layer + 1)
        if not error <= most:
            return Fault(
                f"the target is not causal: tap {layer} of the first {shared} tokens of a sample changes with the "
                f"tokens behind them, relative error {error:.2g}",
                f"states that depend on no later token, at most {most:.2g}",
                "correct config.json where it asks for attention to both sides (like use_bidirectional_attention), or "
                "choose another target",
            )
    return None


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


def fault_of_sample(
    target: "HfTarget",
    ids: torch.Tensor,
    taps: torch.Tensor,
    last: torch.Tensor | None,
    tap_layers: Sequence[int],
    *,
    with_head: bool,
) -> Fault | None:
    """What is wrong with states as they were recorded in a batch, taps [Lt, n, H] and last [n, H], of ids [n].

    The sample is run again alone and unpadded: through the whole model `with_head`, which also takes the head of the
    last state (that of the run alone where none was recorded), else through the layers that are recorded.
    """
    return fault_against(target, run_alone(target, ids, tap_layers, with_head=with_head), taps, last, tap_layers)


@dataclass(frozen=True, slots=True)
class Alone:
    """A sample of ids [n] run by itself, unpadded: taps [Lt, n, H], and through the whole model the last state too."""

    ids: torch.Tensor
    taps: torch.Tensor
    last: torch.Tensor | None = None
    """[n, H]"""
    logits: torch.Tensor | None = None
    """[m, V] fp32 at `places` [m]."""
    places: torch.Tensor | None = None


def run_alone(target: "HfTarget", ids: torch.Tensor, tap_layers: Sequence[int], *, with_head: bool) -> Alone:
    """Sends the sample to the device, without waiting for it where no head is asked for."""
    if not with_head:
        taps, _ = target.record(ids[None], torch.tensor([len(ids)]), tap_layers)
        return Alone(ids, taps[:, 0])
    places = torch.linspace(0, len(ids) - 1, min(len(ids), HEAD_PLACES)).long()  # [m]
    return Alone(ids, *target.run_whole(ids, tap_layers, places), places)


def fault_against(
    target: "HfTarget", alone: Alone, taps: torch.Tensor, last: torch.Tensor | None, tap_layers: Sequence[int]
) -> Fault | None:
    """What is wrong with taps [Lt, n, H] and last [n, H], recorded in a batch, against the sample alone."""
    fault = first_fault(taps_faults(taps, alone.taps, alone.ids, tap_layers))
    if alone.last is None or alone.logits is None or alone.places is None:
        assert last is None, "a recorded last state is checked with the head"
        return fault
    seen = alone.last if last is None else last
    return (
        fault
        or difference("the last state", target.facts.num_layers, seen, alone.last)
        or head_fault(alone.logits, target.logits(seen[alone.places]), str(alone.taps.dtype))
    )


def first_fault(faults: Iterator[Fault | None]) -> Fault | None:
    return next((fault for fault in faults if fault is not None), None)


def taps_faults(
    taps: torch.Tensor, alone: torch.Tensor, ids: torch.Tensor, tap_layers: Sequence[int]
) -> Iterator[Fault | None]:
    """Faults of taps [Lt, n, H] recorded in a batch against those of the sample alone [Lt, n, H]."""
    for index, layer in enumerate(tap_layers):
        yield difference(f"tap {layer}", layer + 1, taps[index], alone[index])
    yield telling_fault(taps, tap_layers, has_distinct_ids=bool((ids != ids[0]).any()))


def tolerance(dtype: str, num_layers: int) -> float:
    """What the states behind so many layers may differ by, alone against in a batch.

    In bfloat16 errors of layers add up like independent ones, LAYER_ERROR * sqrt(num_layers). Random hybrids of 64
    layers were measured: 0.0081 to 0.0103 times the root in bfloat16 against float32, and at the widths of a 27B
    0.0076 times it in a batch against alone. What is wrong, a mask say, differs by several tenths.
    """
    return TOLERANCE[dtype] if dtype == "float32" else max(TOLERANCE[dtype], LAYER_ERROR * num_layers**0.5)


def relative_error(batched: torch.Tensor, alone: torch.Tensor) -> float:
    """Of states [n, H], the relative L2 error that all positions but the share `LOOSE_SHARE` keep within."""
    reference = torch.linalg.vector_norm(alone.float(), dim=-1)  # [n]
    error = torch.linalg.vector_norm(batched.float() - alone.float(), dim=-1) / reference  # [n]
    return float(torch.quantile(error, 1.0 - LOOSE_SHARE[kind_of(alone)]))


def kind_of(states: torch.Tensor) -> str:
    """The dtype's name as the tables above have it."""
    return str(states.dtype).removeprefix("torch.")


def difference(name: str, num_layers: int, batched: torch.Tensor, alone: torch.Tensor) -> Fault | None:
    """Compares states [n, H] of one sample behind so many layers, run in a batch and run alone."""
    advice = "compare config.json with the model's own, and report this target"
    if batched.shape != alone.shape:
        return Fault(f"{name} of a sample has shape {list(batched.shape)}", f"{list(alone.shape)}", advice)
    kind = kind_of(alone)
    error, most = relative_error(batched, alone), tolerance(kind, num_layers)
    if error <= most:
        return None
    return Fault(
        f"{name} of a sample differs between its batch and the sample alone: relative error {error:.2g}",
        f"at most {most:.2g} in {kind} behind {num_layers} layers",
        advice,
    )


def telling_fault(taps: torch.Tensor, tap_layers: Sequence[int], *, has_distinct_ids: bool) -> Fault | None:
    """What makes finite taps [Lt, n, H] of one sample tell nothing: constant, or one another's copy."""
    for index, layer in enumerate(tap_layers):
        found = ""
        if bool((taps[index] == taps[index, 0, 0]).all()):
            found = "one constant"
        elif has_distinct_ids and bool((taps[index] == taps[index, 0]).all()):
            found = "the same at every position"
        for other in range(index):
            if torch.equal(taps[index], taps[other]):
                found = f"identical to tap {tap_layers[other]}"
        if found:
            return Fault(
                f"tap {layer} of the target is {found}",
                "states that differ by layer and token",
                "check the target's weights, or record other taps",
            )
    return None


def head_fault(own: torch.Tensor, ours: torch.Tensor, dtype: str) -> Fault | None:
    """Whether our logits [m, V] of the last state have the top token of the target's own [m, V], ties excepted."""
    tie = TIE[dtype.removeprefix("torch.")]
    best, chosen = own.argmax(-1), ours.argmax(-1).to(own.device)  # [m]
    gap = (own.gather(-1, best[:, None]) - own.gather(-1, chosen[:, None]))[:, 0]  # [m]
    is_wrong = (best != chosen) & ~(gap <= tie * own.abs().amax(-1))  # [m]
    if not bool(is_wrong.any()):
        return None
    return Fault(
        f"the head of the normed last state names another top token than the target at {int(is_wrong.sum())} of "
        f"{len(best)} positions",
        f"the target's own top token, or one within {tie:g} of the largest logit",
        "check the target's weights and config.json, and report this target",
    )
