"""What differs between an exported folder and the run that it claims to be: configs key by key, tensors bit by bit.

A wrong number here costs acceptance and raises nothing in an engine, so every key counts, in both directions.
Knows folders and facts of a run; starts no engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import UserError
from ..checkpoint import find_step, load_drafter
from ..facts import RunFacts
from .folders import MASK_EMBEDDING_NAME, read_config
from .formats import config_of, layout_of_config, leaves
from .tensors import CONFIG_NAME, DTYPES, read_tensors, tensor_shapes

SHOWN_DIFFERENCES = 4
ABSENT = "absent"
BOOKKEEPING = {
    *("speculators_version", "transformers_version", "auto_map", "_name_or_path"),
    "speculators_config.verifier.name_or_path",  # where the target lies, which export may be told
}
MEANINGS = {
    "target_layer_ids": "taps",
    "aux_hidden_state_layer_ids": "taps",
    "mask_token_id": "mask token",
    "block_size": "block size",
    "rope_theta": "rope",
    "rope_type": "rope",
    "rope_scaling": "rope",
    "rope_parameters": "rope",
    "partial_rotary_factor": "rope",
    "tie_word_embeddings": "head",
    "layer_types": "attention",
    "sliding_window": "attention",
    "use_sliding_window": "attention",
    "sliding_window_non_causal": "attention",
    "max_window_layers": "attention",
    "is_causal": "attention",
    "causal": "attention",
    "input_embedding_scale": "embedding scale",
    "output_multiplier": "logit scale",
    "logit_scale": "logit scale",
    "final_logit_softcapping": "logit softcap",
    "sample_from_anchor": "slots",
    "shift_label": "slots",
    "slot_meaning": "slots",
    "speculative_tokens": "block size",
}
"""What a key is about, in this project's words; a key that is not here stands for itself."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact of the folder that is not the run's: a dotted key or a tensor's name, and both values."""

    fact: str
    found: Any
    expected: Any

    def __str__(self) -> str:
        return f"{self.fact} is {self.found}, not {self.expected}"


def check_export(folder: Path, run_dir: Path, checkpoint: str = "best") -> None:
    """Raises UserError, naming the first differing facts with both values, unless the folder is the run's checkpoint.

    Also raises as `find_step` and `load_drafter`, and where the folder cannot be read at all.
    """
    step = find_step(run_dir, checkpoint)
    drafter, facts = load_drafter(run_dir, str(step), "cpu", torch.float32)
    found = differences(folder, facts, drafter.state_dict())
    if found:
        more = f" and {len(found) - SHOWN_DIFFERENCES} more" if len(found) > SHOWN_DIFFERENCES else ""
        shown = "; ".join(map(str, found[:SHOWN_DIFFERENCES]))
        raise UserError(
            f"the folder {str(folder)!r} is not step {step} of {str(run_dir)!r}: {shown}{more}",
            "every key of its config and every bit of its tensors as the run has them",
            "export the run again, or name the checkpoint that was exported with --checkpoint",
        )


def differences(folder: Path, facts: RunFacts, state: Mapping[str, Tensor]) -> list[Difference]:
    """All facts in which the folder is not the run's, configs first; empty where it is.

    `state` holds the run's weights in fp32; those of the folder may be rounded to another dtype, one for all.
    Raises UserError where the folder has no config or tensors that can be read, or is of no known format.
    """
    config, tensors = read_config(folder), read_tensors(folder)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    dtype = str(config.get("dtype", next(iter(sorted(dtypes)), "float32")))
    expected = config_of(layout_of_config(folder / CONFIG_NAME, config), facts.spec, facts.target, dtype)
    found = config_differences(config, expected)
    if (folder / MASK_EMBEDDING_NAME).exists():
        found.append(Difference(f"mask token ({MASK_EMBEDDING_NAME})", "a file of its own, which vLLM reads", ABSENT))
    return found + tensor_differences(tensors, facts, state, dtype)


def config_differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[Difference]:
    """Keys with other values, keys that are lost, keys that no export writes; bookkeeping is not looked at."""
    ours, theirs = leaves(found), leaves(expected)
    names = [*theirs, *(name for name in ours if name not in theirs)]
    return [
        Difference(told(name), ours.get(name, ABSENT), theirs.get(name, ABSENT))
        for name in names
        if ours.get(name, ABSENT) != theirs.get(name, ABSENT) and name not in BOOKKEEPING
    ]


def told(name: str) -> str:
    """A dotted key, with what it is about in front where its own name does not say so."""
    meaning = MEANINGS.get(name.rsplit(".", 1)[-1])
    return name if meaning is None else f"{meaning} ({name})"


def tensor_differences(
    tensors: Mapping[str, Tensor], facts: RunFacts, state: Mapping[str, Tensor], dtype: str
) -> list[Difference]:
    """Tensors that are missing, extra, of another dtype or shape, or with other bits than the run's rounded ones."""
    wanted = tensor_shapes(facts.spec)
    found = [Difference(name, ABSENT, "a tensor") for name in wanted if name not in tensors]
    found += [
        Difference(name, f"a tensor {tuple(tensors[name].shape)}", f"{ABSENT}: a drafter has none of this name")
        for name in tensors
        if name not in wanted
    ]
    for name, shape in wanted.items():
        tensor = tensors.get(name)
        if tensor is None:
            continue
        own = str(tensor.dtype).removeprefix("torch.")
        if own != dtype or dtype not in DTYPES:
            found.append(Difference(f"dtype of {name}", own, f"{dtype}, as config.json says"))
        elif tuple(tensor.shape) != shape:
            found.append(Difference(f"shape of {name}", tuple(tensor.shape), shape))
        elif not torch.equal(tensor, state[name].to(tensor)):
            away = int((tensor != state[name].to(tensor)).sum())
            found.append(Difference(name, f"other than the run's in {away:,} of {tensor.numel():,} values", "equal"))
    return found
