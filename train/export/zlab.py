"""z-lab's drafter format: the keys of config.json, written and read. SGLang and vLLM load the same folder.

Knows configs and specs; the keys of the Qwen3 layers are in `qwen3.py`, the tensors in `tensors.py`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..kinds import ALL, FULL, NONE, OF_SLIDING, Layout
from ..spec import SLOT_MEANING, DrafterSpec
from .qwen3 import expressible_layout, layers_of, qwen3_keys, require_plain, sizes_of
from .values import flag, layer_ids, lookup, optional, positive, require_taps_below, whole, wrong

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
    require_plain(path, config)
    block_size, num_target_layers = whole(path, config, "block_size", 2), whole(path, config, "num_target_layers")
    taps = layer_ids(path, "target_layer_ids", lookup(path, config, "target_layer_ids"), 0)
    require_taps_below(path, taps, num_target_layers)
    names, window = layers_of(path, config, block_size)
    softcap, multiplier = optional(path, config, "final_logit_softcapping"), scale(path, config, "output_multiplier")
    if config.get("logit_scale", multiplier) != multiplier:
        raise wrong(path, "logit_scale", config["logit_scale"], f"{multiplier}, as output_multiplier")
    sizes = sizes_of(path, config)
    return DrafterSpec(
        **sizes,
        num_taps=len(taps),
        block_size=block_size,
        mask_token_id=whole(path, config, "mask_token_id", 0, sizes["vocab_size"] - 1),
        tap_layers=taps,
        num_target_layers=num_target_layers,
        attention=Layout(layer_types=names, window=window, causal=causal_of(path, config)).attention(),
        embedding_scale=scale(path, config, "input_embedding_scale"),
        output_multiplier=multiplier,
        logit_softcap=None if softcap is None else positive(path, "final_logit_softcapping", softcap),
        slot_meaning=optional(path, config, "slot_meaning") or SLOT_MEANING,
    )


def scale(path: Path, config: Mapping[str, Any], name: str) -> float:
    """A factor of the target, 1 where the config has none."""
    value = optional(path, config, name)
    return 1.0 if value is None else positive(path, name, value)


def causal_of(path: Path, config: Mapping[str, Any]) -> str:
    """Which layers are causal inside the block; without a key it is the sliding ones (dflash-spec 1.4).

    z-lab's runtime reads `is_causal` at the top level alone. `causal` is vLLM's key, in either place.
    """
    own, given = config.get("dflash_config") or {}, flag(path, "is_causal", config.get("is_causal"))
    if own.get("is_causal", given) != given:
        raise wrong(path, "dflash_config.is_causal", own["is_causal"], f"{given}, as at the top level")
    of_vllm = flag(path, "causal", optional(path, config, "causal"))
    if None not in (given, of_vllm) and bool(given) != bool(of_vllm):
        raise wrong(path, "causal", of_vllm, f"{given}, as is_causal")
    if given or of_vllm:
        return ALL
    return OF_SLIDING if given is None else NONE
