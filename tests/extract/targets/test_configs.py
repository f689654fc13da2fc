"""A target's config: its fingerprint, and what is said of one that will not do, before a tensor is read."""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.targets.configs import config_sha256, settle_tie
from dflash_offline.extract.targets.facts import read_facts, read_text_side
from dflash_offline.extract.targets.hf import load_target
from dflash_offline.extract.targets.source import Source, locate
from target_families import BASE
from transformers import AutoConfig


def changed(folder: Path, copy: Path, **changes: Any) -> Path:
    """A copy of a target with other values in its config.json."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def fingerprint(folder: Path) -> str | None:
    return config_sha256(locate(str(folder), weights=False))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 4}),
        ("qwen3-moe", {"num_experts_per_tok": 1}),
        ("llama", {"rms_norm_eps": 1e-5}),
        ("llama", {"a_key_of_the_future": True}),
    ],
)
def test_a_config_that_may_give_other_states_has_another_fingerprint(
    family_folder: Any, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """The tensor files stay as they are."""
    assert fingerprint(changed(family_folder(family), tmp_path / "t", **changes)) != fingerprint(family_folder(family))


def test_a_nested_config_counts_whole(family_folder: Any, tmp_path: Path) -> None:
    text = json.loads((family_folder("qwen3-vl-wrapper").joinpath("config.json")).read_text())["text_config"]
    copy = changed(family_folder("qwen3-vl-wrapper"), tmp_path / "t", text_config=text | {"rms_norm_eps": 1e-5})
    assert fingerprint(copy) != fingerprint(family_folder("qwen3-vl-wrapper"))


def test_what_changes_no_state_keeps_the_fingerprint(family_folder: Any, tmp_path: Path) -> None:
    harmless = {
        "transformers_version": "9.9",
        "_name_or_path": "/elsewhere",
        "torch_dtype": "float16",
        "use_cache": False,
    }
    copy = changed(family_folder("llama"), tmp_path / "t", **harmless, architectures=["Other"], id2label={"0": "a"})
    content = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(content.items())), indent=7))
    assert fingerprint(copy) == fingerprint(family_folder("llama"))
    assert config_sha256(Source(name="a.gguf", folder=tmp_path, gguf="a.gguf")) is None


STATE_SPACE = {key: BASE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}


@pytest.mark.parametrize(
    ("model_type", "fields", "says"),
    [
        ("bloom", {"vocab_size": 262, "hidden_size": 64, "n_layer": 4, "n_head": 4}, "max_position_embeddings = None"),
        ("mpt", {"vocab_size": 262, "d_model": 64, "n_layers": 4, "n_heads": 4}, "max_position_embeddings = None"),
        ("mamba", STATE_SPACE, "num_attention_heads = None"),
        ("mamba2", STATE_SPACE | {"num_heads": 8, "head_dim": 16, "n_groups": 2}, "num_attention_heads = None"),
        ("falcon_mamba", STATE_SPACE, "num_attention_heads = None"),
        ("xlstm", STATE_SPACE | {"num_heads": 4}, "num_attention_heads = None"),
    ],
)
def test_a_family_without_the_sizes_of_a_decoder(
    case_target: Any, tmp_path: Path, model_type: str, fields: dict[str, Any], says: str
) -> None:
    folder = shutil.copytree(case_target(), tmp_path / "t")
    AutoConfig.for_model(model_type, **fields).save_pretrained(folder)
    refused(says, read_facts, folder)


def refused(says: str, read: Any, folder: Path) -> None:
    with pytest.raises(UserError, match=says) as caught:
        read(str(folder))
    assert len(str(caught.value).splitlines()) == 3


def test_a_target_without_heads_or_positions(family_folder: Any, case_target: Any, tmp_path: Path) -> None:
    """Llama's config class divides by the heads, Qwen3's takes none."""
    refused("cannot read", read_text_side, changed(family_folder("llama"), tmp_path / "a", num_attention_heads=0))
    refused("num_attention_heads = 0", read_facts, changed(case_target(), tmp_path / "b", num_attention_heads=0))
    copy = changed(case_target(), tmp_path / "c", max_position_embeddings=0)
    for read in (read_text_side, read_facts):
        refused("max_position_embeddings = 0", read, copy)


@pytest.mark.parametrize("content", ["[]", "null", "", "[" * 100_000])
def test_a_config_that_is_no_object(case_target: Any, tmp_path: Path, content: str) -> None:
    folder = shutil.copytree(case_target(), tmp_path / "t")
    (folder / "config.json").write_text(content)
    refused("cannot read", read_facts, folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["[]", "{", '{"version": "1.0", "model": {"type": "From The Future"}}'])
def test_a_damaged_tokenizer_file(case_target: Any, tmp_path: Path, name: str, content: str) -> None:
    if name == "tokenizer_config.json" and "version" in content:
        pytest.skip("keys of no tokenizer do no harm there")
    folder = shutil.copytree(case_target(), tmp_path / "t")
    (folder / name).write_text(content)
    refused("no tokenizer that transformers can load", read_facts, folder)


def test_a_nested_part_that_is_null(family_folder: Any, tmp_path: Path) -> None:
    folder = changed(family_folder("qwen3-vl-wrapper"), tmp_path / "t", text_config=None)
    refused("text_config in its config.json is null", read_facts, folder)


@pytest.mark.parametrize("part", [{}, {"hidden_size": 64}])
def test_a_nested_part_that_the_family_does_not_know(case_target: Any, tmp_path: Path, part: dict[str, Any]) -> None:
    folder = changed(case_target(), tmp_path / "t", text_config=part, tie_word_embeddings=True)
    refused(r"as the part for its decoder, which a Qwen3Config does not know", read_text_side, folder)


YARN = {"rope_type": "yarn", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("llama", {"pad_token_id": 262}, "pad_token_id = 262"),
        ("gemma3-wrapper", {"pad_token_id": 99999}, "pad_token_id = 99999"),
        ("llama", {"rope_parameters": {"rope_theta": "10000"}}, "rope_theta = '10000' among its rotary settings"),
        ("llama", {"rope_parameters": YARN | {"factor": "x"}}, "factor = 'x' among its rotary settings"),
        ("llama", {"rope_parameters": YARN | {"factor": ["1"]}}, "factor = '1' among its rotary settings"),
        ("gemma2", {"sliding_window": None}, "sliding_window = null beside layers of sliding_attention"),
        ("llama4", {"attention_chunk_size": None}, "attention_chunk_size = null beside layers of chunked_attention"),
        ("gpt-oss", {"sliding_window": None}, "sliding_window = null beside layers of sliding_attention"),
    ],
)
def test_values_that_no_model_can_be_built_from(
    family_folder: Any, tmp_path: Path, family: str, changes: dict[str, Any], says: str
) -> None:
    """Before a store is laid out, which asks for the facts alone."""
    if family.endswith("wrapper"):
        whole = json.loads((family_folder(family) / "config.json").read_text())
        changes = {"text_config": whole["text_config"] | changes}
    folder = changed(family_folder(family), tmp_path / "t", **changes)
    for read in (read_facts, load_target):
        refused(f"its config.json says {says}", read, folder)


def test_a_padding_id_from_the_end_is_one(family_folder: Any, tmp_path: Path) -> None:
    assert load_target(str(changed(family_folder("llama"), tmp_path / "t", pad_token_id=-1))).facts.num_layers == 4


def test_a_config_that_asks_for_tuples_is_read_by_names(family_folder: Any, tmp_path: Path) -> None:
    target = load_target(str(changed(family_folder("llama"), tmp_path / "t", return_dict=False)))
    assert set(target.frozen()[0]) == {"embedding", "norm", "head"}
    target.open((0,)).forward(torch.arange(6, 12))


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"hidden_act": "nonsense"}, "KeyError: 'nonsense'"), ({"num_key_value_heads": 0}, "ZeroDivisionError")],
)
def test_whatever_a_family_raises_while_it_is_built_is_told_in_three_lines(
    family_folder: Any, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    folder = changed(family_folder("llama"), tmp_path / "t", **changes)
    refused(f"cannot be loaded: {says}", load_target, folder)


def test_a_gguf_file_with_a_nested_part(tmp_path: Path) -> None:
    """It has no config.json to look at."""
    with pytest.raises(UserError, match="gives a Qwen3Config inside another config") as caught:
        settle_tie(Source(name="a.gguf", folder=tmp_path, gguf="a.gguf"), AutoConfig.for_model("qwen3"))
    assert len(str(caught.value).splitlines()) == 3


CODE = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}


def test_code_beside_a_config_is_neither_run_nor_asked_about(
    family_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\n"))
    folder = changed(family_folder("llama"), tmp_path / "t", model_type="own", auto_map=CODE)
    for name in ("configuration_own", "modeling_own"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')")
    for read in (read_text_side, read_facts, load_target):
        refused(r"asks for code of its own \(auto_map\), and its model_type is 'own'", read, folder)
    known = changed(family_folder("llama"), tmp_path / "known", auto_map=CODE)
    shutil.copy(folder / "modeling_own.py", known)
    assert type(load_target(str(known)).model).__name__ == "LlamaForCausalLM"
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (known / "tokenizer_config.json").write_text(json.dumps(own))
    (known / "tokenization_own.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')")
    refused("no tokenizer that transformers can load", read_text_side, known)
    assert not (tmp_path / "was-run").exists()
    assert "[y/N]" not in capsys.readouterr().out
    assert sys.stdin.read() == "y\ny\n"
