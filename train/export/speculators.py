"""The speculators format: the keys of config.json, written and read. vLLM serves such a folder with one argument.

Two programs read it, the speculators library (0.9.0) and vLLM (0.32.0), and they part in one point: with
`sliding_window_non_causal` false the library makes the sliding layers causal inside the block, vLLM all layers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ... import UserError
from ..kinds import NONE, OF_SLIDING, Layout, describe
from ..spec import DrafterSpec
from ..value_rules import is_whole
from .qwen3 import expressible_layout, layers_of, qwen3_keys, require_plain, sizes_of
from .values import flag, layer_ids, lookup, require_taps_below, whole, wrong

MODEL_TYPE, VERSION, ARCHITECTURE = "dflash", "0.9.0", "DFlashDraftModel"
QUIRKS = {"embedding_scale": 1.0, "output_multiplier": 1.0, "logit_softcap": None}  # which the format has no key for


def speculators_config(spec: DrafterSpec, target: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The content of config.json; `target` holds TargetFacts as a dict, its name as vLLM shall look it up.

    Raises UserError for what the format cannot say: some attention, and what the target does to embedding and logits.
    """
    require_no_quirks(spec)
    layout = expressible_layout(spec)
    is_non_causal = layout.causal == NONE
    if not is_non_causal and not all(kind.is_causal and kind.window is not None for kind in spec.attention):
        raise UserError(
            f"attention of {describe(spec.attention)} cannot be served from the speculators format: its one key makes "
            "the sliding layers causal in the speculators library and all layers in vLLM",
            "layers that are all sliding and causal inside the block, or none of them causal",
            "export with --format vllm, which says it layer by layer",
        )
    layers = qwen3_keys(spec, layout, target)
    del layers["rope_scaling"]
    return {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": MODEL_TYPE,
        "speculators_version": VERSION,
        "speculators_config": proposal_config(spec, target),
        "aux_hidden_state_layer_ids": [layer + 1 for layer in spec.tap_layers],  # counted from the embedding's output
        "mask_token_id": spec.mask_token_id,
        "block_size": spec.block_size,
        "draft_vocab_size": spec.vocab_size,
        "target_hidden_size": None,
        "sample_from_anchor": False,
        "sliding_window_non_causal": is_non_causal,
        "transformer_layer_config": {"model_type": "qwen3", **layers, "dtype": dtype},
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def require_no_quirks(spec: DrafterSpec) -> None:
    """Refuses a target whose embedding or logits are scaled: neither reader of this format would do it."""
    for name, plain in QUIRKS.items():
        if getattr(spec, name) != plain:
            raise UserError(
                f"the target has {name} = {getattr(spec, name)}, and the speculators format has no key for it",
                f"{name} = {plain}, as most targets have it",
                "export with --format zlab, whose runtime reads it",
            )


def proposal_config(spec: DrafterSpec, target: Mapping[str, Any]) -> dict[str, Any]:
    """`speculators_config`: how many tokens are drafted, and for which target."""
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": spec.block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": MODEL_TYPE,
        "proposal_methods": [method],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": target["name"], "architectures": [target["architecture"]]},
    }


def spec_of_speculators(path: Path, config: Mapping[str, Any]) -> DrafterSpec:
    """The drafter that a config.json describes, as the speculators library trains and runs it.

    Where the config does not say how many layers the target has, `num_target_layers` is the fewest that its taps
    allow (see `states_num_target_layers`). Raises UserError for settings that this package's drafter does not have,
    and for keys that contradict each other.
    """
    layers = lookup(path, config, "transformer_layer_config")
    for place in (config, layers):
        require_plain(path, place)
    require_names(path, config)
    block_size = whole(path, config, "block_size", 2)
    ids = layer_ids(path, "aux_hidden_state_layer_ids", lookup(path, config, "aux_hidden_state_layer_ids"), 1)
    require_full_vocabulary(path, config, layers)
    require_proposals(path, config, block_size)
    names, window = layers_of(path, layers, block_size)
    taps = tuple(layer - 1 for layer in ids)  # the output of layer 0 has number 1
    known = states_num_target_layers(config)
    num_target_layers = whole(path, layers, "num_target_layers") if known else max(taps) + 2
    require_taps_below(path, taps, num_target_layers)
    is_non_causal = flag(path, "sliding_window_non_causal", config.get("sliding_window_non_causal"))
    causal, sizes = NONE if is_non_causal else OF_SLIDING, sizes_of(path, layers)
    return DrafterSpec(
        **sizes,
        num_taps=len(taps),
        block_size=block_size,
        mask_token_id=whole(path, config, "mask_token_id", 0, sizes["vocab_size"] - 1),
        tap_layers=taps,
        num_target_layers=num_target_layers,
        attention=Layout(layer_types=names, window=window, causal=causal).attention(),
    )


def states_num_target_layers(config: Mapping[str, Any]) -> bool:
    """Whether the config says how many layers the target has; the speculators library itself does not write it."""
    return bool((config.get("transformer_layer_config") or {}).get("num_target_layers"))


def require_full_vocabulary(path: Path, config: Mapping[str, Any], layers: Mapping[str, Any]) -> None:
    """Refuses a drafter with a vocabulary or a width other than its target's."""
    vocabulary, hidden = layers.get("vocab_size"), layers.get("hidden_size")
    if config.get("draft_vocab_size", vocabulary) != vocabulary:
        raise wrong(path, "draft_vocab_size", config["draft_vocab_size"], f"{vocabulary}, the target's vocabulary")
    if config.get("target_hidden_size") not in (None, hidden):
        raise wrong(path, "target_hidden_size", config["target_hidden_size"], f"null or {hidden}, the drafter's own")


def require_proposals(path: Path, config: Mapping[str, Any], block_size: int) -> None:
    """Refuses numbers of drafted tokens that a block does not hold."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or []
    if not isinstance(methods, list) or not all(isinstance(method, dict) for method in methods):
        raise wrong(path, "proposal_methods", methods, "a list of objects")
    for method in methods:
        count = method.get("speculative_tokens")
        if count is not None and not (is_whole(count) and 1 <= count < block_size):
            rule = f"1 to {block_size - 1}: the anchor of a block of {block_size} is known"
            raise wrong(path, "speculative_tokens", count, rule)


def require_names(path: Path, config: Mapping[str, Any]) -> None:
    """Refuses what is no name of a target, and no list of architectures."""
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    name, architectures = verifier.get("name_or_path"), verifier.get("architectures") or []
    if name is not None and not isinstance(name, str):
        raise wrong(path, "verifier.name_or_path", name, "a name or a folder, or null")
    if not isinstance(architectures, list) or not all(isinstance(each, str) for each in architectures):
        raise wrong(path, "verifier.architectures", architectures, "a list of names")


def verifier_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the config says of its target: perhaps its name and its architecture."""
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    architectures = verifier.get("architectures") or [None]
    found = {"name": verifier.get("name_or_path"), "architecture": architectures[0]}
    return {name: value for name, value in found.items() if value}
