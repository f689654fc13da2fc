"""What an exam examines: a run's checkpoint, or a drafter's folder, which knows less of where it comes from.

Knows runs and folders; no target and no store is opened here.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ... import UserError
from ..checkpoint import find_step, load_drafter
from ..drafter import Drafter
from ..export.folders import DrafterFolder, is_run, read_drafter_folder, read_folder, require_run_for_checkpoint
from ..facts import RunFacts
from ..order import ALL
from ..spec import DrafterSpec
from .config import EvaluateConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderFacts:
    """What stands in for a run's facts where a folder is examined; `target` holds only what the folder knows."""

    spec: DrafterSpec
    target: Mapping[str, Any]
    store_path: str = ""
    segments: str = ALL
    store: Mapping[str, Any] = field(default_factory=lambda: {"data": {}, "plan_sha256": None})


Facts = RunFacts | FolderFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """A drafter in evaluation mode, its facts, and the step of the run that it is; None of a folder."""

    drafter: Drafter
    facts: Facts
    step: int | None


def load_examined(
    path: Path, config: EvaluateConfig, device: torch.device | str, dtype: torch.dtype | None = None
) -> Examined:
    """The drafter of a run or of a folder; `dtype` None is the run's own, or that of the folder's tensors.

    Raises UserError as `load_drafter` and `read_folder`; for a folder also where the config does not say what a run
    would know: where the result goes, the target, the prompts.
    """
    if is_run(path):
        step = find_step(path, config.checkpoint)
        drafter, facts = load_drafter(path, str(step), device, dtype)
        return Examined(drafter=drafter, facts=facts, step=step)
    require_run_for_checkpoint(path, config)
    require_given(read_folder(path), config)
    folder, tensors = read_drafter_folder(path)
    drafter = Drafter(folder.spec)
    drafter.load_state_dict(tensors)
    drafter = drafter.to(device, dtype or getattr(torch, folder.dtype)).eval()
    return Examined(drafter=drafter, facts=FolderFacts(spec=folder.spec, target=folder.target), step=None)


def require_given(folder: DrafterFolder, config: EvaluateConfig) -> None:
    """Raises UserError where neither the config nor the folder says what the exam needs."""
    shown = f"the drafter's folder {str(folder.path)!r}"
    if config.out is None:
        raise UserError(
            f"{shown} is not written into, and no other place is given for the result",
            "a file for the result: a folder from elsewhere stays as it is",
            "name one with --out",
        )
    if not config.offline and config.target is None and "name" not in folder.target:
        raise UserError(
            f"{shown} does not say for which target it drafts", "a target to decode with", "name it with --target"
        )
    if config.store is None and (config.offline or config.prompts is None):
        raise UserError(
            f"{shown} knows no store with held-out samples",
            "a store" if config.offline else "prompts, or a store with held-out samples",
            "give --store" if config.offline else "give --prompts or --store",
        )


def require_taps_in_range(spec: DrafterSpec, num_layers: int, where: str) -> None:
    """Raises UserError where a tap is not one of the target's layers, or its last one."""
    outside = [tap for tap in spec.tap_layers if not 0 <= tap < num_layers - 1]
    if outside:
        raise UserError(
            f"the drafter reads the output of layer {outside[0]}, and the {where} has {num_layers} layers",
            f"taps among layers 0 to {num_layers - 2}: the last layer is never one",
            "give the target that the drafter was trained for",
        )


def export_of_folder(path: Path) -> str:
    """The command that writes a folder's drafter in another format."""
    return f"dflash export {shlex.quote(str(path))} --format vllm"
