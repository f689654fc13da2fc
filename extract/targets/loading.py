"""A target's weights through transformers: which class loads them, and what is said where none can.

Knows transformers' loaders and quantizers, and by the adapter which tensors are the decoder's.
"""

import pickle
from collections.abc import Callable, Mapping
from itertools import dropwhile
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch

from ... import UserError
from .adapter import adapter_of
from .base import TargetFacts
from .configs import first_line, is_quantized, quantization_of, text_config
from .headers import HARMLESS, require_one_place, require_plain_numbers, wrong_shape
from .source import Source, places_by_index, tensor_files

WRAPPINGS = {"model", "language_model", "text_model", "backbone", "transformer"}
"""Names of modules around a decoder, of which a checkpoint may have more or fewer than the model."""


def from_pretrained(source: Source, config: Any, device: str, dtype: torch.dtype, spread: dict[str, Any]) -> Any:
    """The model and its loading info as transformers gives them. Raises UserError for what it cannot load.

    `spread` says which devices hold which layers, where they are several.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    options: dict[str, Any] = {"gguf_file": source.gguf} if source.gguf else {"config": config}
    if is_quantized(config):
        require_known_quantization(source, config)
        options["device_map"] = {"": device}
    options |= spread
    try:
        require_sound_pickles(source, config)
        model, info = loader_of(config).from_pretrained(
            source.folder,
            dtype=dtype,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # so that they are told: `require_whole` refuses them
            **options,
        )
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of any kind: a family's code asserts, divides and indexes by what config.json says
        if "CUDA error" in str(error):
            raise
        raise (damaged(source, error) if is_damage(error) else cannot_be_loaded(source, config, error)) from error
    for part in (model.config, text_config(model.config)):
        part.return_dict = True  # a config may ask for tuples; what we read has names
    return model, info


def is_damage(error: Exception) -> bool:
    """Whether it says that a tensor file is torn."""
    from safetensors import SafetensorError

    known = (SafetensorError, EOFError, pickle.UnpicklingError)
    return isinstance(error, known) or "PytorchStreamReader" in str(error)


def damaged(source: Source, error: Exception) -> UserError:
    return UserError(
        f"target {source.name!r}: its weights are damaged: {first_line(error)}",
        "whole tensor files",
        "copy or download them again",
    )


def require_sound_pickles(source: Source, config: Any) -> None:
    """What `facts.sound_files` asks of safetensors files by their headers, of files of torch.save."""
    named = getattr(config, "transformers_weights", None)
    formats = {path: formats_of(source, path) for path in tensor_files(source, named) if path.suffix == ".bin"}
    if not formats:
        return
    require_one_place(source, formats, places_by_index(source, named))
    if not is_quantized(config):
        require_plain_numbers(source, (pair for pairs in formats.values() for pair in pairs.items()))


def formats_of(source: Source, path: Path) -> dict[str, str]:
    """Every tensor of a file of torch.save with its number format, without reading it."""
    tensors = torch.load(path, map_location="meta", weights_only=True, mmap=is_zipfile(path))
    if not isinstance(tensors, dict):
        raise UserError(
            f"target {source.name!r}: {path.name} holds a {type(tensors).__name__}",
            "a dict from names to tensors, as `torch.save(model.state_dict(), ...)` writes it",
            "copy or download that file again, or save the model with save_pretrained",
        )
    return {
        str(name): str(tensor.dtype).removeprefix("torch.")
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
    }


def require_whole(source: Source, model: Any, facts: TargetFacts, info: Mapping[str, Any]) -> None:
    """Raises UserError for a parameter that the tensor files leave unset, and for a tensor that the decoder leaves out.

    `info` is transformers' loading info: what a family declares ignorable is not in it any more.
    """
    absent = sorted(info["missing_keys"])
    mismatched = sorted(info["mismatched_keys"])  # (name, shape in the files, shape in the model)
    if absent:
        raise wrong_shape(source, absent[0], len(absent) + len(mismatched))
    if mismatched:
        name, found, shape = mismatched[0]
        raise wrong_shape(
            source, name, len(mismatched), f": it is {list(found)}, by config.json it would be {list(shape)}"
        )
    is_own = tensors_of_decoder(model, facts)
    left_out = sorted(key for key in info["unexpected_keys"] if is_own(key))
    if left_out:
        raise UserError(
            f"target {source.name!r}: its weights hold {left_out[0]!r} ({len(left_out)} such tensors), which a "
            f"{type(model).__name__} with this config.json does not read",
            "a decoder and a head that take every tensor of theirs: biases, scales and layers change what it says",
            "copy the config.json that belongs to these weights, or update transformers",
        )


def tensors_of_decoder(model: Any, facts: TargetFacts) -> Callable[[str], bool]:
    """Says of a tensor's name whether it is one of the decoder's layers, norm or embedding, or of the head.

    By the names of the model's modules. False for the other parts of a multimodal model, and for the layers that
    predict further tokens (MTP), which some families number on behind the decoder's own.
    """
    text = text_config(model.config)
    adapter = adapter_of(text.model_type)
    names = {id(module): name for name, module in model.named_modules()}
    ends = [names.get(id(part), "") for part in (model.get_input_embeddings(), model.get_output_embeddings())]
    single = {adapter.norm, *(name.rpartition(".")[2] for name in ends if name)}
    around = WRAPPINGS | set(names.get(id(adapter.decoder(model)), "").split("."))
    predicting = range(facts.num_layers, facts.num_layers + (getattr(text, "num_nextn_predict_layers", None) or 0))

    def is_own(key: str) -> bool:
        parts = list(dropwhile(lambda part: part in around, key.split(".")))
        if HARMLESS.search(key) or not parts:
            return False
        if parts[0] == "layers" and len(parts) > 1 and parts[1].isdecimal():
            return int(parts[1]) not in predicting
        return parts[0] in single

    return is_own


def require_known_quantization(source: Source, config: Any) -> None:
    """transformers reads the tensors of a method that it does not know as if they were plain ones."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    if quantization_of(config) not in {*AUTO_QUANTIZER_MAPPING, "bitsandbytes"}:
        raise cannot_be_loaded(source, config, ValueError("transformers does not know how they are quantized"))


def cannot_be_loaded(source: Source, config: Any, error: Exception) -> UserError:
    """The error for whatever transformers raised: its kind and text tell more than we can."""
    kind = f"with quantized weights ({quantization_of(config)}) " if is_quantized(config) else ""
    advice = "install what they need, or record the weights before quantization" if kind else "update transformers"
    return UserError(
        f"target {source.name!r} {kind}cannot be loaded: {type(error).__name__}: {first_line(error)}",
        f"in {str(source.folder)!r} a causal language model that transformers knows, with its own config.json",
        f"compare config.json with the model's own, {advice}, or choose another target",
    )


def loader_of(config: Any) -> Any:
    """The class that loads a target: causal models, or whole multimodal models that have no causal class."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if not is_causal and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM
