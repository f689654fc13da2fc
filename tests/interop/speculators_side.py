"""Runs inside an environment with speculators 0.9.0: the loss and the gradients of its drafter on rows of ours.

Usage: python speculators_side.py FOLDER
FOLDER holds `cases.json`: name -> config (of the drafter), layers (of its Qwen3Config), and call (arguments of its
forward, `loss` among them by name); and for each name `NAME.safetensors`: the drafter's weights under its own names,
`embedding` and `head` [V, H], `norm` [H] (of the target), and the row: taps [T, Lt*H], last [T, H], ids, loss_mask,
document_ids, position_ids [T], anchors, keep [A].
Written there: `NAME.gradients.safetensors`, one for each trained weight, and `result.json`.

Its drafter draws its anchors in its forward; here that one function is replaced by one that gives ours. Packages that
it imports and that its drafter never calls are empty modules.
"""

import importlib
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

NEVER_CALLED = "openai openai.types openai.types.chat openai.types.completion datasets hs_connectors".split()


class Unused(ModuleType):
    """A module of which any name can be imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_speculators() -> tuple[Any, Any]:
    """The package, and the module of its drafter's forward."""
    for name in NEVER_CALLED:
        module = Unused(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        sys.modules[name] = module
    return importlib.import_module("speculators"), importlib.import_module("speculators.models.dflash.core")


def main(folder_path: str) -> None:
    torch.set_num_threads(1)
    folder = Path(folder_path)
    cases = json.loads((folder / "cases.json").read_text())
    result = {name: run(folder, name, **case) for name, case in cases.items()}
    (folder / "result.json").write_text(json.dumps(result))


def run(folder: Path, name: str, config: dict[str, Any], layers: dict[str, Any], call: dict[str, Any]) -> Any:
    """One forward and backward of one case: its loss, its counts, and the anchors it could have drawn itself."""
    package, core = import_speculators()
    tensors = load_file(folder / f"{name}.safetensors")
    row = {key: tensors.pop(key) for key in ("taps", "last", "ids", "loss_mask", "document_ids", "position_ids")}
    anchors, keep = tensors.pop("anchors"), tensors.pop("keep")
    layer_config = Qwen3Config(**layers)
    layer_config._attn_implementation = "eager"
    made = package.DFlashSpeculatorConfig(transformer_layer_config=layer_config, **config)
    model = package.DFlashDraftModel(made).train()
    fill(model, tensors)
    loss_mask = row["loss_mask"][None].long()
    own_anchors, are_own = core.select_anchors(loss_mask, loss_mask.shape[1], made.block_size)
    drawn, core.select_anchors = core.select_anchors, lambda *_: (anchors, keep)
    losses = importlib.import_module("speculators.losses").resolve_loss_config(call.pop("loss"), "eager")
    _, loss, metrics = model(
        hidden_states=row["taps"][None],
        input_ids=row["ids"][None],
        loss_mask=loss_mask,
        verifier_last_hidden_states=row["last"][None],
        document_ids=row["document_ids"][None],
        position_ids=row["position_ids"][None],
        loss_config=losses,
        max_anchors=len(anchors),
        **call,
    )
    core.select_anchors = drawn
    loss.backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
    save_file(gradients, folder / f"{name}.gradients.safetensors")
    return {
        "loss": loss.item(),
        "metrics": {key: value.item() for key, value in metrics.items()},
        "own_anchors": own_anchors[are_own].tolist(),
    }


@torch.no_grad()
def fill(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    """The drafter's weights by name, and copies of the target's that it keeps."""
    head = tensors.pop("head")
    frozen = {"lm_head": head, "verifier_lm_head": head, "embed_tokens": tensors.pop("embedding")}
    frozen["verifier_norm"] = tensors.pop("norm")
    found = tensors | {f"{name}.weight": tensor for name, tensor in frozen.items()}
    model.load_state_dict(found, strict=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
