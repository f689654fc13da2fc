"""A run that starts from the weights of another drafter: a folder in z-lab's format or that of speculators.

What fits together is settled here before a run exists; the weights are read once, at its step 0. Knows
folders, configs and facts; no store and no training loop.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import UserError
from .config import DrafterConfig
from .export.folders import DrafterFolder, read_drafter_folder, read_folder
from .export.tensors import tensors_sha256
from .kinds import named_layers
from .spec import DrafterSpec, choose_layout, choose_mask_token

QUIRKS = {"embedding_scale": 1.0, "output_multiplier": 1.0, "logit_softcap": None}  # of a target, and their absence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WarmStart:
    """Where a run's first weights come from: the folder as given, its absolute path, and its tensors' sha256."""

    folder: str
    path: str
    sha256: str


def read_start(folder: str, target: Mapping[str, Any]) -> tuple[WarmStart, DrafterSpec]:
    """The folder's identity and its drafter. Raises UserError as `read_folder`, and for another target."""
    path = Path(folder).absolute()
    found = read_folder(path)
    return WarmStart(folder=folder, path=str(path), sha256=tensors_sha256(path)), completed(found, target)


def completed(folder: DrafterFolder, target: Mapping[str, Any]) -> DrafterSpec:
    """The folder's spec; where it does not say how many layers its target has, the store's target does."""
    if "num_layers" in folder.target:
        return folder.spec
    return dataclasses.replace(folder.spec, num_target_layers=target["num_layers"])


def load_start(start: WarmStart) -> dict[str, Tensor]:
    """The folder's weights, fp32. Raises UserError where it is gone or no longer what the run was started from."""
    path = Path(start.path)
    _, tensors = read_drafter_folder(path)
    found = tensors_sha256(path)
    if found != start.sha256:
        raise UserError(
            f"the tensors of {start.path!r} have sha256 {found[:12]}, the run was started on {start.sha256[:12]}",
            "the weights that the run was started from, since it has no checkpoint yet",
            "bring them back, or train into another --out",
        )
    return {name: tensor.to(torch.float32) for name, tensor in tensors.items()}


def continued_spec(
    config: DrafterConfig, start: DrafterSpec, target: Mapping[str, Any], tap_layers: Sequence[int]
) -> DrafterSpec:
    """The spec of `start`, with the block size and the layout that the config gives on purpose.

    `target` is TargetFacts as a plain dict, `tap_layers` are the store's. Raises UserError, naming both values,
    where another setting is given than the drafter has, and where the drafter was made for another target.
    """
    require_own_shape(config, start)
    require_same_target(start, target, tap_layers)
    choose_mask_token(start.mask_token_id, target)
    return dataclasses.replace(
        start, block_size=config.block_size or start.block_size, attention=choose_layout(config, start).attention()
    )


def require_own_shape(config: DrafterConfig, start: DrafterSpec) -> None:
    """Refuses a setting that the weights contradict."""
    given = {
        "num_layers": config.num_layers,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "mask_token_id": config.mask_token_id,
        "tap_layers": config.taps,
    }
    if config.layer_types is not None and config.num_layers is None:
        given["num_layers"] = len(named_layers(config.layer_types))
    for name, value in given.items():
        if value is not None and value != getattr(start, name):
            field = "taps" if name == "tap_layers" else name
            raise UserError(
                f"drafter.{field} = {shown(value)}, and the drafter of drafter.init has {shown(getattr(start, name))}",
                "the shape that its weights have; only block_size, layer_types, window and causal may differ",
                f"leave drafter.{field} out, or start from random weights without drafter.init",
            )


def require_same_target(start: DrafterSpec, target: Mapping[str, Any], tap_layers: Sequence[int]) -> None:
    """Refuses a drafter whose target cannot be the store's."""
    pairs = {name: (getattr(start, name), target[name]) for name in ("hidden_size", "vocab_size")}
    pairs["number of target layers"] = (start.num_target_layers, target["num_layers"])
    pairs |= {name: (getattr(start, name), target.get(name, absent)) for name, absent in QUIRKS.items()}
    faults = [f"{name} {shown(own)}, not {shown(its)}" for name, (own, its) in pairs.items() if own != its]
    if not set(start.tap_layers) <= set(tap_layers):
        faults.append(f"taps {shown(start.tap_layers)}, and the store holds {shown(tap_layers)}")
    if faults:
        raise UserError(
            f"the drafter of drafter.init was made for another target or other taps: {'; '.join(faults)}",
            "a drafter of the store's target, with taps that the store holds",
            "give another drafter.init, or record a store with its target and taps",
        )


def shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, (tuple, list)) else str(value)
