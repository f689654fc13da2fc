"""Layouts of layers, drafters whose every weight matters, and folders written in either format."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.export.formats import config_of
from dflash_offline.train.export.write import write_folder
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.spec import DrafterSpec

TARGET = {
    "name": "some/target",
    "architecture": "Qwen3ForCausalLM",
    "num_layers": 6,
    "hidden_size": 32,
    "vocab_size": 48,
    "eos_ids": [1],
    "pad_id": 0,
    "bos_id": None,
    "rope": {"rope_type": "default", "rope_theta": 10000.0},
}
FULL, FULL_CAUSAL = AttentionKind(), AttentionKind(None, True)
SLIDING, CAUSAL = AttentionKind(64), AttentionKind(64, True)
LAYOUTS = {
    "full": (FULL, FULL),
    "full causal": (FULL_CAUSAL, FULL_CAUSAL),
    "sliding": (SLIDING, SLIDING),
    "sliding causal": (CAUSAL, CAUSAL),
    "mixed": (SLIDING, FULL),
    "mixed causal": (CAUSAL, FULL),
    "mixed all causal": (CAUSAL, FULL_CAUSAL),
    "four and one": (*[CAUSAL] * 4, FULL),
}
OF_SPECULATORS = ("full", "sliding", "sliding causal", "mixed")  # which its two readers run alike


@pytest.fixture(scope="session")
def shelf() -> ModuleType:
    """The names of this file; test modules cannot import each other."""
    return sys.modules[__name__]


@pytest.fixture
def write_drafter(
    tiny_spec: Callable[..., DrafterSpec], tiny_drafter: Callable[..., Drafter], tmp_path: Path
) -> Callable[..., tuple[Path, Drafter]]:
    """Writes a random drafter; keyword arguments change the spec."""

    def write(layout: str = "zlab", *, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Path, Drafter]:
        if "attention" in changes:
            changes["num_layers"] = len(changes["attention"])
        drafter = tiny_drafter(tiny_spec(**changes)).to(dtype)
        folder = tmp_path / f"drafter-{len(list(tmp_path.iterdir()))}"
        content = config_of(layout, drafter.spec, TARGET, str(dtype).removeprefix("torch."))
        write_folder(folder, content, drafter.state_dict(), "card")
        return folder, drafter

    return write


def rewrite(folder: Path, changes: dict[str, Any]) -> None:
    """Changes keys of config.json by dotted name; the value ... removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for dotted, value in changes.items():
        place, names = config, dotted.split(".")
        for name in names[:-1]:
            place = place[name]
        if value is ...:
            del place[names[-1]]
        else:
            place[names[-1]] = value
    path.write_text(json.dumps(config))


def block_outputs(drafter: Drafter) -> torch.Tensor:
    """The outputs [B, H] of a block behind 70 tokens of context, more than any window here."""
    rng = torch.Generator().manual_seed(1)
    spec, dtype, cache = drafter.spec, drafter.fc.weight.dtype, drafter.new_cache()
    drafter.extend(cache, torch.randn(70, spec.num_taps * spec.hidden_size, generator=rng).to(dtype), torch.arange(70))
    block = torch.randn(spec.block_size, spec.hidden_size, generator=rng).to(dtype)
    return drafter.propose(cache, block, torch.arange(70, 70 + spec.block_size))


def with_layers(drafter: Drafter, attention: tuple[AttentionKind, ...]) -> Drafter:
    """The same weights, other layers."""
    other = Drafter(dataclasses.replace(drafter.spec, attention=attention)).to(drafter.fc.weight.dtype)
    other.load_state_dict(drafter.state_dict())
    return other
