"""Reads a target's facts from its config and tokenizer, without loading weights.

Knows transformers' tokenizer classes and how families name their sizes; builds no model and opens tensor files only
to fingerprint them.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import UserError
from .base import TargetFacts
from .configs import (
    COUNTS,
    config_of,
    config_sha256,
    count_of,
    first_line,
    first_of,
    is_quantized,
    require_usable_values,
    text_config,
)
from .fingerprint import text_sha256, tokenizer_sha256, weights_sha256
from .headers import (
    check_tensor_files,
    require_matrix_shapes,
    require_one_place,
    require_plain_numbers,
    stored_tensors,
)
from .source import Source, locate, places_by_index, tensor_files

CROPPABLE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}
CROPPABLE_LAYERS |= {"deepseek_sparse_attention"}  # as transformers up to 5.17 at least calls the last of them


def load_tokenizer(name: str) -> Any:
    """The target's own tokenizer. Raises UserError when the target holds none."""
    return tokenizer_of(locate(name, weights=False))


def tokenizer_of(source: Source) -> Any:
    from transformers import AutoTokenizer

    options = {"gguf_file": source.gguf} if source.gguf else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.folder, local_files_only=True, trust_remote_code=False, **options
        )
    except Exception as error:  # the class that tokenizers raises for a file that it cannot read
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
        vocab_size=count_of(source, config, "vocab_size"),
        max_positions=count_of(source, config, "max_position_embeddings"),
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
    hidden, heads, num_layers, vocab_size, max_positions = (count_of(source, config, name) for name in COUNTS)
    eps = first_of(text, ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps"), 1e-6)
    is_tied = bool(first_of(text, ("tie_word_embeddings",), False))
    require_usable_values(source, config)
    files = sound_files(source, config, (vocab_size, hidden))
    parts: dict[str, Any] = tokenizer_facts(tokenizer) | {"eos_ids": stop_ids(source, config, tokenizer)}
    return TargetFacts(
        name=source.name,
        revision=source.revision,
        weights_sha256=weights_sha256(files),
        config_sha256=config_sha256(source),
        architecture=(getattr(config, "architectures", None) or [type(config).__name__])[0],
        num_layers=num_layers,
        hidden_size=hidden,
        vocab_size=vocab_size,
        num_heads=heads,
        num_kv_heads=int(first_of(text, ("num_key_value_heads",), heads)),
        head_dim=int(first_of(text, ("head_dim",), hidden // heads)),
        intermediate_size=widest(first_of(text, ("intermediate_size",), 4 * hidden)),
        rms_norm_eps=float(eps),
        rope=rope_of(text),
        max_positions=max_positions,
        is_tied=is_tied,
        is_recurrent=is_recurrent(text),
        **scales_of(text, hidden),
        dtype=dtype,
        **parts,
    )


def sound_files(source: Source, config: Any, matrix_shape: tuple[int, int]) -> list[Path]:
    """The tensor files of a target, as far as their headers tell: whole, of plain numbers, each tensor in its place."""
    named = getattr(config, "transformers_weights", None)
    files = tensor_files(source, named)
    check_tensor_files(source, files)
    stored = stored_tensors(files)
    if len(stored) == len(files):  # files of torch.save have no header: they are looked at when they are loaded
        require_one_place(source, stored, places_by_index(source, named))
    if not is_quantized(config):
        merged = {name: entry for tensors in stored.values() for name, entry in tensors.items()}
        require_plain_numbers(source, ((name, kind) for name, (kind, _) in merged.items()))
        require_matrix_shapes(source, merged, matrix_shape)
    return files


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
