"""Random targets at real widths and full depth, made on the device: no weights are read or written."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from dflash_offline.extract.targets.hf import HfTarget, load_tokenizer, read_facts
from dflash_offline.extract.targets.kernels import hide_gpu_kernels

WIDTHS_27B: dict[str, Any] = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
}
LINEAR_27B: dict[str, Any] = {"linear_num_key_heads": 16, "linear_num_value_heads": 48}
LINEAR_27B |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}


def dense(**widths: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(max_position_embeddings=40_960, tie_word_embeddings=True, **widths)


def hybrid(head_dim: int, **widths: Any) -> Any:
    """Three Gated DeltaNet layers, then one of full attention, and again."""
    from transformers import Qwen3_5TextConfig

    third = head_dim // 8 // 3
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": [third, third, head_dim // 8 - 2 * third]}
    return Qwen3_5TextConfig(
        head_dim=head_dim,
        rope_parameters=rope,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        **widths,
    )


TARGETS: dict[str, Callable[[], Any]] = {
    "qwen3-8b": lambda: dense(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
    ),
    "hybrid-27b": lambda: hybrid(256, num_hidden_layers=64, vocab_size=151_936, **WIDTHS_27B, **LINEAR_27B),
    "tiny": lambda: dense(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=1024,
    ),
}


def make_target(name: str, device: str, *, seed: int = 0) -> HfTarget:
    """In bfloat16 on CUDA, float32 on a CPU; the same weights for the same seed and kind of device."""
    from transformers import AutoModelForCausalLM

    hide_gpu_kernels(device)
    config = TARGETS[name]()
    dtype = "float32" if device == "cpu" else "bfloat16"
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)
    facts = replace(
        read_facts("tiny", dtype, device),
        name=f"random {name}",
        architecture=type(model).__name__,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_positions=config.max_position_embeddings,
        is_tied=True,
        is_recurrent="linear_attention" in getattr(config, "layer_types", ()),
        dtype=dtype,
    )
    return HfTarget(model.eval().requires_grad_(False), load_tokenizer("tiny"), facts, device)


def layer_parameters(target: HfTarget, depth: int) -> int:
    """Numbers in the matrices of the first layers; each takes part in two operations a token."""
    parameters = (p for layer in target.decoder.layers[:depth] for p in layer.parameters())
    return sum(parameter.numel() for parameter in parameters if parameter.ndim == 2)
