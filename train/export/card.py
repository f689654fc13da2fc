"""README.md of an exported folder: what the drafter is for, how it was trained, what was measured, how it is served.

Pure text from plain facts; knows no file and no engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import __version__
from ..evaluate.formats import one_line
from ..facts import RunFacts
from ..kinds import describe
from ..spec import DrafterSpec
from .inherited import inherited_rows
from .tensors import num_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFacts:
    """What a card is made of; `training` are the rows of its table that only a run knows."""

    spec: DrafterSpec
    target: Mapping[str, Any]
    dtype: str
    training: Sequence[tuple[str, str]]
    commands: Sequence[str]
    notes: Sequence[str]
    exam: Mapping[str, Any] | None = None


def shown_target(target: Mapping[str, Any]) -> str:
    """The target's name for others to read: a folder loses the path that only its owner has."""
    name = str(target.get("name") or "its target")
    return Path(name).name if Path(name).is_absolute() else name


def training_rows(facts: RunFacts, step: int) -> list[tuple[str, str]]:
    """How a run trained its checkpoint."""
    passes = (
        f"step {step} of {facts.steps}, {facts.num_train:,} samples, {facts.rows_per_epoch:,} rows of "
        f"{facts.row_tokens:,} tokens a pass, {facts.rows_per_step} a step, {facts.anchors:,} anchors a row"
    )
    started = [("started from", f"a drafter, tensors sha256 `{facts.init['sha256']}`")] if facts.init else []
    return [
        *started,
        ("training", passes),
        ("optimizer, loss", f"{facts.optim['name']}, weights {facts.loss['weights']}, seed {facts.seed}"),
        ("trained by", f"dflash-offline {__version__}"),
    ]


def converted_rows(layout: str, sha256: str) -> list[tuple[str, str]]:
    """Where a converted folder came from."""
    origin = f"a folder in the format of {layout}, tensors sha256 `{sha256}`"
    return [("converted from", origin), ("converted by", f"dflash-offline {__version__}")]


def model_card(card: CardFacts) -> str:
    """The whole text."""
    spec, target, name = card.spec, card.target, shown_target(card.target)
    weights, layers = target.get("weights_sha256"), f"{spec.num_target_layers} layers"
    rows = [
        ("target", f"{name}, {layers}, weights sha256 `{weights}`" if weights else f"{name}, {layers}"),
        ("taps", f"outputs of layers {', '.join(map(str, spec.tap_layers))}"),
        ("drafter", f"{spec.num_layers} layers, {num_parameters(spec):,} parameters, {card.dtype}"),
        ("attention", describe(spec.attention)),
        *inherited_rows(spec, target),
        ("block, mask token", f"{spec.block_size}, id {spec.mask_token_id}"),
        ("slots", spec.slot_meaning),
        *card.training,
    ]
    lines = [
        *("---", "library_name: transformers", "tags: [dflash, speculative-decoding]"),
        *([f"base_model: {name}"] if name.count("/") == 1 else []),
        *("---", "", f"# DFlash drafter for {name}", ""),
        f"Drafts blocks of {spec.block_size} tokens, the known first one counted, for speculative decoding of {name}.",
        "Works with that target only: it reads the target's hidden states, embedding and output head.",
        *("", "| | |", "|---|---|"),
        *(f"| {title} | {text} |" for title, text in rows),
        "",
        *exam_lines(card.exam),
    ]
    if card.commands:
        lines += ["## Serving", "", "```", *card.commands, "```", ""]
    for note in card.notes:
        lines += [f"{note[0].upper()}{note[1:]}.", ""]
    return "\n".join(lines)


def exam_lines(exam: Mapping[str, Any] | None) -> list[str]:
    """The measured acceptance as a table, tasks below the whole; nothing where nothing was measured."""
    if exam is None or exam.get("acceptance_length") is None:
        return []
    how = exam.get("decoding") or "greedy"
    is_compared = exam.get("num_equal") is not None
    equal = f"; {exam['num_equal']} of {exam['num_prompts']} outputs equal to plain decoding" if is_compared else ""
    parts = [("all", exam), *(exam.get("by_task") or {}).items()]
    return [
        "## Acceptance",
        "",
        f"Acceptance length: {exam['definitions']['acceptance_length']}. Over {exam['num_prompts']} prompts, {how}, at "
        f"most {exam['max_new_tokens']} new tokens{equal}.",
        "",
        "| Prompts | Acceptance length | 95 % interval | Count |",
        "|---|---:|---|---:|",
        *(exam_row(name, part) for name, part in parts if part.get("acceptance_length") is not None),
        "",
    ]


def exam_row(name: str, part: Mapping[str, Any]) -> str:
    interval = (part.get("intervals") or {}).get("acceptance_length")
    shown = f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else ""
    count = part.get("num_measured", part.get("num_prompts", ""))
    return f"| {cell_text(name) or '(none)'} | {part['acceptance_length']:.2f} | {shown} | {count} |"


def cell_text(text: str) -> str:
    """A task's name, from a file of prompts, as a cell of a table."""
    return one_line(text).replace("|", "\\|")
