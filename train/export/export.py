"""Writes a checkpoint, or another drafter's folder, as a folder that serving engines load: whole or not at all.

The folder holds config.json and model.safetensors in the format asked for, and README.md, a model card. What it will
say is checked before a byte is written: it reads back as the same drafter, and the engine runs that one. Knows runs
and folders; no store is opened.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import UserError
from ...store.size import human_bytes
from ..checkpoint import checkpoint_dir, find_step, load_drafter
from ..evaluate.evaluation_file import EVALUATION_NAME, read_evaluation, strange, strange_key
from ..spec import DrafterSpec
from ..value_rules import is_count, is_text, object_of, or_none
from .card import CardFacts, converted_rows, model_card, shown_target, training_rows
from .config import SPECULATORS, ExportConfig
from .folders import is_run, read_drafter_folder, require_run_for_checkpoint
from .formats import ZLAB, config_of, spec_of
from .inherited import require_known
from .serving import engine_name, is_packaged, missing_keys, require_served, serving_commands, serving_notes
from .tensors import CONFIG_NAME, TENSORS_NAME, check_tensors, num_parameters, require_finite, tensors_sha256
from .write import require_export_folder, write_folder

ON_CARD = {
    **dict.fromkeys(("num_prompts", "max_new_tokens"), is_count),
    "num_equal": or_none(is_count),
    "definitions": object_of({"acceptance_length": is_text}),
    "decoding": or_none(is_text),
}
"""What the card says of an exam, beside its lengths."""
ReadTarget = Callable[[str], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What is exported: the drafter, its target as TargetFacts in a dict, and what the card says of its origin."""

    spec: DrafterSpec
    state: Mapping[str, Tensor]
    target: Mapping[str, Any]
    training: list[tuple[str, str]]
    folder: Path | None = None  # of the run or the drafter
    step: int | None = None  # of a run
    exam: Mapping[str, Any] | None = None

    @property
    def dtype(self) -> str:
        return str(next(iter(self.state.values())).dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """What was written where; `is_new` is False where the very same export was there already."""

    path: Path
    origin: str
    step: int | None
    num_parameters: int
    size_bytes: int
    is_new: bool
    commands: tuple[str, ...]
    notes: list[str]
    """What the commands leave out, and why."""

    def text(self) -> str:
        state = "written" if self.is_new else "was there already, unchanged"
        served = ["next: serve it with the target, for example", *(f"  {command}" for command in self.commands)]
        return "\n".join(
            [
                f"export     {self.path} ({state})",
                f"drafter    {self.origin}, {self.num_parameters:,} parameters, {human_bytes(self.size_bytes)}",
                *(served if self.commands else []),
                *(f"note: {note}" for note in self.notes),
            ]
        )


def export(
    folder: Path, config: ExportConfig, *, dtype: torch.dtype | None = None, read_target: ReadTarget | None = None
) -> ExportReport:
    """Writes a run's checkpoint, or the drafter of a folder, to `config.out` in `config.format`.

    Weights are rounded to `dtype`, else to `config.dtype`. `read_target(name)` gives the TargetFacts of a target as a
    dict; it is called for a folder with `config.target`. Raises UserError where there is no such checkpoint or folder,
    where the format or its engine has no word for something of the drafter, where `config.out` holds anything but this
    very export, and when the disk fails.
    """
    out = Path(config.out)
    require_export_folder(out)
    wanted = dtype or (None if config.dtype == "auto" else getattr(torch, config.dtype))
    source = (
        source_of_run(folder, config, wanted)
        if is_run(folder)
        else source_of_folder(folder, config, wanted, read_target)
    )
    content = checked_config(out, config.format, source)
    commands, notes = serving(config.format, content, source, out.absolute().name, shown_target(source.target))
    card = model_card(
        CardFacts(
            spec=source.spec,
            target=source.target,
            dtype=source.dtype,
            training=source.training,
            commands=commands,
            notes=notes,
            exam=source.exam,
        )
    )
    is_new = write_folder(out, content, source.state, card)
    return ExportReport(
        path=out,
        origin=f"of {folder}" if source.step is None else f"step {source.step}",
        step=source.step,
        num_parameters=num_parameters(source.spec),
        size_bytes=(out / TENSORS_NAME).stat().st_size,
        is_new=is_new,
        commands=serving(config.format, content, source, str(out), str(source.target.get("name")))[0],
        notes=notes,
    )


def write_zlab(out: Path, spec: DrafterSpec, state: Mapping[str, Tensor], target: Mapping[str, Any], card: str) -> bool:
    """Writes a drafter in z-lab's format; False where it is there with equal files.

    `state` must hold exactly the drafter's tensors, in one dtype. Raises UserError for other
    tensors, for a folder that holds anything else, and when the disk fails.
    """
    source = Source(spec=spec, state=state, target=target, training=[])
    return write_folder(out, checked_config(out, ZLAB, source), state, card)


def checked_config(out: Path, served: str, source: Source) -> dict[str, Any]:
    """The content of config.json; nothing is written yet.

    Raises UserError unless it reads back as the very drafter, the tensors are finite and fit it in both directions,
    and the engine that the format names would run it as trained.
    """
    spec, state = source.spec, source.state
    require_known(source.target)
    content = config_of(SPECULATORS if served == SPECULATORS else ZLAB, spec, source.target, source.dtype)
    require_served(served, content, spec)
    assert not missing_keys(served, content), f"{CONFIG_NAME} lacks {missing_keys(served, content)}"
    again = spec_of(out / CONFIG_NAME, content)
    assert again == spec, f"{CONFIG_NAME} reads back as {again}, the drafter is {spec}"
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    check_tensors(out, spec, shapes, {name: str(t.dtype).removeprefix("torch.") for name, t in state.items()})
    require_finite(source.folder or out, state)
    return content


def serving(
    served: str, content: Mapping[str, Any], source: Source, folder: str, target: str
) -> tuple[tuple[str, ...], list[str]]:
    """The commands with the drafter in `folder` and the target by the name `target`, and what they leave out."""
    name = str(source.target.get("name") or "")
    notes = serving_notes(served, content, source.spec)
    if Path(name).is_absolute() and served == SPECULATORS:
        notes.append("config.json names the target by a folder of this machine: --target gives a name that others find")
    elif is_packaged(name) and served == SPECULATORS:
        notes.append(f"config.json names the target {name!r}, which no engine knows: export with --target FOLDER")
    return serving_commands(served, content, source.spec, engine_name(name, target), folder), notes


def source_of_run(run_dir: Path, config: ExportConfig, dtype: torch.dtype | None) -> Source:
    """A run's checkpoint, in bfloat16 where nothing else is asked for."""
    step = find_step(run_dir, config.checkpoint)
    drafter, facts = load_drafter(run_dir, str(step), "cpu", dtype or torch.bfloat16)
    return Source(
        spec=facts.spec,
        state=drafter.state_dict(),
        target=facts.target if config.target is None else {**facts.target, "name": findable(config.target)},
        training=training_rows(facts, step),
        folder=checkpoint_dir(run_dir, step),
        step=step,
        exam=decoded_exam(run_dir, step),
    )


def findable(target: str) -> str:
    """A target's name as an engine started anywhere finds it."""
    return str(Path(target).absolute()) if Path(target).is_dir() else target


def source_of_folder(
    folder: Path, config: ExportConfig, dtype: torch.dtype | None, read_target: ReadTarget | None
) -> Source:
    """The drafter of a folder, in its own dtype where nothing else is asked for.

    Raises UserError where neither the folder nor `config.target` says what the format wants to know of the target.
    """
    require_run_for_checkpoint(folder, config)
    found, tensors = read_drafter_folder(folder)
    spec, target = found.spec, found.target
    if config.target is not None and read_target is not None:
        target = read_target(config.target)
        spec = found.fitted(target)
    wanted = ("num_layers", *(("name", "architecture") if config.format == SPECULATORS else ()))
    if missing := [name for name in wanted if name not in target]:
        known = target.get("name", "NAME_OR_FOLDER")
        raise UserError(
            f"the folder {str(folder)!r} does not say the {' and '.join(missing)} of its target",
            f"what --format {config.format} writes of the target",
            f"name the target: --target {known}",
        )
    return Source(
        spec=spec,
        state={name: tensor if dtype is None else tensor.to(dtype) for name, tensor in tensors.items()},
        target=target,
        training=converted_rows(found.layout, tensors_sha256(folder)),
        folder=folder,
    )


def decoded_exam(run_dir: Path, step: int) -> dict[str, Any] | None:
    """The run's evaluation.json, where it is of this step and of real decoding. Raises UserError when it is broken.

    Checked is what the card says of it.
    """
    path = run_dir / EVALUATION_NAME
    if not path.exists():
        return None
    exam = read_evaluation(path)
    if exam.get("step") != step or exam.get("mode") != "decoded":
        return None
    if exam.get("acceptance_length") is not None and (name := strange_key(exam, ON_CARD)):
        raise strange(path, name, exam.get(name))
    return exam
