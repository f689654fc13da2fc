"""Runs inside an environment with speculators 0.9.0: the loss and the gradients of its drafter on rows of ours, and
what it makes of our exports.

Usage: python speculators_side.py FOLDER
FOLDER holds `cases.json`: name -> config (of the drafter), layers (of its Qwen3Config), and call (arguments of its
forward, `loss` among them by name); and for each name `NAME.safetensors`: the drafter's weights under its own names,
`embedding` and `head` [V, H], `norm` [H] (of the target), and the row: taps [T, Lt*H], last [T, H], ids, loss_mask,
document_ids, position_ids [T], anchors, keep [A].
`exports.json` names folders in FOLDER that it loads by `from_pretrained`, with the target that they name; for each
`NAME.row.safetensors` holds taps [T, Lt*H], ids [T] and anchors [A].
Written there: `NAME.gradients.safetensors`, one for each trained weight, and `result.json`; for an export
`NAME.outputs.safetensors` (hidden, logits of all blocks) and the folder `NAME-again`, saved by their class.

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
    result["exports"] = {name: run_export(folder, name) for name in json.loads((folder / "exports.json").read_text())}
    (folder / "result.json").write_text(json.dumps(result))


@torch.no_grad()
def run_export(folder: Path, name: str) -> Any:
    """Loads an export of ours as its users do, and runs its blocks; what its loader missed or did not know."""
    package, core = import_speculators()
    _, info = package.DFlashDraftModel.from_pretrained(folder / name, output_loading_info=True)
    config = package.DFlashSpeculatorConfig.from_pretrained(folder / name)
    config.transformer_layer_config._attn_implementation = "eager"
    model = package.DFlashDraftModel.from_pretrained(folder / name, config=config).eval()
    row = load_file(folder / f"{name}.row.safetensors")
    tokens, anchors = len(row["ids"]), row["anchors"]
    drawn, core.select_anchors = core.select_anchors, lambda *_: (anchors, torch.ones(len(anchors), dtype=torch.bool))
    hidden, logits, *_ = model._backbone_forward(
        hidden_states=row["taps"][None],
        input_ids=row["ids"][None],
        loss_mask=torch.ones(1, tokens, dtype=torch.long),
        verifier_last_hidden_states=torch.zeros(1, tokens, config.transformer_layer_config.hidden_size),
        document_ids=torch.zeros(1, tokens, dtype=torch.long),
        max_anchors=len(anchors),
    )
    core.select_anchors = drawn
    outputs = {"hidden": hidden[0].contiguous(), "logits": logits[0].contiguous()}
    save_file(outputs, folder / f"{name}.outputs.safetensors")
    model.save_pretrained(folder / f"{name}-again")
    return {kind: sorted(map(str, info[f"{kind}_keys"])) for kind in ("missing", "unexpected", "mismatched")}


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
