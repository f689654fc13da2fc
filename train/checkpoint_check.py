"""Whether a checkpoint is whole, and the run's own: checksums, names, shapes, and its place in the run.

Knows what a drafter, an optimizer and the facts of a run ask of it. Each check raises Unfit and changes nothing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..store.frozen import stream_crc32c
from .drafter import Drafter
from .facts import RunFacts
from .loop_state import LoopState, Unfit
from .optim import MasterOptimizer
from .value_rules import is_count, is_object, is_text, is_whole, list_of, object_of, wrong_key

GROUP = object_of({"params": list_of(is_whole)})
OPTIMIZER = {
    "num_steps": is_count,
    "names": list_of(is_text),
    "parts": list_of(object_of({"state": is_object, "param_groups": list_of(GROUP)})),
}
"""What optimizer.pt holds, as `MasterOptimizer.state_dict` gives it."""


def file_checksum(path: Path) -> int:
    """crc32c of a file, read in pieces."""
    with path.open("rb") as file:
        return stream_crc32c(file, path.stat().st_size)


def require_same_bytes(path: Path, checksums: Mapping[str, int] | None) -> None:
    """Raises Unfit unless the file has the bytes that were written; without `checksums` there is nothing to tell by."""
    if checksums is not None and (found := file_checksum(path)) != checksums.get(path.name):
        raise Unfit(f"{path.name} has crc32c {found}, state.json says {checksums.get(path.name)!r}")


def require_masters(weights: Mapping[str, Tensor]) -> None:
    """Refuses a tensor of another number format: loading it would round it without a word."""
    for name, tensor in weights.items():
        if tensor.dtype != torch.float32:
            raise Unfit(f"{name} is {tensor.dtype}, not torch.float32")


def require_drafter(weights: Mapping[str, Tensor], drafter: Drafter) -> None:
    """Refuses weights of other names or shapes; copying a tensor of another shape would spread it without a word."""
    own = {name: list(parameter.shape) for name, parameter in drafter.named_parameters()}
    if missing := sorted(set(own) - set(weights)):
        raise Unfit(f"{missing[0]} is missing, one of {len(missing)} tensors")
    if strange := sorted(set(weights) - set(own)):
        raise Unfit(f"{strange[0]} is no tensor of the run's drafter")
    for name, shape in own.items():
        if (found := list(weights[name].shape)) != shape:
            raise Unfit(f"{name} has the shape {found}, that of the run's drafter is {shape}")


def require_within(state: LoopState, steps: int) -> None:
    """Refuses a step that the run does not have."""
    if state.step > steps:
        raise Unfit(f"it is of step {state.step}, and the run has {steps} steps")


def require_place(state: LoopState, facts: RunFacts) -> None:
    """Refuses a next row that cannot follow so many steps.

    Passes 0 and 1 are told exactly. A later pass has less than twice the rows of pass 0 and more than half: first-fit
    leaves one row at most that is not more than half full.
    """
    first, trained = facts.rows_per_epoch, state.step * facts.rows_per_step
    before = trained - state.row  # rows of the passes before `epoch`
    most, least = 2 * first + 1, max(1, first // 2)
    if state.epoch == 0:
        is_right = before == 0 and state.row <= first
    else:
        later = state.epoch - 1
        is_right = state.row <= most and first + later * least <= before <= first + later * most
    if not is_right:
        raise Unfit(
            f"state.json has row {state.row} of epoch {state.epoch} behind {state.step} steps of "
            f"{facts.rows_per_step} rows, where a pass has about {first}"
        )


def require_moments(state: Any, optimizer: MasterOptimizer, step: int) -> None:
    """Refuses the state of other parameters, of another step, or without the moments of every parameter."""
    if not is_object(state):
        raise Unfit(f"optimizer.pt holds a {type(state).__name__}")
    if name := wrong_key(state, OPTIMIZER):
        raise Unfit(f"optimizer.pt has no {name}, or one of another form")
    if state["num_steps"] != step:
        raise Unfit(f"optimizer.pt is of step {state['num_steps']}, state.json of step {step}")
    if state["names"] != optimizer.names or len(state["parts"]) != len(optimizer.parts):
        raise Unfit("optimizer.pt is of other parameters than the run's drafter has, or of another optimizer")
    for (own, _), part in zip(optimizer.parts, state["parts"]):
        require_part(part, own, has_moments=step > 0)


def require_part(part: Mapping[str, Any], own: torch.optim.Optimizer, *, has_moments: bool) -> None:
    groups = own.state_dict()["param_groups"]
    if [group["params"] for group in part["param_groups"]] != [group["params"] for group in groups]:
        raise Unfit("optimizer.pt groups its parameters otherwise than the run's optimizer")
    masters = [master for group in own.param_groups for master in group["params"]]
    if set(part["state"]) != set(range(len(masters) if has_moments else 0)):
        raise Unfit(f"optimizer.pt has moments of {len(part['state'])} parameters, not of {len(masters)}")
    for number, found in part["state"].items():
        moments = [value for value in found.values() if isinstance(value, Tensor) and value.dim()]
        shape = masters[number].shape
        if not moments or any(value.shape != shape or value.dtype != torch.float32 for value in moments):
            raise Unfit(f"optimizer.pt has no moments of the shape {list(shape)} for parameter {number} of a part")


def require_fit(
    state: LoopState,
    weights: Mapping[str, Tensor],
    moments: Any,
    *,
    facts: RunFacts,
    drafter: Drafter,
    optimizer: MasterOptimizer,
) -> None:
    """Raises Unfit unless a run can go on from these, whatever else they are."""
    require_within(state, facts.steps)
    require_place(state, facts)
    require_drafter(weights, drafter)
    require_moments(moments, optimizer, state.step)
