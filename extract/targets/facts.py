"""Reads a target's facts from its config and tokenizer, without loading weights.

Knows transformers' config and tokenizer classes; builds no model and opens tensor files only
to fingerprint them.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from ... import UserError
from .base import TargetFacts
from .fingerprint import text_sha256, tokenizer_sha256, weights_sha256
from .source import Source, check_tensor_files, locate, tensor_files

CROPPABLE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}


def load_tokenizer(name: str) -> Any:
    """The target's own tokenizer. Raises UserError when the target holds none."""
    return tokenizer_of(locate(name, weights=False))


def tokenizer_of(source: Source) -> Any:
    from transformers import AutoTokenizer

    options = {"gguf_file": source.gguf} if source.gguf else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, local_files_only=True, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"target {source.name!r} has no tokenizer that transformers can load: {first_line(error)}",
            "tokenizer.json (or what its class needs) beside config.json",
            "copy the target's tokenizer files into its folder",
        ) from error
    if not len(tokenizer) or not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise UserError(  # what transformers 5 makes of a config.json without tokenizer files
            f"target {source.name!r} has an empty tokenizer ({len(tokenizer)} tokens): its files are missing",
            "tokenizer.json (or what its class needs) beside config.json",
            "copy the target's tokenizer files into its folder",
        )
    return tokenizer


def config_of(source: Source) -> Any:
    """The target's config as transformers reads it, the nested text config not yet taken out."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    options = {"gguf_file": source.gguf} if source.gguf else {}
    try:
        config = AutoConfig.from_pretrained(source.folder, local_files_only=True, **options)
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError, StrictDataclassError) as error:
        raise UserError(
            f"target {source.name!r} has a config that transformers cannot read: {first_line(error)}",
            "the config.json of a causal language model known to the installed transformers",
            "update transformers, or choose another target",
        ) from error
    if text_config(config) is not config:
        settle_tie(source, text_config(config))
    return config


def settle_tie(source: Source, text: Any) -> None:
    """A head tied to the embedding may be stated beside a nested text config, inside it, or in both places.

    transformers reads the inner place for the text part alone, the outer one for the whole model. Raises
    UserError, naming both, where they contradict each other.
    """
    raw = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
    inner = next((raw[name] for name in ("text_config", "llm_config", "language_config") if name in raw), {})
    stated = [part.get("tie_word_embeddings") for part in (raw, inner)]
    if None not in stated and stated[0] != stated[1]:
        raise UserError(
            f"target {source.name!r}: tie_word_embeddings is {stated[0]} in config.json and "
            f"{stated[1]} in its text_config",
            "one value in both places",
            "set both to what the tensor files say: False where they hold a head of their own",
        )
    if stated[1] is None and stated[0] is not None:
        text.tie_word_embeddings = stated[0]


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    """The part of TargetFacts that the tokenizer alone decides, eos_ids with one id at most."""
    ids = tokenizer.get_vocab().values()
    special = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    return {
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "template_sha256": text_sha256(getattr(tokenizer, "chat_template", None)),
        "tokenizer_size": max(ids) + 1,
        "special_ids": tuple(sorted(special)),
        "pad_id": tokenizer.pad_token_id,
        "bos_id": tokenizer.bos_token_id,
        "eos_ids": () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,),
        "mask_id": mask_id_of(tokenizer, special),
    }


def mask_id_of(tokenizer: Any, special: set[int]) -> int | None:
    """The declared mask token, else the only special token whose text holds 'mask', else None."""
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    named = [i for i in sorted(special) if "mask" in str(tokenizer.convert_ids_to_tokens(i)).lower()]
    return named[0] if len(named) == 1 else None


def stop_ids(source: Source, config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end an answer: the tokenizer's eos, then those of generation config and config.

    An id of the two configs counts only when it is special to the tokenizer: config classes
    have defaults that are ordinary tokens of other vocabularies.
    """
    facts = tokenizer_facts(tokenizer)
    path = source.folder / "generation_config.json"
    named: list[Any] = []
    if source.gguf is None and path.is_file():
        try:
            named.append(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"))
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise UserError(
                f"target {source.name!r}: generation_config.json cannot be read: {first_line(error)}",
                "a JSON object",
                "copy or download that file again",
            ) from error
    named += [getattr(config, "eos_token_id", None), getattr(text_config(config), "eos_token_id", None)]
    found = list(facts["eos_ids"])
    for value in named:
        for token in value if isinstance(value, (list, tuple)) else [value]:
            if token in facts["special_ids"] and token not in found:
                found.append(int(token))
    return tuple(found)


def text_config(config: Any) -> Any:
    """The config of the decoder itself; targets with vision nest it under text_config."""
    return config.get_text_config(decoder=True)


def is_quantized(config: Any) -> bool:
    return quantization_of(config) is not None


def quantization_of(config: Any) -> str | None:
    """How the tensor files are quantized ('fp8', 'mxfp4'), by the config's own word; None for plain weights."""
    found = first_of(config, ("quantization_config",), None) or first_of(
        text_config(config), ("quantization_config",), None
    )
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method))


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSide:
    """What turning chats into samples needs of a target: no weights, no fingerprint of them."""

    name: str
    tokenizer: Any
    tokenizer_sha256: str
    template_sha256: str
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_positions: int


