"""Targets whose rotary angles change with the longest text of a batch (longrope: Phi-3, Phi-4)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_offline.extract.batching import make_batches
from dflash_offline.extract.recorder import Recorder
from dflash_offline.extract.targets.base import length_bound
from dflash_offline.extract.targets.hf import HfTarget, load_target
from transformers import Phi3Config, Phi3ForCausalLM

BOUND, TAPS, BUDGET = 48, (0, 1), 400


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, case_target: Any) -> HfTarget:
    folder: Path = tmp_path_factory.mktemp("longrope")
    half = 8
    config = Phi3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        original_max_position_embeddings=BOUND,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * half,
            "long_factor": [4.0 + i for i in range(half)],
            "original_max_position_embeddings": BOUND,
        },
    )
    torch.manual_seed(0)
    Phi3ForCausalLM(config).save_pretrained(folder)
    for path in case_target().glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return load_target(str(folder))


def worst_error(target: HfTarget, texts: list[torch.Tensor], bound: int | None) -> float:
    """Of all texts, recorded in the batches that this bound makes, against each alone."""
    lengths, worst = np.array([len(text) for text in texts]), 0.0
    for batch in make_batches(lengths, BUDGET, bound=bound):
        ids = torch.zeros(len(batch), int(lengths[batch].max()), dtype=torch.long)
        for row, number in enumerate(batch.tolist()):
            ids[row, : lengths[number]] = texts[number]
        taps, _ = target.record(ids, torch.from_numpy(lengths[batch]), TAPS)
        for row, number in enumerate(batch.tolist()):
            own = target.record(texts[number][None], torch.tensor([lengths[number]]), TAPS)[0][:, 0]
            error = (taps[:, row, : lengths[number]] - own).norm(dim=-1) / own.norm(dim=-1)
            worst = max(worst, float(error.max()))
    return worst


def test_texts_are_recorded_as_alone(target: HfTarget) -> None:
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(6, 262, (n,), generator=draw) for n in range(30, 70, 2)]
    assert length_bound(target.facts.rope) == BOUND
    assert worst_error(target, texts, None) > 1e-3, "a longer text beside it changes a shorter one"
    assert worst_error(target, texts, BOUND) < 1e-5


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "yarn", "factor": 4.0}, {}])
def test_other_ropes_have_no_bound(rope: dict[str, Any]) -> None:
    assert length_bound(rope) is None


def test_padding_to_a_compiled_shape_does_not_cross_the_bound(target: HfTarget) -> None:
    """60 tokens would be padded to 64, behind a bound of 62; with 64 to 64, which no angle notices."""

    class Bound(Recorder):
        def __init__(self, bound: int | None) -> None:
            self.order = type("Order", (), {"compile": True, "device": "cpu"})()
            self.target, self.length_bound, self.token_budget = target, bound, 400
            self.lengths = np.array([60, 55])
            self.channel = type("Channel", (), {"tell": lambda *_: None})()

    batch = np.array([0, 1])
    assert Bound(None).compiled_shape(batch) is not None
    assert Bound(62).compiled_shape(batch) is None
    assert Bound(64).compiled_shape(batch) is not None
    assert Bound(40).compiled_shape(batch) is not None
