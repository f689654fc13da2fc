"""What each engine makes of an exported config: whether it would run the drafter as trained, and how it is started.

Sources: dflash 0.1.0 (model.py), vLLM 0.32.0 (models/qwen3_dflash.py, configs/speculators/algos.py), SGLang of
2026-09 (models/dflash.py, speculative/dflash_utils.py). Knows configs and specs; starts nothing.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ... import UserError
from ..kinds import SLIDING, AttentionKind, describe
from ..spec import DrafterSpec
from .config import SGLANG, SPECULATORS, VLLM, ZLAB
from .formats import leaves

NAMES = {SGLANG: "SGLang", VLLM: "vLLM"}
UNREAD = {
    SGLANG: {"embedding_scale": 1.0, "output_multiplier": 1.0, "logit_softcap": None},
    VLLM: {"embedding_scale": 1.0, "logit_softcap": None},  # the multiplier it reads as logit_scale
}
"""What a spec may hold and an engine reads from no key, with the value that needs none."""

OF_LAYERS = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "rms_norm_eps", "rope_parameters.rope_theta", "rope_parameters.rope_type"),
    *("max_position_embeddings", "layer_types", "sliding_window", "attention_bias", "hidden_act"),
)
OF_DFLASH = ("architectures", "dflash_config.target_layer_ids", "dflash_config.mask_token_id", "model_type")
READ = {
    ZLAB: (*OF_LAYERS, *OF_DFLASH, "block_size", "use_sliding_window", "rope_theta", "attention_dropout"),
    SGLANG: (*OF_LAYERS, *OF_DFLASH, "dflash_config.block_size", "num_target_layers"),
    VLLM: (*OF_LAYERS, *OF_DFLASH),
    SPECULATORS: (
        *(f"transformer_layer_config.{name}" for name in (*OF_LAYERS, "use_sliding_window", "model_type")),
        *("speculators_model_type", "aux_hidden_state_layer_ids", "mask_token_id", "block_size", "draft_vocab_size"),
        *("sample_from_anchor", "sliding_window_non_causal", "speculators_config.algorithm"),
        *("speculators_config.proposal_methods", "speculators_config.default_proposal_method"),
        *("speculators_config.verifier.name_or_path", "speculators_config.verifier.architectures"),
    ),
}
"""The keys that the readers of a format take, all of which an export must have: without one they take a default."""


def missing_keys(served: str, config: Mapping[str, Any]) -> list[str]:
    """Keys that a reader of the format takes and the config lacks."""
    found = leaves(config)
    readers = (ZLAB, SGLANG, VLLM) if served == ZLAB else (served,)
    return [name for reader in readers for name in READ[reader] if name not in found]


def attention_in_sglang(config: Mapping[str, Any]) -> tuple[AttentionKind, ...]:
    """Sliding layers causal inside the block, full ones not, whatever else the config says."""
    window = config["sliding_window"]
    return tuple(AttentionKind(window, True) if name == SLIDING else AttentionKind() for name in config["layer_types"])


def attention_in_vllm(config: Mapping[str, Any]) -> tuple[AttentionKind, ...]:
    """`is_causal` for all layers, else `dflash_config.causal` for all, else the sliding ones are causal."""
    given = config.get("is_causal", config["dflash_config"].get("causal"))
    window = config["sliding_window"]
    return tuple(
        AttentionKind(window if name == SLIDING else None, name == SLIDING if given is None else given)
        for name in config["layer_types"]
    )


def require_served(served: str, config: Mapping[str, Any], spec: DrafterSpec) -> None:
    """Raises UserError where the engine of a format would run another drafter than was trained.

    The format of z-lab promises nothing of other engines, that of speculators is checked where it is written.
    """
    if served not in NAMES:
        return
    if reason := refusal(served, config, spec):
        raise UserError(
            f"{NAMES[served]} would not run this drafter as trained: {reason}",
            f"a drafter that {NAMES[served]} runs as trained",
            "export with --format zlab for another engine, or train a drafter with other layers",
        )


def refusal(engine: str, config: Mapping[str, Any], spec: DrafterSpec) -> str | None:
    """Why an engine would run another drafter from z-lab's config; None where it runs the one that was trained."""
    for name, plain in UNREAD[engine].items():
        if getattr(spec, name) != plain:
            return f"it reads no key for the target's {name} = {getattr(spec, name)}"
    found = (attention_in_sglang if engine == SGLANG else attention_in_vllm)(config)
    if found != spec.attention:
        return f"it would run {describe(found)}, and this drafter was trained with {describe(spec.attention)}"
    return None


def is_mixed(attention: Sequence[AttentionKind]) -> bool:
    """Whether some layers slide and others do not."""
    return len({kind.window is None for kind in attention}) > 1


def serving_notes(served: str, config: Mapping[str, Any], spec: DrafterSpec) -> list[str]:
    """What the commands leave out, and why; what an engine needs."""
    notes = []
    for engine, name in NAMES.items():
        reason = refusal(engine, config, spec) if served == ZLAB else None
        notes += [f"no command for {name}: {reason}"] if reason else []
    if is_mixed(spec.attention) and served != SGLANG:
        notes.append("full and sliding layers together need vLLM's V2 model runner: VLLM_USE_V2_MODEL_RUNNER=1")
    if served == SPECULATORS and any(kind.window is not None for kind in spec.attention):
        notes.append(
            "the speculators library measures the window from the anchor for the whole block, vLLM and this package "
            "from each slot"
        )
    return notes


def is_packaged(name: str) -> bool:
    """True for the name of a target that comes with this package: ours alone, no engine knows it."""
    return "/" not in name


def engine_name(name: str, shown: str) -> str:
    """The target called `name` as commands for engines call it: `shown`, or what stands for a folder of the user's."""
    return "TARGET_FOLDER" if is_packaged(name) else shown


def serving_commands(
    served: str, config: Mapping[str, Any], spec: DrafterSpec, target: str, folder: str
) -> tuple[str, ...]:
    """How the engines of a format are started with the drafter in `folder`; `target` as they look it up."""
    prefix = "VLLM_USE_V2_MODEL_RUNNER=1 " if is_mixed(spec.attention) else ""
    speculative = json.dumps({"method": "dflash", "model": folder, "num_speculative_tokens": spec.block_size - 1})
    target, folder, speculative = map(shlex.quote, (target, folder, speculative))
    if served == SPECULATORS:
        return (f"{prefix}vllm serve {folder}",)
    commands = {
        VLLM: f"{prefix}vllm serve {target} --speculative-config {speculative}",
        SGLANG: f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {folder}",
    }
    wanted = [served] if served in NAMES else list(commands)
    return tuple(commands[engine] for engine in wanted if refusal(engine, config, spec) is None)