def read_text_side(name: str) -> TextSide:
    """The tokenizer, its fingerprints and the limits that the config sets."""
    source = locate(name, weights=False)
    config, tokenizer = config_of(source), tokenizer_of(source)
    facts = tokenizer_facts(tokenizer)
    return TextSide(
        name=source.name,
        tokenizer=tokenizer,
        tokenizer_sha256=facts["tokenizer_sha256"],
        template_sha256=facts["template_sha256"],
        special_ids=facts["special_ids"],
        eos_ids=stop_ids(source, config, tokenizer),
        vocab_size=int(text_config(config).vocab_size),
        max_positions=int(text_config(config).max_position_embeddings),
    )


def read_facts(name: str, dtype: str = "auto", device: str = "cpu") -> TargetFacts:
    """All facts of a target; reads at most 64 MiB of each tensor file and no weights to memory."""
    source = locate(name, weights=True)
    return facts_of(source, config_of(source), tokenizer_of(source), resolve_dtype(dtype, device))


def resolve_dtype(dtype: str, device: str) -> str:
    """'auto' is float32 on a CPU and bfloat16 elsewhere; anything else stands."""
    if dtype != "auto":
        return dtype
    return "float32" if str(device).startswith("cpu") else "bfloat16"


def facts_of(source: Source, config: Any, tokenizer: Any, dtype: str) -> TargetFacts:
    text = text_config(config)
    hidden = int(text.hidden_size)
    heads = int(text.num_attention_heads)
    eps = first_of(text, ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps"), 1e-6)
    files = tensor_files(source)
    check_tensor_files(source, files)
    parts: dict[str, Any] = tokenizer_facts(tokenizer) | {"eos_ids": stop_ids(source, config, tokenizer)}
    return TargetFacts(
        name=source.name,
        revision=source.revision,
        weights_sha256=weights_sha256(files),
        architecture=(getattr(config, "architectures", None) or [type(config).__name__])[0],
        num_layers=int(text.num_hidden_layers),
        hidden_size=hidden,
        vocab_size=int(text.vocab_size),
        num_heads=heads,
        num_kv_heads=int(first_of(text, ("num_key_value_heads",), heads)),
        head_dim=int(first_of(text, ("head_dim",), hidden // heads)),
        intermediate_size=widest(first_of(text, ("intermediate_size",), 4 * hidden)),
        rms_norm_eps=float(eps),
        rope=rope_of(text),
        max_positions=int(text.max_position_embeddings),
        is_tied=bool(first_of(text, ("tie_word_embeddings",), False)),
        is_recurrent=is_recurrent(text),
        **scales_of(text, hidden),
        dtype=dtype,
        **parts,
    )


def first_of(config: Any, names: tuple[str, ...], default: Any) -> Any:
    """The first of these attributes that is there and not None."""
    found = (value_of(config, name) for name in names)
    return next((value for value in found if value is not None), default)


def value_of(config: Any, name: str) -> Any:
    """An attribute or None; where layers differ in it (Gemma 4's head_dim), that of the first layer.

    transformers raises a RuntimeError of its own for those.
    """
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return getattr(config.per_layer_config[0], name, None)


def widest(size: Any) -> int:
    """A number, or the largest of a list with one for each layer."""
    return max(size) if isinstance(size, (list, tuple)) else int(size)


def rope_of(text: Any) -> dict[str, Any]:
    """The rotary settings of full-attention layers, with rope_theta and rope_type."""
    rope = first_of(text, ("rope_parameters", "rope_scaling"), {})
    if isinstance(rope.get("full_attention"), dict):
        rope = rope["full_attention"]
    plain = {key: value for key, value in dict(rope).items() if value is not None}
    plain.setdefault("rope_type", "default")
    plain.setdefault("rope_theta", float(first_of(text, ("rope_theta",), 10000.0)))
    return json.loads(json.dumps(plain))


def is_recurrent(text: Any) -> bool:
    """True when a layer keeps a running state: cropping its cache does not take a token back."""
    types = getattr(text, "layer_types", None)
    if types is not None and any(kind not in CROPPABLE_LAYERS for kind in types):
        return True
    from transformers import DynamicCache

    return any("Linear" in type(layer).__name__ for layer in DynamicCache(config=text).layers)


def scales_of(text: Any, hidden: int) -> dict[str, Any]:
    """What a family does to embedding rows and logits; `HfTarget.frozen` checks it on the model.

    Sources: modelling code of transformers 5.24 (gemma*: rows times sqrt(H); granite:
    embedding_multiplier, logits divided by logits_scaling; cohere: logits times logit_scale).
    """
    scale = math.sqrt(hidden) if str(text.model_type).startswith("gemma") else 1.0
    multiplier = first_of(text, ("logit_scale", "lm_head_multiplier"), 1.0) / first_of(text, ("logits_scaling",), 1.0)
    return {
        "embedding_scale": float(first_of(text, ("embedding_multiplier",), scale)),
        "output_multiplier": float(multiplier),
        "logit_softcap": first_of(text, ("final_logit_softcapping",), None),
    }
