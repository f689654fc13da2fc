"""Writes a checkpoint as a folder that serving engines load, whole or not at all.

The folder holds z-lab's config.json and model.safetensors (see `zlab.py`) and README.md, a model
card with the facts of the training. Knows runs and folders; no store is opened.
"""

import filecmp
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from ... import UserError, __version__
from ...store.files import fsync_folder, publish, storage_error, temporary_path
from ...store.size import human_bytes
from ..checkpoint import find_step, load_drafter
from ..evaluate.evaluation_file import EVALUATION_NAME, read_evaluation
from ..facts import RunFacts
from ..kinds import describe
from ..spec import DrafterSpec
from .config import ExportConfig
from .zlab import CONFIG_NAME, TENSORS_NAME, check_tensors, num_parameters, read_zlab, tensor_shapes, zlab_config

__all__ = ["ExportReport", "export", "read_zlab", "write_zlab"]

CARD_NAME = "README.md"
FILE_NAMES = (TENSORS_NAME, CONFIG_NAME, CARD_NAME)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """What was written where; `is_new` is False where the very same export was there already."""

    path: Path
    step: int
    num_parameters: int
    size_bytes: int
    is_new: bool
    commands: tuple[str, ...]
    note: str | None
    """What the commands leave out, and why."""

    def text(self) -> str:
        state = "written" if self.is_new else "was there already, unchanged"
        return "\n".join(
            [
                f"export     {self.path} ({state})",
                f"drafter    step {self.step}, {self.num_parameters:,} parameters, {human_bytes(self.size_bytes)}",
                "next: serve it with the target, for example",
                *(f"  {command}" for command in self.commands),
                *([f"note: {self.note}"] if self.note else []),
            ]
        )


def export(run_dir: Path, config: ExportConfig, *, dtype: torch.dtype = torch.bfloat16) -> ExportReport:
    """Writes the run's checkpoint to `config.out` in z-lab's format, weights rounded to `dtype`.

    Raises UserError where there is no such checkpoint, where `config.out` holds anything but this
    very export, and when the disk fails.
    """
    step, out = find_step(run_dir, config.checkpoint), Path(config.out)
    require_export_folder(out)
    drafter, facts = load_drafter(run_dir, str(step), "cpu", dtype)
    card = model_card(facts, step, serving_commands(facts, out.absolute().name), decoded_exam(run_dir, step))
    is_new = write_zlab(out, facts.spec, drafter.state_dict(), facts.target, card)
    return ExportReport(
        path=out,
        step=step,
        num_parameters=num_parameters(facts.spec),
        size_bytes=(out / TENSORS_NAME).stat().st_size,
        is_new=is_new,
        commands=serving_commands(facts, str(out)),
        note=serving_note(facts.spec),
    )


def write_zlab(
    out: Path, spec: DrafterSpec, state: Mapping[str, torch.Tensor], target: Mapping[str, Any], card: str
) -> bool:
    """Writes the three files aside and renames the folder; False where it is there with equal files.

    `state` must hold exactly the drafter's tensors, in one dtype. Raises UserError for other
    tensors, for a folder that holds anything else, and when the disk fails.
    """
    check_tensors(out, spec, {name: tuple(tensor.shape) for name, tensor in state.items()})
    tensors = {name: state[name].detach().cpu().contiguous() for name in tensor_shapes(spec)}
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    config = json.dumps(zlab_config(spec, target, dtype), indent=2) + "\n"
    aside = temporary_path(out.absolute())
    try:
        aside.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        publish(aside / TENSORS_NAME, save(tensors, metadata={"format": "pt"}))
        publish(aside / CONFIG_NAME, config.encode())
        publish(aside / CARD_NAME, card.encode())
        if is_equal(out, aside):
            return False
        os.rename(aside, out)  # replaces an empty folder, never one that holds something
        fsync_folder(aside.parent)
        return True
    except OSError as error:
        raise storage_error(error, out) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def is_equal(out: Path, aside: Path) -> bool:
    """True where `out` holds the same files as `aside`, False where it is empty or not there; else UserError."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    require_export_folder(out)
    different = filecmp.cmpfiles(out, aside, FILE_NAMES, shallow=False)[1:]
    if any(different):
        raise other_export(out, [name for part in different for name in part])
    return True


def require_export_folder(out: Path) -> None:
    """Raises UserError where something lies that no export wrote; whether the files are equal is not looked at."""
    if not os.path.lexists(out):
        return
    found = sorted(path.name for path in out.iterdir()) if out.is_dir() else [out.name]
    if found and found != sorted(FILE_NAMES):
        raise other_export(out, [name for name in found if name not in FILE_NAMES] or found)


def other_export(out: Path, found: list[str]) -> UserError:
    return UserError(
        f"{str(out)!r} is there and is not this export: see {found[0]!r}",
        "a new or empty folder, or the same export",
        "name another with --out, or remove it",
    )


def serving_commands(facts: RunFacts, folder: str) -> tuple[str, ...]:
    """How vLLM, and SGLang where it runs such layers, are started with the drafter in `folder`."""
    target = shown_target(facts.target)
    if "/" not in target and not Path(facts.target["name"]).is_absolute():
        target = "TARGET_FOLDER"  # a packaged target has a name of ours that no engine knows
    drafts = facts.spec.block_size - 1
    speculative = json.dumps({"method": "dflash", "model": folder, "num_speculative_tokens": drafts})
    vllm = f"vllm serve {target} --speculative-config '{speculative}'"
    sglang = (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {folder}"
    )
    return (vllm,) if serving_note(facts.spec) else (vllm, sglang)


def serving_note(spec: DrafterSpec) -> str | None:
    """Why there is no command for SGLang: it reads no `is_causal`; None where it runs the layers as trained."""
    if all(kind.is_causal == (kind.window is not None) for kind in spec.attention):
        return None
    return (
        f"no command for SGLang: it runs sliding layers causal inside the block and full layers not, whatever "
        f"config.json says, and this drafter was trained with {describe(spec.attention)}"
    )


def shown_target(target: Mapping[str, Any]) -> str:
    """The target's name for others to read: a folder loses the path that only its owner has."""
    name = str(target["name"])
    return Path(name).name if Path(name).is_absolute() else name


