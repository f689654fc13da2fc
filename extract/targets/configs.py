"""A target's config: config.json as it stands and as transformers reads it, and what is said of one that will not do.

Knows transformers' config classes; no tokenizer, no tensor file, no model.
"""

import json
from collections.abc import Iterator
from typing import Any

from ... import UserError
from .fingerprint import text_sha256
from .source import Source

CONFIG_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    ImportError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)
"""What transformers' config classes raise for values that they do not expect."""
HARMLESS_KEYS = {
    *("_name_or_path", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype", "use_cache"),
    *("id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params", "tokenizer_class"),
    *("output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate", "initializer_range"),
}
"""Keys of config.json that change no state; `dtype` is a fact of its own."""
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kinds of layers that see so many tokens back, and the field that says how many."""
COUNTS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "max_position_embeddings")


def config_of(source: Source) -> Any:
    """The target's config as transformers reads it, the nested text config not yet taken out."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    options = {"gguf_file": source.gguf} if source.gguf else {}
    require_known_code(source)
    try:
        config = AutoConfig.from_pretrained(source.folder, local_files_only=True, trust_remote_code=False, **options)
    except CONFIG_ERRORS + (StrictDataclassError,) as error:
        raise UserError(
            f"target {source.name!r} has a config that transformers cannot read: {first_line(error)}",
            "the config.json of a causal language model known to the installed transformers",
            "update transformers, or choose another target",
        ) from error
    text = text_config(config)
    if isinstance(text, dict):
        raise UserError(
            f"target {source.name!r}: config.json holds {json.dumps(text)[:40]} as the part for its decoder, which a "
            f"{type(config).__name__} does not know",
            "a part like text_config in the config of a multimodal family alone",
            "drop that part, or copy or download config.json again",
        )
    if text is not config:
        settle_tie(source, text)
    return config


def raw_config(source: Source) -> dict[str, Any]:
    """config.json as it stands. Raises UserError for one that is no JSON object; a GGUF has none."""
    try:
        raw = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise TypeError(f"it holds {str(raw)[:40]}")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"target {source.name!r} has a config that transformers cannot read: {first_line(error)}",
            "config.json with a JSON object",
            "copy or download that file again",
        ) from error
    return raw


def config_sha256(source: Source) -> str | None:
    """Fingerprint of config.json, parsed, without the keys that change no state; None for a GGUF, which has none.

    Spaces and the order of keys do not count; parts like text_config count whole.
    """
    if source.gguf:
        return None
    return text_sha256({key: value for key, value in raw_config(source).items() if key not in HARMLESS_KEYS})


def require_known_code(source: Source) -> None:
    """Refuses a family whose code lies beside its config: nothing of a target is run, and nobody is asked on stdin."""
    if source.gguf:
        return
    from transformers import CONFIG_MAPPING

    raw = raw_config(source)
    if raw.get("auto_map") and raw.get("model_type") not in CONFIG_MAPPING:
        raise UserError(
            f"target {source.name!r}: its config.json asks for code of its own (auto_map), and its model_type is "
            f"{raw.get('model_type')!r}",
            "a family that the installed transformers knows; code from a target's folder is never run",
            "update transformers, or choose another target",
        )


def settle_tie(source: Source, text: Any) -> None:
    """A head tied to the embedding may be stated beside a nested text config, inside it, or in both places.

    transformers reads the inner place for the text part alone, the outer one for the whole model. Raises
    UserError, naming both, where they contradict each other, and for a nested part that cannot be looked at.
    """
    if source.gguf:
        raise UserError(
            f"target {source.name!r}: this GGUF file gives a {type(text).__name__} inside another config",
            "a GGUF file of a family whose config is the decoder's alone",
            "give the transformers folder (config.json, *.safetensors) of this target",
        )
    raw = raw_config(source)
    where = next((name for name in ("text_config", "llm_config", "language_config") if name in raw), None)
    inner = raw[where] if where else {}
    if not isinstance(inner, dict):
        raise UserError(
            f"target {source.name!r}: {where} in its config.json is {json.dumps(inner)[:40]}",
            "the sizes of the decoder, a JSON object",
            "copy or download config.json again",
        )
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


def count_of(source: Source, config: Any, name: str) -> int:
    """A size that every decoder's config has. Raises UserError where it has none, or one below 1."""
    text = text_config(config)
    value = value_of(text, name)
    if isinstance(value, (int, float)) and value >= 1:
        return int(value)
    raise UserError(
        f"target {source.name!r}: its config ({type(text).__name__}) has {name} = {value}",
        f"a decoder with {', '.join(COUNTS)}",
        "correct config.json, or choose a target of a family in docs/targets.md",
    )


def require_usable_values(source: Source, config: Any) -> None:
    """Raises UserError for values that config classes let pass and that no model, or no cache, can be built from."""
    for wrong, expected in unusable_values(text_config(config), count_of(source, config, "vocab_size")):
        raise UserError(
            f"target {source.name!r}: its config.json says {wrong}",
            expected,
            "correct config.json, or copy or download it again",
        )


def unusable_values(text: Any, vocab_size: int) -> Iterator[tuple[str, str]]:
    """Such values of the decoder's config, each with what is expected."""
    pad, kinds = value_of(text, "pad_token_id"), value_of(text, "layer_types") or ()
    if isinstance(pad, int) and not -vocab_size <= pad < vocab_size:
        yield f"pad_token_id = {pad}", f"an id below vocab_size = {vocab_size}, or null"
    for kind, name in WINDOWS.items():
        if kind in kinds and not value_of(text, name):
            yield f"{name} = {json.dumps(value_of(text, name))} beside layers of {kind}", "a number of tokens"
    for name, value in numbers_as_text(first_of(text, ("rope_parameters", "rope_scaling"), {})):
        yield f"{name} = {value!r} among its rotary settings", "a number without quotes"


def numbers_as_text(rope: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Rotary settings that are text and no name of a kind, also those of one kind of layer."""
    if isinstance(rope, dict):
        for key, value in rope.items():
            yield from numbers_as_text(value, str(key))
    elif isinstance(rope, (list, tuple)):
        for value in rope:
            yield from numbers_as_text(value, name)
    elif isinstance(rope, str) and name not in ("rope_type", "type"):
        yield name, rope


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
