"""z-lab's own classes load our export and do with it what we do, and we load what they save."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_offline.extract.targets.hf import HfTarget, load_target
from dflash_offline.train.config import DrafterConfig
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.evaluate.decode import decode
from dflash_offline.train.evaluate.drafting import DrafterProposer
from dflash_offline.train.evaluate.sampling import SPECULATIVE, Sampling
from dflash_offline.train.export.export import write_zlab
from dflash_offline.train.export.folders import read_drafter_folder
from dflash_offline.train.export.tensors import num_parameters
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.spec import DrafterSpec, make_spec
from transformers import Qwen3Config, Qwen3ForCausalLM

pytestmark = pytest.mark.slow
TAPS = (0, 2)
VOCABULARY, EOS, MASK = 12, 1, 2
WINDOW_TOKENS = 5
MAX_NEW_TOKENS = 40
SAMPLED = {"temperature": 1.0, "repeats": 25, "max_new_tokens": 13}
FULL_CYCLES = 3  # of 13 tokens in blocks of 4, whatever is accepted: neither loop narrows these
BOUND = 4.5  # standard deviations; by chance once in 300,000

# A drafter that their class builds from these settings alone, and what we must read from what it saves.
THEIR_CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "num_target_layers": 6,
    "block_size": 4,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 4, 3]},
}
THEIR_SPEC = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 8,
    "num_taps": 3,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "block_size": 4,
    "mask_token_id": MASK,
    "tap_layers": (1, 4, 3),
    "num_target_layers": 6,
    "max_positions": 256,
    "attention": (AttentionKind(),) * 2,
}
WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW_TOKENS, "max_window_layers": 0}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
FULL, CAUSAL = AttentionKind(), AttentionKind(is_causal=True)
SLIDING, SLIDING_CAUSAL = AttentionKind(WINDOW_TOKENS), AttentionKind(WINDOW_TOKENS, True)
BUILT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "full-causal": ({"is_causal": True}, {"attention": (CAUSAL, CAUSAL)}),
    "sliding": (WINDOW | {"is_causal": False}, {"attention": (SLIDING, SLIDING)}),
    "sliding-causal": (WINDOW, {"attention": (SLIDING_CAUSAL, SLIDING_CAUSAL)}),  # no key: causal, by their rule
    "mixed": (MIXED, {"attention": (SLIDING_CAUSAL, FULL)}),
    "mixed-bidirectional": (MIXED | {"is_causal": False}, {"attention": (SLIDING, FULL)}),
    "mixed-causal": (MIXED | {"is_causal": True}, {"attention": (SLIDING_CAUSAL, CAUSAL)}),
    "late-window": (WINDOW | {"max_window_layers": 1}, {"attention": (FULL, SLIDING_CAUSAL)}),
    "four-and-one": (
        WINDOW | {"num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 4 + ["full_attention"]},
        {"num_layers": 5, "attention": (*[SLIDING_CAUSAL] * 4, FULL)},
    ),
    "quirks": (
        {"dflash_config": THEIR_CONFIG["dflash_config"] | {"input_embedding_scale": 5.5, "output_multiplier": 0.5}},
        {"embedding_scale": 5.5, "output_multiplier": 0.5},
    ),
}
# What the two layers of our exports see, beside the full one.
EXPORTED = {
    "export-full-causal": (CAUSAL, CAUSAL),
    "export-sliding": (SLIDING, SLIDING),
    "export-sliding-causal": (SLIDING_CAUSAL, SLIDING_CAUSAL),
    "export-mixed": (SLIDING_CAUSAL, FULL),
    "export-mixed-late": (FULL, SLIDING_CAUSAL),
    "export-mixed-bidirectional": (SLIDING, FULL),
    "export-mixed-causal": (SLIDING_CAUSAL, CAUSAL),
}


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
        "sampled": SAMPLED,
        "taps": taps,
        "block_ids": [5, MASK, MASK, MASK],
        "exports": list(EXPORTED),
        "built": {name: build_case(rng, changes, seed) for seed, (name, (changes, _)) in enumerate(BUILT.items(), 11)},
    }


def build_case(rng: np.random.Generator, changes: dict[str, Any], seed: int) -> dict[str, Any]:
    """One drafter for their class to build, with 11 positions of context and a block to run it on."""
    taps, block = rng.standard_normal((11, 3 * 24)).round(3), rng.standard_normal((4, 24)).round(3)
    return {"config": THEIR_CONFIG | changes, "seed": seed, "taps": taps.tolist(), "block": block.tolist()}


@pytest.fixture(scope="module")
def exchange(
    zlab_python: Path,
    target: HfTarget,
    target_folder: Path,
    drafter: Drafter,
    cases: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The folder that both sides have written to, see zlab_side.py."""
    folder = tmp_path_factory.mktemp("exchange")
    write_zlab(folder / "export", drafter.spec, drafter.state_dict(), target.facts.as_plain(), "card")
    for name, attention in EXPORTED.items():
        spec = replace(drafter.spec, attention=attention)
        write_zlab(folder / name, spec, drafter.state_dict(), target.facts.as_plain(), "card")
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [zlab_python, Path(__file__).with_name("zlab_side.py"), target_folder, folder]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def theirs(exchange: Path) -> dict[str, Any]:
    return json.loads((exchange / "result.json").read_text())


def test_the_export_loads_without_missing_or_unexpected_keys(theirs: dict[str, Any], drafter: Drafter) -> None:
    assert theirs["missing"] == theirs["unexpected"] == theirs["mismatched"] == []
    assert theirs["num_parameters"] == num_parameters(drafter.spec)
    assert theirs["taps"] == list(TAPS)
    assert theirs["block_size"] == 4
    assert theirs["mask_token_id"] == MASK


