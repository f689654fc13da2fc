"""The keys of a Qwen3 config, which both served formats share: sizes, rotary base, what each layer sees.

The layers are said in z-lab's words (`layer_types`, `sliding_window`); which of them are causal inside the block each
format says in its own way. Knows configs and specs; no file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ... import UserError
from ..kinds import FULL, SLIDING, Layout, describe, layout_of
from ..spec import DrafterSpec
from ..value_rules import is_whole
from .values import MOST_LAYERS, flag, lookup, positive, whole, wrong

PLAIN = {
    "attention_bias": (False, None),
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "partial_rotary_factor": (1.0, None),
    "use_swa": (False, None),
    "swa_window_size": (None,),
    "is_neox_style": (True, None),
    "rope_is_neox_style": (True, None),
    "use_aux_hidden_state": (True, None),
    "attention_sink_bias": (False, None),
    "add_swa_attention_sink_bias": (False, None),
    "attention_value_scale": (1.0, None),
    "fc_norm": (False, None),
    "norm_output": (False, None),
    "projector_type": (None,),
    "quantization_config": (None,),
    "has_own_lm_head": (False, None),
}
"""Keys that an engine reads and that change the mathematics, with the values that mean what our drafter does."""
PLAIN_ROTATION = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}


def qwen3_keys(spec: DrafterSpec, layout: Layout, target: Mapping[str, Any]) -> dict[str, Any]:
    """The keys; `target` holds TargetFacts as a dict, for its token ids.

    No rotary setting of the target but its theta is taken over (dflash-spec 1.4).
    """
    eos_ids = list(target.get("eos_ids") or ())
    return {
        "num_target_layers": spec.num_target_layers,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": spec.rope_theta, "rope_type": "default"},
        "max_position_embeddings": spec.max_positions,
        "layer_types": list(layout.layer_types),
        "use_sliding_window": layout.window is not None,
        "sliding_window": layout.window,
        "max_window_layers": [*layout.layer_types, SLIDING].index(SLIDING),  # layers before the first sliding one
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": target.get("bos_id"),
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
        "pad_token_id": target.get("pad_id"),
    }


def expressible_layout(spec: DrafterSpec) -> Layout:
    """The layers in the formats' words. Raises UserError where they have none for them."""
    layout = layout_of(spec.attention)
    if layout is None:
        raise UserError(
            f"attention of {describe(spec.attention)} cannot be written in a served format",
            "one window for all sliding layers; causal no layer, the sliding ones, or all",
            "train a drafter with such layers",
        )
    if layout.window is not None and layout.window < spec.block_size:
        raise UserError(
            f"a window of {layout.window} with blocks of {spec.block_size} cannot be served",
            f"a window of at least {spec.block_size}: z-lab's runtime applies the window inside the block too",
            "train a drafter with a larger window or smaller blocks",
        )
    return layout


def sizes_of(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of DrafterSpec that these keys hold, all but what the layers see."""
    return {
        "hidden_size": whole(path, config, "hidden_size"),
        "intermediate_size": whole(path, config, "intermediate_size"),
        "num_layers": whole(path, config, "num_hidden_layers", 1, MOST_LAYERS),
        "num_heads": whole(path, config, "num_attention_heads"),
        "num_kv_heads": whole(path, config, "num_key_value_heads"),
        "head_dim": whole(path, config, "head_dim"),
        "vocab_size": whole(path, config, "vocab_size"),
        "rms_norm_eps": positive(path, "rms_norm_eps", lookup(path, config, "rms_norm_eps")),
        "rope_theta": float(theta_of(path, config)),
        "max_positions": whole(path, config, "max_position_embeddings"),
    }


def require_plain(path: Path, config: Mapping[str, Any]) -> None:
    """Refuses settings that this package's drafter does not have, in `dflash_config` and at the top level."""
    for place in (config.get("dflash_config") or {}, config):
        for name, values in PLAIN.items():
            if name in place and place[name] not in values:
                raise wrong(path, name, place[name], f"{values[0]}: this package's drafter has nothing else")


def layers_of(path: Path, config: Mapping[str, Any], block_size: int) -> tuple[tuple[str, ...], int | None]:
    """FULL or SLIDING for each layer, and the window, as the runtimes take them (on a Qwen3Config).

    Where they would run something else than the keys say, the keys are refused.
    """
    num_layers, window = whole(path, config, "num_hidden_layers", 1, MOST_LAYERS), config.get("sliding_window")
    is_sliding = bool(flag(path, "use_sliding_window", config.get("use_sliding_window")))
    names = config.get("layer_types")
    if names is None:  # as Qwen3Config fills them in
        first = config.get("max_window_layers", 28) if is_sliding and window is not None else num_layers
        if not is_whole(first):
            raise wrong(path, "max_window_layers", first, "a whole number")
        names = [SLIDING if i >= first else FULL for i in range(num_layers)]
    is_list = isinstance(names, list) and len(names) == num_layers
    if not is_list or any(name not in (SLIDING, FULL) for name in names):
        raise wrong(path, "layer_types", names, f"{SLIDING} or {FULL} for each of {num_layers} layers")
    if SLIDING not in names:
        window = None
    elif not is_sliding:
        raise wrong(path, "use_sliding_window", config.get("use_sliding_window"), "true, for the sliding layers")
    elif not isinstance(window, int) or isinstance(window, bool) or window < block_size:
        rule = "a number of at least block_size: z-lab's runtime applies the window inside the block too"
        raise wrong(path, "sliding_window", window, rule)
    return tuple(names), window


def theta_of(path: Path, config: Mapping[str, Any]) -> float:
    """The base of the rotary angles, from either of its two places.

    Without it each engine takes a number of its own (transformers 10000, vLLM 1000000), so it must be there.
    """
    parameters = config.get("rope_parameters") or {}
    for name, value in parameters.items():
        if name != "rope_theta" and value is not None and value != PLAIN_ROTATION.get(name):
            raise wrong(path, f"rope_parameters.{name}", value, PLAIN_ROTATION.get(name, "a plain rotation without it"))
    values = [value for value in (config.get("rope_theta"), parameters.get("rope_theta")) if value is not None]
    if not values or any(value != values[0] for value in values):
        raise wrong(path, "rope_theta", values, "one value, in rope_theta and rope_parameters")
    return positive(path, "rope_theta", values[0])