def decoded_exam(run_dir: Path, step: int) -> dict[str, Any] | None:
    """The run's evaluation.json, where it is of this step and of real decoding. Raises UserError when it is broken."""
    path = run_dir / EVALUATION_NAME
    if not path.exists():
        return None
    exam = read_evaluation(path)
    return exam if exam.get("step") == step and exam.get("mode") == "decoded" else None


def model_card(facts: RunFacts, step: int, commands: tuple[str, ...], exam: Mapping[str, Any] | None) -> str:
    """README.md: what it drafts for, how it was trained, what was measured, how it is served."""
    spec, target = facts.spec, facts.target
    name = shown_target(target)
    lines = [
        *("---", "library_name: transformers", "tags: [dflash, speculative-decoding]"),
        *([f"base_model: {name}"] if name.count("/") == 1 else []),
        *("---", "", f"# DFlash drafter for {name}", ""),
        f"Drafts blocks of {spec.block_size} tokens, the known first one counted, for speculative decoding of {name}.",
        "Works with that target only: it reads the target's hidden states, embedding and output head.",
        *("", "| | |", "|---|---|"),
        f"| target | {name}, {target['num_layers']} layers, weights sha256 `{target['weights_sha256']}` |",
        f"| taps | outputs of layers {', '.join(map(str, spec.tap_layers))} |",
        f"| drafter | {spec.num_layers} layers, {num_parameters(spec):,} parameters |",
        f"| attention | {describe(spec.attention)} |",
        *([f"| started from | a drafter, tensors sha256 `{facts.init['sha256']}` |"] if facts.init else []),
        f"| block, mask token | {spec.block_size}, id {spec.mask_token_id} |",
        f"| slots | {spec.slot_meaning} |",
        f"| training | step {step} of {facts.steps}, {facts.num_train:,} samples, {facts.rows_per_epoch:,} rows of "
        f"{facts.row_tokens:,} tokens a pass, {facts.rows_per_step} a step, {facts.anchors:,} anchors a row |",
        f"| optimizer, loss | {facts.optim['name']}, weights {facts.loss['weights']}, seed {facts.seed} |",
        f"| trained by | dflash-offline {__version__} |",
        "",
    ]
    if exam is not None and exam["acceptance_length"] is not None:
        lines += [
            f"Acceptance length {exam['acceptance_length']:.2f} ({exam['definitions']['acceptance_length']}), over "
            f"{exam['num_prompts']} prompts, greedy, at most {exam['max_new_tokens']} new tokens; "
            f"{exam['num_equal']} of {exam['num_prompts']} outputs equal to plain decoding.",
            "",
        ]
    note = serving_note(spec)
    lines += ["## Serving", "", "```", *commands, "```", "", *([f"{note[0].upper()}{note[1:]}.", ""] if note else [])]
    return "\n".join(lines)
