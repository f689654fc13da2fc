"""z-lab's drafter format: names and shapes of the tensors, keys of config.json, and how to read it.

The one place where names from elsewhere (`target_layer_ids`, `num_hidden_layers`) appear. SGLang
and vLLM load the same folder. SGLang skips tensor names that it does not know without a word, so
names and shapes are checked here, in both directions. Knows no run and no store.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ... import UserError
from ..kinds import ALL, FULL, NONE, OF_SLIDING, SLIDING, AttentionKind, Layout, describe, layout_of
from ..spec import SLOT_MEANING, DrafterSpec

CONFIG_NAME, TENSORS_NAME = "config.json", "model.safetensors"
ARCHITECTURE = "DFlashDraftModel"
SHOWN_NAMES = 4


def tensor_shapes(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of all 11 * L + 3 tensors (dflash-spec 1.2)."""
    hidden, inner, width = spec.hidden_size, spec.intermediate_size, spec.head_dim
    queries, keys = spec.num_heads * width, spec.num_kv_heads * width
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (width,),
        "self_attn.k_norm.weight": (width,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, spec.num_taps * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    return shapes | {f"layers.{i}.{name}": shape for i in range(spec.num_layers) for name, shape in layer.items()}


def num_parameters(spec: DrafterSpec) -> int:
    """Trained numbers of a drafter, by the formula of dflash-spec 1.6."""
    hidden, width = spec.hidden_size, spec.head_dim
    attention = 2 * hidden * spec.num_heads * width + 2 * hidden * spec.num_kv_heads * width + 2 * width
    layer = attention + 3 * hidden * spec.intermediate_size + 2 * hidden
    return spec.num_layers * layer + spec.num_taps * hidden**2 + 2 * hidden


def zlab_config(spec: DrafterSpec, target: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The content of config.json; `target` holds TargetFacts as a dict, for its token ids.

    No rotary setting of the target but its theta is taken over (dflash-spec 1.4). Raises UserError for
    attention that the format cannot say.
    """
    layout = expressible_layout(spec)
    eos_ids = list(target.get("eos_ids") or ())
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": spec.block_size,
        "dflash_config": dflash_config(spec, layout),
        **causal_key(layout),
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
        "dtype": dtype,
    }


def expressible_layout(spec: DrafterSpec) -> Layout:
    """The layers in the format's words. Raises UserError where it has none for them."""
    layout = layout_of(spec.attention)
    if layout is None:
        raise UserError(
            f"attention of {describe(spec.attention)} cannot be written in z-lab's format",
            "one window for all sliding layers; causal no layer, the sliding ones, or all",
            "train a drafter with such layers",
        )
    if layout.window is not None and layout.window < spec.block_size:
        raise UserError(
            f"a window of {layout.window} with blocks of {spec.block_size} cannot be written in z-lab's format",
            f"a window of at least {spec.block_size}: its runtime applies the window inside the block too",
            "train a drafter with a larger window or smaller blocks",
        )
    return layout


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


def read_zlab(folder: Path) -> tuple[DrafterSpec, dict[str, Tensor]]:
    """The spec and the tensors of an exported drafter.

    Raises UserError for a folder that is none, for another layout or architecture, for settings
    that this package's drafter does not have, for keys that contradict each other, and for
    tensors that are missing, unknown or of the wrong shape.
    """
    with told_by(folder):
        spec = read_zlab_spec(folder)
        return spec, load_file(folder / TENSORS_NAME)


def read_zlab_spec(folder: Path) -> DrafterSpec:
    """The spec alone, without reading a tensor's bytes; raises UserError as `read_zlab`."""
    path = folder / CONFIG_NAME
    with told_by(folder):
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG_NAME} is a {type(config).__name__}")
        spec = spec_of(path, config)
        with safe_open(folder / TENSORS_NAME, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    check_tensors(folder, spec, found)
    return spec


@contextmanager
def told_by(folder: Path) -> Iterator[None]:
    """Turns what reading the folder raises into a UserError that names it."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        happened = f"{str(folder)!r} cannot be read: {type(error).__name__}: {error}".replace("\n", " ")
        raise UserError(happened, f"a folder with {CONFIG_NAME} and {TENSORS_NAME}", "export again") from error


def check_tensors(folder: Path, spec: DrafterSpec, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UserError unless names and shapes are exactly those of the spec."""
    wanted = tensor_shapes(spec)
    faults = [f"{name} is missing" for name in wanted if name not in found]
    faults += [f"{name} is unknown" for name in found if name not in wanted]
    faults += [f"{n} has shape {found[n]}, not {s}" for n, s in wanted.items() if n in found and found[n] != s]
    if faults:
        more = f" and {len(faults) - SHOWN_NAMES} more" if len(faults) > SHOWN_NAMES else ""
        raise UserError(
            f"the tensors of {str(folder)!r} do not fit its config: {'; '.join(faults[:SHOWN_NAMES])}{more}",
            f"the {len(wanted)} tensors of a drafter with {spec.num_layers} layers and {spec.num_taps} taps",
            "export again",
        )


def spec_of(path: Path, config: Mapping[str, Any]) -> DrafterSpec:
    """The drafter that a config.json describes."""
    own = config.get("dflash_config") or {}
    require_same_layout(path, config, own)
    attention = attention_of(path, config)
    taps = tuple(lookup(path, config, "target_layer_ids"))
    return DrafterSpec(
        hidden_size=lookup(path, config, "hidden_size"),
        intermediate_size=lookup(path, config, "intermediate_size"),
        num_layers=lookup(path, config, "num_hidden_layers"),
        num_heads=lookup(path, config, "num_attention_heads"),
        num_kv_heads=lookup(path, config, "num_key_value_heads"),
        head_dim=lookup(path, config, "head_dim"),
        num_taps=len(taps),
        vocab_size=lookup(path, config, "vocab_size"),
        rms_norm_eps=lookup(path, config, "rms_norm_eps"),
        rope_theta=float(theta_of(path, config)),
        block_size=lookup(path, config, "block_size"),
        mask_token_id=lookup(path, config, "mask_token_id"),
        tap_layers=taps,
        num_target_layers=lookup(path, config, "num_target_layers"),
        max_positions=lookup(path, config, "max_position_embeddings"),
        attention=attention,
        embedding_scale=own.get("input_embedding_scale", config.get("input_embedding_scale", 1.0)),
        output_multiplier=own.get("output_multiplier", config.get("output_multiplier", 1.0)),
        logit_softcap=own.get("final_logit_softcapping", config.get("final_logit_softcapping")),
        slot_meaning=own.get("slot_meaning", SLOT_MEANING),
    )


def require_same_layout(path: Path, config: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuses other architectures, other slot layouts and what this package's drafter does not have."""
    if config.get("architectures") != [ARCHITECTURE]:
        raise wrong(path, "architectures", config.get("architectures"), [ARCHITECTURE])
    for name in ("shift_label", "sample_from_anchor"):
        if own.get(name, config.get(name)):
            raise wrong(path, name, True, f"absent or false: {SLOT_MEANING}")
    plain = {"attention_bias": False, "hidden_act": "silu", "rope_scaling": None, "partial_rotary_factor": 1.0}
    for name, value in plain.items():
        if config.get(name, value) != value:
            raise wrong(path, name, config[name], value)


def attention_of(path: Path, config: Mapping[str, Any]) -> tuple[AttentionKind, ...]:
    """The kind of each layer, as z-lab's runtime takes it from these keys (dflash 0.1.0, on a Qwen3Config).

    Where it would run something else than the keys say, they are refused.
    """
    num_layers, window = lookup(path, config, "num_hidden_layers"), config.get("sliding_window")
    is_sliding = bool(config.get("use_sliding_window"))
    names = config.get("layer_types")
    if names is None:  # as Qwen3Config fills them in
        first = config.get("max_window_layers", 28) if is_sliding and window is not None else num_layers
        names = [SLIDING if i >= first else FULL for i in range(num_layers)]
    if len(names) != num_layers or not set(names) <= {SLIDING, FULL}:
        raise wrong(path, "layer_types", names, f"{SLIDING} or {FULL} for each of {num_layers} layers")
    if SLIDING not in names:
        window = None
    elif not is_sliding:
        raise wrong(path, "use_sliding_window", config.get("use_sliding_window"), "true, for the sliding layers")
    elif not isinstance(window, int) or window < lookup(path, config, "block_size"):
        rule = "a number of at least block_size: z-lab's runtime applies the window inside the block too"
        raise wrong(path, "sliding_window", window, rule)
    return Layout(layer_types=tuple(names), window=window, causal=causal_of(path, config)).attention()


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


def theta_of(path: Path, config: Mapping[str, Any]) -> float:
    """The base of the rotary angles, from either of its two places."""
    parameters = config.get("rope_parameters") or {}
    if parameters.get("rope_type", "default") != "default":
        raise wrong(path, "rope_parameters.rope_type", parameters["rope_type"], "default")
    values = {config.get("rope_theta"), parameters.get("rope_theta")} - {None}
    if len(values) != 1:
        raise wrong(path, "rope_theta", sorted(values), "one value, in rope_theta and rope_parameters")
    return values.pop()


def lookup(path: Path, config: Mapping[str, Any], name: str) -> Any:
    """A required key: in `dflash_config`, then at the top; both must agree where both are there."""
    places = [place[name] for place in (config.get("dflash_config") or {}, config) if place.get(name) is not None]
    if not places or any(value != places[0] for value in places):
        raise wrong(path, name, places or None, "one value, in dflash_config or at the top level")
    return places[0]


def wrong(path: Path, name: str, value: Any, expected: Any) -> UserError:
    return UserError(
        f"{str(path)!r} has {name} = {value!r}", f"{expected}", "give a folder that `dflash export` or z-lab wrote"
    )
