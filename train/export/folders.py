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
from .formats import SPECULATORS, ZLAB, layout_of_config, spec_of
from .speculators import states_num_target_layers, verifier_of
from .tensors import CONFIG_NAME, check_tensors, read_headers, read_tensors, target_copies, told_by

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


def read_folder(path: Path) -> DrafterFolder:
    """The folder without a tensor's bytes.

    Raises UserError for a folder that is none or that is damaged, for another format or kind of drafter, for settings
    that this package's drafter does not have, for keys that contradict each other, and for tensors that are missing,
    unknown, of another dtype or of the wrong shape.
    """
    config = read_config(path)
    layout = layout_of_config(path / CONFIG_NAME, config)
    with told_by(path):
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
    known |= token_ids(config if layout == ZLAB else config["transformer_layer_config"])
    known |= verifier_of(config) if layout == SPECULATORS else {}
    return DrafterFolder(
        path=path,
        layout=layout,
        spec=spec,
        dtype=dtypes["fc.weight"],
        target=known,
        copies=tuple(name for name in copies if name in shapes),
    )


def token_ids(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The target's own tokens, by the names of TargetFacts."""
    eos = keys.get("eos_token_id")
    eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return {"bos_id": keys.get("bos_token_id"), "pad_id": keys.get("pad_token_id"), "eos_ids": eos_ids}


def read_drafter_folder(path: Path) -> tuple[DrafterFolder, dict[str, Tensor]]:
    """The folder and the drafter's tensors, on the CPU in their own dtype. Raises UserError as `read_folder`."""
    folder = read_folder(path)
    found = read_tensors(path)
    return folder, {name: tensor for name, tensor in found.items() if name not in folder.copies}


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json. Raises UserError where there is none, or no JSON object."""
    with told_by(folder):
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG_NAME} is a {type(config).__name__}")
    return config
