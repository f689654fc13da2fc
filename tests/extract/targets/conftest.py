"""Tiny random targets of several families, made once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline.extract.targets.hf import HfTarget, load_target
from dflash_offline.extract.targets.kernels import hide_gpu_kernels
from target_families import REFUSED, VERIFIED, Family
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

FAMILIES = VERIFIED | {name: family for name, (family, _) in REFUSED.items()}


def small_model(family: Family) -> Any:
    """A random model whose norms and biases are random as well, so that none of them can be left out unseen."""
    if family.vision is None:
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family.model_type, **family.text()))
    else:
        text = family.text() | {"model_type": family.model_type}
        parts = {"text_config": text, "vision_config": family.vision, "tie_word_embeddings": family.is_tied}
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family.wrapper, **parts))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory, character_tokenizer: Any) -> Callable[[str], Path]:
    """family_folder("gemma2"): the folder of a small random model of that family."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            hide_gpu_kernels("cpu")
            torch.manual_seed(1)
            folder = tmp_path_factory.mktemp(name)
            small_model(FAMILIES[name]).save_pretrained(folder)
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