def block_output(drafter: Drafter, taps: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Our output [B, H] for a block [B, H] right behind a context of taps [S, Lt*H]."""
    cache = drafter.new_cache()
    drafter.extend(cache, taps, torch.arange(len(taps)))
    return drafter.propose(cache, block, len(taps) + torch.arange(len(block)))


def test_a_block_has_the_same_output(
    theirs: dict[str, Any], drafter: Drafter, target: HfTarget, cases: dict[str, Any]
) -> None:
    embedding = target.frozen()[0]["embedding"]
    ours = block_output(drafter, torch.tensor(cases["taps"]), embedding[torch.tensor(cases["block_ids"])])
    assert (ours - torch.tensor(theirs["block"])).abs().max() < 5e-6


@pytest.mark.parametrize("name", EXPORTED)
def test_a_block_of_any_other_attention_has_the_same_output(
    name: str, theirs: dict[str, Any], drafter: Drafter, target: HfTarget, cases: dict[str, Any]
) -> None:
    embedding = target.frozen()[0]["embedding"]
    other = Drafter(replace(drafter.spec, attention=EXPORTED[name]))
    other.load_state_dict(drafter.state_dict())
    taps, block = torch.tensor(cases["taps"]), embedding[torch.tensor(cases["block_ids"])]
    ours = block_output(other, taps, block)
    assert (ours - torch.tensor(theirs["exports"][name])).abs().max() < 5e-6
    assert (ours - block_output(drafter, taps, block)).abs().max() > 1e-3, "what the layers see must matter here"


def test_our_export_saved_by_their_class_is_read_back_unchanged(exchange: Path, drafter: Drafter) -> None:
    assert (exchange / "again" / "config.json").read_text() != (exchange / "export" / "config.json").read_text()
    folder, tensors = read_drafter_folder(exchange / "again")
    assert folder.spec == drafter.spec
    ours = drafter.state_dict()
    assert set(tensors) == set(ours)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, ours[name]), name


@pytest.mark.parametrize("name", BUILT)
def test_a_drafter_that_their_class_built_and_saved_is_read(
    name: str, exchange: Path, theirs: dict[str, Any], cases: dict[str, Any]
) -> None:
    folder, tensors = read_drafter_folder(exchange / name)
    spec = folder.spec
    assert spec == DrafterSpec(**(THEIR_SPEC | BUILT[name][1]))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    drafter = Drafter(spec)
    drafter.load_state_dict(tensors)
    case = cases["built"][name]
    ours = block_output(drafter, torch.tensor(case["taps"]), torch.tensor(case["block"]))
    assert (ours - torch.tensor(theirs["built"][name])).abs().max() < 5e-6


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


def test_sampled_answers_are_those_of_their_runtime_statistically(
    theirs: dict[str, Any], drafter: Drafter, target: HfTarget, cases: dict[str, Any]
) -> None:
    """At temperature 1 both loops accept the same number of drafts on average, and answer with the same tokens."""
    parts, _ = target.frozen()
    sampling, ours = Sampling(temperature=SAMPLED["temperature"], seed=3), []
    for number, prompt in enumerate(cases["prompts"]):
        answers = []
        for repeat in range(SAMPLED["repeats"]):
            proposer = DrafterProposer(drafter, parts["embedding"], parts["head"], tap_dtype="float32")
            chooser = sampling.chooser(number * SAMPLED["repeats"] + repeat, SPECULATIVE)
            limits = {"max_new_tokens": SAMPLED["max_new_tokens"], "block_size": 4, "stop_ids": []}
            decoded = decode(target.open(TAPS), proposer, prompt, chooser=chooser, **limits)
            answers.append({"ids": decoded.tokens, "cycles": [cycle.produced for cycle in decoded.cycles]})
        ours.append(answers)
    theirs_sampled = theirs["sampled"]
    lengths = [gained(answers) for answers in (ours, theirs_sampled)]
    error = np.sqrt(sum(part.var(axis=1, ddof=1).sum() / part.shape[1] for part in lengths)) / len(cases["prompts"])
    difference = lengths[0].mean() - lengths[1].mean()
    assert abs(difference) < BOUND * error
    assert BOUND * error < 0.25, "too few answers to see a rule that accepts too much"
    for place in (1, 2, 3):  # behind the first token, which no draft touches
        assert apart(place, ours, theirs_sampled) < BOUND
    greedy_mean = np.mean([their["cycles"][:FULL_CYCLES] for their in theirs["decoded"] if len(their["cycles"]) > 3])
    assert abs(lengths[0].mean() - greedy_mean) > 0.05, "sampling must matter here, or it shows nothing"


def gained(answers: list[list[dict[str, list[int]]]]) -> np.ndarray:
    """The mean tokens of the first cycles of each answer: [prompts, repeats]."""
    return np.array([[np.mean(one["cycles"][:FULL_CYCLES]) for one in several] for several in answers])


def apart(place: int, ours: list[list[dict[str, list[int]]]], theirs: list[list[dict[str, list[int]]]]) -> float:
    """How many standard deviations the two-sample chi-square of the token at `place` lies above its mean.

    Prompt by prompt, over the tokens that either side chose.
    """
    statistic = degrees = 0.0
    for one, other in zip(ours, theirs):
        counts = [np.bincount([answer["ids"][place] for answer in side], minlength=VOCABULARY) for side in (one, other)]
        total = counts[0] + counts[1]
        seen = total > 0
        statistic += float(((counts[0] - counts[1])[seen] ** 2 / total[seen]).sum())  # equal numbers on both sides
        degrees += int(seen.sum()) - 1
    return (statistic - degrees) / float(np.sqrt(2 * degrees))
