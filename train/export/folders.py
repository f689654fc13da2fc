"""Reads a folder with a drafter, in z-lab's format or that of speculators, and what it knows of its target.

Everything is checked before a weight is used: the format, keys against each other, names, shapes and dtypes of the
tensors. Knows files and formats; no run.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ... import UserError
from ..spec import DrafterSpec
from ..value_rules import is_whole
from .formats import SPECULATORS, ZLAB, layout_of_config, spec_of
from .speculators import states_num_target_layers, verifier_of
from .tensors import CONFIG_NAME, check_tensors, read_headers, read_tensors, require_finite, target_copies, told_by
from .values import wrong

MASK_EMBEDDING_NAME = "mask_embedding.pt"


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterFolder:
    """A drafter's folder without its weights.

    `target` holds what the folder knows of its target, by the names of TargetFacts: always hidden_size, vocab_size and
    token ids, perhaps num_layers, name and architecture. `copies` are tensors beside the drafter's own, frozen
    copies of parts of the target, which are not read.
    """

    path: Path
    layout: str
    spec: DrafterSpec
    dtype: str
    target: Mapping[str, Any]
    copies: tuple[str, ...] = ()

    def fitted(self, target: Mapping[str, Any]) -> DrafterSpec:
        """The spec for this target, a TargetFacts as a dict. Raises UserError where it cannot be the drafter's own."""
        pairs = {
            n: (self.target[n], target[n]) for n in ("hidden_size", "vocab_size", "num_layers") if n in self.target
        }
        faults = [f"{name} {own}, and the target has {its}" for name, (own, its) in pairs.items() if own != its]
        last = target["num_layers"] - 1
        if outside := [tap for tap in self.spec.tap_layers if not 0 <= tap < last]:
            faults.append(f"tap {outside[0]}, and the target has layers 0 to {last}, the last of them never a tap")
        if faults:
            raise UserError(
                f"the drafter {str(self.path)!r} is not of the target {target['name']!r}: it has {'; '.join(faults)}",
                "the target that the drafter was trained for",
                "give that target with --target, or another drafter",
            )
        return dataclasses.replace(self.spec, num_target_layers=target["num_layers"])


def is_run(path: Path) -> bool:
    """Whether a folder is a run of `dflash train` (or wants to be one), rather than a drafter's folder."""
    return (path / "run.json").is_file() or not (path / CONFIG_NAME).is_file()


def require_run_for_checkpoint(folder: Path, config: Any) -> None:
    """Raises UserError for a checkpoint beside a drafter's folder; `config` is one with that field."""
    usual = type(config)().checkpoint
    if config.checkpoint != usual:
        raise UserError(
            f"checkpoint = {config.checkpoint!r} does nothing with the drafter's folder {str(folder)!r}",
            "a run, which has several, or a folder, which holds one drafter",
            "drop --checkpoint, or give the run",
        )


def read_folder(path: Path) -> DrafterFolder:
    """The folder without a tensor's bytes.

    Raises UserError for a folder that is none or that is damaged, for another format or kind of drafter, for settings
    that this package's drafter does not have, for keys that contradict each other, and for tensors that are missing,
    unknown, of another dtype or of the wrong shape.
    """
    config = read_config(path)
    with told_by(path):
        layout = layout_of_config(path / CONFIG_NAME, config)
        spec = spec_of(path / CONFIG_NAME, config)
    shapes, dtypes = read_headers(path)
    copies = target_copies(spec) if layout == SPECULATORS else {}
    check_tensors(path, spec, shapes, dtypes, copies)
    if (path / MASK_EMBEDDING_NAME).exists():
        raise UserError(
            f"{str(path)!r} holds a {MASK_EMBEDDING_NAME}: its masked slots have an embedding of their own",
            "a drafter whose masked slots are a row of the target's embedding",
            "use a drafter of this kind",
        )
    known: dict[str, Any] = {"hidden_size": spec.hidden_size, "vocab_size": spec.vocab_size}
    if layout == ZLAB or states_num_target_layers(config):
        known["num_layers"] = spec.num_target_layers
    known |= token_ids(path / CONFIG_NAME, config if layout == ZLAB else config["transformer_layer_config"])
    known |= verifier_of(config) if layout == SPECULATORS else {}
    return DrafterFolder(
        path=path,
        layout=layout,
        spec=spec,
        dtype=dtypes["fc.weight"],
        target=known,
        copies=tuple(name for name in copies if name in shapes),
    )


def token_ids(path: Path, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The target's own tokens, by the names of TargetFacts. Raises UserError for what is no id."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = keys.get(name)
        ids = value if isinstance(value, list) and name == "eos_token_id" else [] if value is None else [value]
        if not all(map(is_whole, ids)):
            raise wrong(path, name, value, "an id of the target's tokenizer, or null")
    eos = keys.get("eos_token_id")
    eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return {"bos_id": keys.get("bos_token_id"), "pad_id": keys.get("pad_token_id"), "eos_ids": eos_ids}


def read_drafter_folder(path: Path) -> tuple[DrafterFolder, dict[str, Tensor]]:
    """The folder and the drafter's tensors, on the CPU in their own dtype.

    Raises UserError as `read_folder`, and for weights that are not finite.
    """
    folder = read_folder(path)
    tensors = {name: tensor for name, tensor in read_tensors(path).items() if name not in folder.copies}
    require_finite(path, tensors)
    return folder, tensors


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json. Raises UserError where it is no JSON object, or one that says a key twice."""
    with told_by(folder):
        text = (folder / CONFIG_NAME).read_text(encoding="utf-8")
        config = json.loads(text, object_pairs_hook=said_once, parse_constant=no_number)
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG_NAME} is a {type(config).__name__}")
    return config


def said_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; of a key that is there twice, readers take either value."""
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{CONFIG_NAME} has {twice[0]!r} twice")
    return dict(pairs)


def no_number(text: str) -> Any:
    raise ValueError(f"{CONFIG_NAME} holds {text}, which is no number of JSON")
