"""A target's weights through transformers: which class loads them, and what is said where none can.

Knows transformers' loaders and quantizers; of a target no more than its files and its config.
"""

import pickle
from typing import Any

import torch

from ... import UserError
from .facts import first_line, is_quantized, quantization_of
from .source import Source


def from_pretrained(source: Source, config: Any, device: str, dtype: torch.dtype, spread: dict[str, Any]) -> Any:
    """The model and its loading info as transformers gives them. Raises UserError for what it cannot load.

    `spread` says which devices hold which layers, where they are several.
    """
    from safetensors import SafetensorError
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    options: dict[str, Any] = {"gguf_file": source.gguf} if source.gguf else {"config": config}
    if is_quantized(config):
        require_known_quantization(source, config)
        options["device_map"] = {"": device}
    options |= spread
    try:
        return loader_of(config).from_pretrained(
            source.folder, dtype=dtype, output_loading_info=True, local_files_only=True, **options
        )
    except (SafetensorError, EOFError, pickle.UnpicklingError, RuntimeError) as error:
        is_known = not isinstance(error, RuntimeError) or "PytorchStreamReader" in str(error)
        if is_quantized(config) and not is_known:
            raise cannot_be_loaded(source, config, error) from error
        if not is_known:
            raise
        raise UserError(
            f"target {source.name!r}: its weights are damaged: {first_line(error)}",
            "whole tensor files",
            "copy or download them again",
        ) from error
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise cannot_be_loaded(source, config, error) from error


def require_known_quantization(source: Source, config: Any) -> None:
    """transformers reads the tensors of a method that it does not know as if they were plain ones."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    if quantization_of(config) not in {*AUTO_QUANTIZER_MAPPING, "bitsandbytes"}:
        raise cannot_be_loaded(source, config, ValueError("transformers does not know how they are quantized"))


def cannot_be_loaded(source: Source, config: Any, error: Exception) -> UserError:
    kind = f"quantized weights ({quantization_of(config)}) " if is_quantized(config) else ""
    advice = "install what they need, or record the weights before quantization" if kind else "update transformers"
    return UserError(
        f"target {source.name!r} {f'with {kind}' if kind else ''}cannot be loaded: {first_line(error)}",
        "a causal language model known to the installed transformers",
        f"{advice}, or choose another target",
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
