"""Where the loop of a run stands, and `state.json`, which says it beside the checksums of a checkpoint.

Knows numbers and their text; no tensor, no torch, and not how a step is made.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ..store.checksum import crc32c
from .value_rules import is_count, is_finite, or_none, wrong_field

CHECKSUMS, STATE = "crc32c", "state"
RULES = {
    **dict.fromkeys(("step", "epoch", "row"), is_count),
    **dict.fromkeys(("best_step", "exam_step"), or_none(is_count)),
    **dict.fromkeys(("acceptance_length", "best_acceptance_length"), or_none(is_finite)),
}


class Unfit(Exception):
    """What is wrong with a checkpoint, in one line; whoever knows its folder names that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopState:
    """Where the loop stands after `step` updates, weights and optimizer aside.

    `epoch` and `row` name the next row to train on, of all ranks; `best_step` is the exam with the largest
    acceptance length so far, None before there was one.
    """

    step: int
    epoch: int
    row: int
    acceptance_length: float | None = None  # of the newest exam
    best_step: int | None = None
    best_acceptance_length: float | None = None
    exam_step: int | None = None  # of the newest exam


def state_json(state: LoopState, checksums: Mapping[str, int] | None) -> bytes:
    """The content of state.json; `checksums` are those of the files beside it, None where they are not known."""
    values = asdict(state)
    if checksums is not None:
        values[CHECKSUMS] = {**checksums, STATE: state_checksum(state)}
    return (json.dumps(values, indent=1) + "\n").encode()


def parse_state(text: str, step: int) -> tuple[LoopState, dict[str, int] | None]:
    """What `state_json` wrote: the state and the checksums of the files, None where an earlier version wrote it.

    `step` is the one that the folder's name says. Raises Unfit for values that no run writes, and ValueError or
    TypeError for another text.
    """
    values = json.loads(text)
    checksums = values.pop(CHECKSUMS, None) if isinstance(values, dict) else None
    state = LoopState(**values)
    if name := wrong_field(state, RULES):
        raise Unfit(f"state.json has {name} {getattr(state, name)!r}")
    if state.step != step:
        raise Unfit(f"state.json is of step {state.step}, the folder's name of step {step}")
    for name in ("best_step", "exam_step"):
        if (value := getattr(state, name)) is not None and value > step:
            raise Unfit(f"state.json has {name} {value}, behind its own step {step}")
    if checksums is None:
        return state, None
    if not isinstance(checksums, dict) or checksums.pop(STATE, None) != state_checksum(state):
        raise Unfit("the numbers of state.json are not those that its checksum is of")
    return state, checksums


def state_checksum(state: LoopState) -> int:
    return crc32c(json.dumps(asdict(state)).encode())
