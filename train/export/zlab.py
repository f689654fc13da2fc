"""z-lab's drafter format: the keys of config.json, written and read. SGLang and vLLM load the same folder.

Knows configs and specs; the keys of the Qwen3 layers are in `qwen3.py`, the tensors in `tensors.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..kinds import ALL, FULL, NONE, OF_SLIDING, Layout
from ..spec import SLOT_MEANING, DrafterSpec
from .qwen3 import expressible_layout, layers_of, lookup, qwen3_keys, require_plain, sizes_of, wrong

ARCHITECTURE = "DFlashDraftModel"


def zlab_config(spec: DrafterSpec, target: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The content of config.json; `target` holds TargetFacts as a dict.

    `logit_scale` is what vLLM reads in place of `output_multiplier`. Raises UserError for attention that the format
    cannot say.
    """
    layout = expressible_layout(spec)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": spec.block_size,
        "dflash_config": dflash_config(spec, layout),
        **causal_key(layout),
        **({"logit_scale": spec.output_multiplier} if spec.output_multiplier != 1.0 else {}),
        **qwen3_keys(spec, layout, target),
        "dtype": dtype,
    }


def causal_key(layout: Layout) -> dict[str, bool]:
    """`is_causal`; left out where only the sliding ones of several kinds are causal, and where all is full."""
    if layout.causal == OF_SLIDING:
        return {} if FULL in layout.layer_types else {"is_causal": True}
    return {"is_causal": True} if layout.causal == ALL else {"is_causal": False} if layout.window is not None else {}


def dflash_config(spec: DrafterSpec, layout: Layout) -> dict[str, Any]:
    """The nested keys; the target's quirks only where it has them."""
    quirks = {
        "input_embedding_scale": (spec.embedding_scale, 1.0),
        "output_multiplier": (spec.output_multiplier, 1.0),
        "final_logit_softcapping": (spec.logit_softcap, None),
    }
    own: dict[str, Any] = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.tap_layers),
        "slot_meaning": spec.slot_meaning,
        **{name: value for name, (value, plain) in quirks.items() if value != plain},
    }
    if layout.causal == ALL and FULL in layout.layer_types:
        own["causal"] = True  # the key that vLLM reads for full layers (dflash-spec 1.7)
    return own


def spec_of_zlab(path: Path, config: Mapping[str, Any]) -> DrafterSpec:
    """The drafter that a config.json describes.

    Raises UserError for settings that this package's drafter does not have, and for keys that contradict each other.
    """
    own = config.get("dflash_config") or {}
    require_plain(path, config)
    taps, block_size = tuple(lookup(path, config, "target_layer_ids")), lookup(path, config, "block_size")
    names, window = layers_of(path, config, block_size)
    multiplier = own.get("output_multiplier", config.get("output_multiplier", 1.0))
    if config.get("logit_scale", multiplier) != multiplier:
        raise wrong(path, "logit_scale", config["logit_scale"], f"{multiplier}, as output_multiplier")
    return DrafterSpec(
        **sizes_of(path, config),
        num_taps=len(taps),
        block_size=block_size,
        mask_token_id=lookup(path, config, "mask_token_id"),
        tap_layers=taps,
        num_target_layers=lookup(path, config, "num_target_layers"),
        attention=Layout(layer_types=names, window=window, causal=causal_of(path, config)).attention(),
        embedding_scale=own.get("input_embedding_scale", config.get("input_embedding_scale", 1.0)),
        output_multiplier=multiplier,
        logit_softcap=own.get("final_logit_softcapping", config.get("final_logit_softcapping")),
        slot_meaning=own.get("slot_meaning", SLOT_MEANING),
    )


def causal_of(path: Path, config: Mapping[str, Any]) -> str:
    """Which layers are causal inside the block; without a key it is the sliding ones (dflash-spec 1.4).

    z-lab's runtime reads `is_causal` at the top level alone. `causal` is vLLM's key, in either place.
    """
    own, given = config.get("dflash_config") or {}, config.get("is_causal")
    if own.get("is_causal", given) != given:
        raise wrong(path, "dflash_config.is_causal", own["is_causal"], f"{given}, as at the top level")
    of_vllm = own.get("causal", config.get("causal"))
    if None not in (given, of_vllm) and bool(given) != bool(of_vllm):
        raise wrong(path, "causal", of_vllm, f"{given}, as is_causal")
    if given or of_vllm:
        return ALL
    return OF_SLIDING if given is None else NONE
