"""The frozen parts say at each slot what the target itself says there: its own logits, run on the same text."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline.extract.targets.hf import HfTarget, load_target, resolve_name
from dflash_offline.train.config import LossConfig
from dflash_offline.train.loss import Head, Teacher, final_norm, frozen_head_loss, make_chunk_loss
from target_families import BASE
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = BASE | {"vocab_size": 300}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},  # norm times its weight
    "gemma2": {"sliding_window": 8, "final_logit_softcapping": 1.5},  # norm times 1 + weight, a cap that bends
    "gemma3_text": {"sliding_window": 8},
    "granite": {"logits_scaling": 0.5, "rms_norm_eps": 0.01},
}


def random_target(family: str, folder: Path) -> HfTarget:
    """A random target of a family, its final norm far from ones; in fp32 on the CPU."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SMALL | FAMILIES[family])))
    with torch.no_grad():
        model.model.norm.weight.add_(torch.randn(64) / 2)
        model.lm_head.weight.mul_(10.0)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(resolve_name("tiny")) / name, folder / name)
    return load_target(str(folder))


@pytest.mark.parametrize("name", ["tiny", *FAMILIES])
def test_slots_are_held_to_the_target_s_own_logits(name: str, tmp_path: Path) -> None:
    target = load_target("tiny") if name == "tiny" else random_target(name, tmp_path)
    facts, (parts, _) = target.facts, target.frozen()
    rng = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 200, (1, 24), generator=rng)
    _, last = target.record(ids, torch.tensor([24]), (0, 1), last=True)
    assert last is not None
    with torch.no_grad():
        logits = target.model(input_ids=ids).logits[0].double()  # [24, V]

    anchors, slots = torch.tensor([0, 5, 17]), torch.arange(6)
    places = anchors[:, None] + slots  # slot k of block a follows token a+k-1
    weight = parts.get("head", parts["embedding"]).float()
    head = Head(weight=weight, multiplier=facts.output_multiplier, softcap=facts.logit_softcap)
    drafted = torch.randn(3, 8, facts.hidden_size, generator=rng)
    config = LossConfig(objective="kl", weights="uniform")
    result = frozen_head_loss(
        drafted.flatten(0, 1),
        head,
        ids[0][places + 1],
        torch.ones(3, 6),
        chunk_blocks=2,
        chunk_loss=make_chunk_loss(config, head),
        teacher=Teacher(final_norm(last[0], parts["norm"], facts.rms_norm_eps), places),
    )

    own = (drafted[:, 1:7] @ head.weight.T * facts.output_multiplier).double()
    if facts.logit_softcap:
        own = facts.logit_softcap * torch.tanh(own / facts.logit_softcap)
    p, q = torch.softmax(logits[places], -1), torch.softmax(own, -1)
    assert p.std(-1).min() > 5e-4, "a flat target would hide a wrong norm"
    torch.testing.assert_close(result.value.double(), (p * (p.log() - q.log())).sum(-1), atol=1e-5, rtol=1e-4)
    assert result.alpha is not None
    torch.testing.assert_close(result.alpha.double(), torch.minimum(p, q).sum(-1), atol=1e-5, rtol=1e-4)
