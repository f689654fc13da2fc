"""z-lab's own classes load our export and do with it what we do."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_offline.extract.targets.hf import HfTarget, load_target
from dflash_offline.train.config import DrafterConfig
from dflash_offline.train.decode import DrafterProposer, decode
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.export import write_zlab
from dflash_offline.train.spec import make_spec
from dflash_offline.train.zlab import num_parameters
from transformers import Qwen3Config, Qwen3ForCausalLM

pytestmark = pytest.mark.slow
TAPS = (0, 2)
VOCABULARY, EOS, MASK = 12, 1, 2
MAX_NEW_TOKENS = 40


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with few tokens, so that random drafts are accepted quite often."""
    from dflash_offline.extract.targets.make_tiny import make_tokenizer

    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("target")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    make_tokenizer(0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(target_folder: Path) -> HfTarget:
    return load_target(str(target_folder), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def drafter(target: HfTarget) -> Drafter:
    facts = target.facts.as_plain() | {
        "special_ids": [],
        "tokenizer_size": VOCABULARY,
        "pad_id": 0,
        "eos_ids": [EOS],
        "mask_id": MASK,
    }
    made = Drafter(make_spec(DrafterConfig(num_layers=2, block_size=4, mask_token_id=MASK), facts, TAPS))
    made.init_weights(0)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10.0)
    return made


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCABULARY, size=int(rng.integers(2, 9))).tolist() for _ in range(24)]
    taps = rng.standard_normal((11, len(TAPS) * 32)).round(3).tolist()
    return {
        "prompts": prompts,
        "max_new_tokens": MAX_NEW_TOKENS,
        "stop_ids": [EOS],
        "taps": taps,
        "block_ids": [5, MASK, MASK, MASK],
    }


@pytest.fixture(scope="module")
def theirs(
    zlab_python: Path,
    target: HfTarget,
    target_folder: Path,
    drafter: Drafter,
    cases: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("exchange")
    write_zlab(folder / "export", drafter.spec, drafter.state_dict(), target.facts.as_plain(), "card")
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("zlab_side.py")
    command = [zlab_python, script, folder / "export", target_folder, folder / "cases.json", folder / "result.json"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "result.json").read_text())


def test_the_export_loads_without_missing_or_unexpected_keys(theirs: dict[str, Any], drafter: Drafter) -> None:
    assert theirs["missing"] == theirs["unexpected"] == theirs["mismatched"] == []
    assert theirs["num_parameters"] == num_parameters(drafter.spec)
    assert theirs["taps"] == list(TAPS)
    assert theirs["block_size"] == 4
    assert theirs["mask_token_id"] == MASK


def test_a_block_has_the_same_output(
    theirs: dict[str, Any], drafter: Drafter, target: HfTarget, cases: dict[str, Any]
) -> None:
    taps = torch.tensor(cases["taps"])
    embedding = target.frozen()[0]["embedding"]
    cache = drafter.new_cache()
    drafter.extend(cache, taps, torch.arange(len(taps)))
    ours = drafter.propose(cache, embedding[torch.tensor(cases["block_ids"])], len(taps) + torch.arange(4))
    assert (ours - torch.tensor(theirs["block"])).abs().max() < 5e-6


def test_acceptance_and_outputs_are_equal_prompt_by_prompt(
    theirs: dict[str, Any], drafter: Drafter, target: HfTarget, cases: dict[str, Any]
) -> None:
    """Their loop narrows the last blocks before the token limit, ours does not: those cycles are not compared."""
    parts, _ = target.frozen()
    block_size, compared = drafter.spec.block_size, []
    for prompt, their in zip(cases["prompts"], theirs["decoded"]):
        proposer = DrafterProposer(drafter, parts["embedding"], parts["head"], tap_dtype="float32")
        ours = decode(
            target.open(TAPS), proposer, prompt, block_size=block_size, max_new_tokens=MAX_NEW_TOKENS, stop_ids=[EOS]
        )
        assert prompt + ours.tokens == their["ids"]
        produced, known = [cycle.produced for cycle in ours.cycles], 1
        for number, length in enumerate(their["cycles"]):
            if MAX_NEW_TOKENS - known >= block_size - 1:
                assert produced[number] == length
                compared.append(length)
            known += length
    assert len(compared) > 100
    assert max(compared) > 2, "the drafts of this test must be accepted now and then, or it shows nothing"
