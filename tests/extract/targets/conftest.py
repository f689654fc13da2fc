"""Tiny random targets of several families, made once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline.extract.targets.hf import HfTarget, load_target
from dflash_offline.extract.targets.kernels import hide_gpu_kernels
from transformers import AutoConfig, AutoModelForCausalLM

BASE = {
    "vocab_size": 262,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention"] * 3 + ["full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3-windows": {"model_type": "qwen3", "layer_types": MIXED, "sliding_window": 8, "use_sliding_window": True},
    "gemma2": {"model_type": "gemma2", "sliding_window": 8},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 8, "layer_types": MIXED},
    "granite": {"model_type": "granite", "embedding_multiplier": 12.0, "logits_scaling": 8.0},
    "qwen3-moe": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen3-next": {
        "model_type": "qwen3_next",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "cohere": {"model_type": "cohere"},
}


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory, character_tokenizer: Any) -> Callable[[str], Path]:
    """family_folder("gemma2"): the folder of a small random model of that family."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            hide_gpu_kernels("cpu")
            fields = BASE | FAMILIES[name]
            torch.manual_seed(1)
            folder = tmp_path_factory.mktemp(name)
            AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).save_pretrained(
                folder
            )
            character_tokenizer("plain").save_pretrained(folder)
            made[name] = folder
        return made[name]

    return make


@pytest.fixture(scope="session")
def loaded(family_folder: Any, case_target: Any) -> Callable[[str], HfTarget]:
    """loaded("tiny"), a handed case like loaded("t16-tied"), or a family; fp32 on the CPU."""
    made: dict[str, HfTarget] = {}

    def load(name: str) -> HfTarget:
        if name not in made:
            hide_gpu_kernels("cpu")
            if name == "tiny":
                made[name] = load_target(name)
            else:
                made[name] = load_target(str(family_folder(name) if name in FAMILIES else case_target("plain", name)))
        return made[name]

    return load
