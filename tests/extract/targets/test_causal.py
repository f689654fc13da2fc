"""A target whose states depend on later tokens is refused, also where no sample is padded."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.soundness import CAUSAL_TOKENS, causal_fault, check_target
from dflash_offline.extract.targets.base import length_bound
from dflash_offline.extract.targets.hf import load_target
from target_families import BASE, VERIFIED
from transformers import AutoConfig, AutoModelForCausalLM

TAPS = (0, 2)
LENGTHS = [1, 2, 3, 17, CAUSAL_TOKENS, 3 * CAUSAL_TOKENS]


def ids_of(length: int) -> torch.Tensor:
    return torch.randint(6, 262, (length,), generator=torch.Generator().manual_seed(length))


@pytest.fixture(scope="module")
def seeing(family_folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 as an encoder: half of its window lies behind a token."""
    folder = shutil.copytree(family_folder("gemma3"), tmp_path_factory.mktemp("seeing") / "t")
    config = json.loads((folder / "config.json").read_text()) | {"use_bidirectional_attention": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["t16-tied", "t19-hybrid", *VERIFIED])
def test_verified_families_are_causal(loaded: Any, name: str) -> None:
    for length in LENGTHS:
        assert causal_fault(loaded(name), ids_of(length), TAPS) is None


@pytest.mark.parametrize("name", ["gemma3", "qwen3-moe", "qwen3.5", "nemotron-h"])
def test_so_they_are_in_bfloat16(family_folder: Any, name: str) -> None:
    target = load_target(str(family_folder(name)), dtype="bfloat16")
    for length in LENGTHS:
        assert causal_fault(target, ids_of(length), TAPS) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_that_sees_what_follows_is_refused_without_padding(seeing: Path, dtype: str) -> None:
    """One sample in a batch, or several of one length: its states alone are those of the batch."""
    target = load_target(str(seeing), dtype=dtype)
    target.frozen()
    for length in LENGTHS:
        for count in (1, 3):
            ids = torch.stack([ids_of(length)] * count)
            with pytest.raises(UserError, match="the target is not causal: tap 0 of the first") as caught:
                check_target(target, ids, torch.tensor([length] * count), TAPS, last=False)
            assert len(str(caught.value).splitlines()) == 3


def test_repeated_tokens_tell_as_well(seeing: Path, loaded: Any) -> None:
    ids = torch.full((20,), 9)
    assert causal_fault(load_target(str(seeing)), ids, TAPS) is not None
    assert causal_fault(loaded("gemma3"), ids, TAPS) is None


def test_longrope_beyond_its_bound_is_causal(case_target: Any, tmp_path: Path) -> None:
    """Its angles change at 40 tokens; both rows have the same."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [9.0] * 8}
    sizes = BASE | {"vocab_size": 320, "original_max_position_embeddings": 40}
    config = AutoConfig.for_model("phi3", **sizes, rope_parameters=rope | {"original_max_position_embeddings": 40})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for path in case_target().glob("*token*"):
        shutil.copy(path, tmp_path)
    target = load_target(str(tmp_path))
    assert length_bound(target.facts.rope) == 40
    for length in (39, 40, 41, 60, 90):
        check_target(target, ids_of(length)[None], torch.tensor([length]), TAPS, last=True)
