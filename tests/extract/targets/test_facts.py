"""The facts of a target, read from its files alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.extract.targets.facts import (
    load_tokenizer,
    read_facts,
    read_text_side,
    resolve_dtype,
    tokenizer_facts,
)
from dflash_offline.extract.targets.hf import load_target


def with_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("changes", [{"hidden_size": "wide"}, {"num_hidden_layers": [4]}, {"rope_parameters": 7}])
def test_a_config_that_transformers_refuses(case_target: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = shutil.copytree(case_target(), tmp_path / "t")
    with_config(folder, **changes)
    with pytest.raises(UserError, match="a config that transformers cannot read") as caught:
        read_text_side(str(folder))
    assert len(str(caught.value).splitlines()) == 3


def test_a_target_without_tokenizer_files(case_target: Any, tmp_path: Path) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(case_target() / name, folder)
    for read in (read_text_side, read_facts, load_tokenizer):
        with pytest.raises(UserError, match="tokenizer") as caught:
            read(str(folder))
        assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("size", [0, 7, 100, 5000, -1])
def test_damaged_tensor_files(case_target: Any, tmp_path: Path, size: int) -> None:
    folder = shutil.copytree(case_target(), tmp_path / "t")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:size])
    for read in (read_facts, load_target):
        with pytest.raises(UserError, match=r"model.safetensors is damaged, it has [\d,]+ bytes") as caught:
            read(str(folder))
        assert len(str(caught.value).splitlines()) == 3
    (folder / "model.safetensors").write_bytes(whole[:8] + b"x" + whole[9:])
    with pytest.raises(UserError, match="damaged"):
        read_facts(str(folder))


@pytest.mark.parametrize("name", ["generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", ["", "[1]", '{"weight_map": 1', "[" * 100_000])
def test_damaged_json_beside_the_config(case_target: Any, tmp_path: Path, name: str, content: str) -> None:
    folder = shutil.copytree(case_target(), tmp_path / "t")
    (folder / name).write_text(content)
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()  # which is read first
    with pytest.raises(UserError, match=f"{name} cannot be read") as caught:
        read_facts(str(folder))
    assert len(str(caught.value).splitlines()) == 3


def test_a_damaged_pytorch_file(case_target: Any, tmp_path: Path) -> None:
    """Its size tells nothing, so loading finds out."""
    folder = shutil.copytree(case_target(), tmp_path / "t")
    (folder / "model.safetensors").unlink()
    for content in (b"", b"PK\x03\x04" + b"x" * 1000, b"x" * 1000):
        (folder / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(UserError) as caught:
            load_target(str(folder))
        assert len(str(caught.value).splitlines()) == 3


def test_facts_of_the_tied_case(case_target: Any) -> None:
    facts = read_facts(str(case_target()))
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size, facts.intermediate_size) == (6, 64, 320, 96)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.max_positions) == (4, 2, 16, 512)
    assert (facts.is_tied, facts.is_recurrent, facts.architecture) == (True, False, "Qwen3ForCausalLM")
    assert (facts.tokenizer_size, facts.pad_id, facts.eos_ids, facts.mask_id) == (262, 0, (2,), 5)
    assert facts.special_ids == (0, 1, 2, 3, 4, 5)
    assert facts.rope["rope_type"] == "default"
    assert isinstance(facts.rope["rope_theta"], (int, float))
    plain = facts.as_plain()
    assert json.loads(json.dumps(plain)) == plain


def test_facts_of_the_packaged_target() -> None:
    facts = read_facts("tiny")
    assert (facts.name, facts.mask_id, facts.eos_ids) == ("tiny", 4, (3,))
    assert facts.num_layers >= 6, "five taps lie below its last layer"


def test_recurrent_layers_are_seen(case_target: Any) -> None:
    facts = read_facts(str(case_target("plain", "t19-hybrid")))
    assert (facts.is_recurrent, facts.is_tied) == (True, False)


def test_changed_weights_change_the_facts(case_target: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(case_target(), tmp_path / "t")
    first = read_facts(str(folder)).weights_sha256
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (folder / "model.safetensors").write_bytes(raw)
    assert read_facts(str(folder)).weights_sha256 != first


@pytest.mark.parametrize(
    ("generation", "config_eos", "expected"),
    [(None, None, (2,)), ([2, 3], None, (2, 3)), (None, 4, (2, 4)), (7, 9, (2,)), ([3, 999], 3, (2, 3))],
)
def test_ids_that_end_an_answer(
    case_target: Any, tmp_path: Path, generation: Any, config_eos: Any, expected: tuple[int, ...]
) -> None:
    """Ids of the configs count only where the tokenizer calls them special: classes have defaults."""
    folder = shutil.copytree(case_target(), tmp_path / "t")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": config_eos}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_facts(str(folder)).eos_ids == expected
    assert read_text_side(str(folder)).eos_ids == expected


def test_dtype_is_explicit() -> None:
    assert resolve_dtype("auto", "cpu") == "float32"
    assert resolve_dtype("auto", "cuda:1") == "bfloat16"
    assert resolve_dtype("bfloat16", "cpu") == "bfloat16"


def test_tokenizer_facts_agree_with_the_target(case_target: Any) -> None:
    facts = read_facts(str(case_target()))
    own = tokenizer_facts(load_tokenizer(str(case_target())))
    side = read_text_side(str(case_target()))
    assert facts.tokenizer_sha256 == own["tokenizer_sha256"] == side.tokenizer_sha256
    assert facts.template_sha256 == own["template_sha256"] == side.template_sha256


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda f: (f / "config.json").write_text('{"model_type": "from-the-future"}'), "cannot read"),
        (lambda f: (f / "config.json").write_text("{"), "cannot read"),
    ],
)
def test_broken_folders_get_three_lines(case_target: Any, tmp_path: Path, break_it: Any, says: str) -> None:
    folder = shutil.copytree(case_target(), tmp_path / "t")
    break_it(folder)
    with pytest.raises(UserError, match=says) as caught:
        read_facts(str(folder))
    assert len(str(caught.value).splitlines()) == 3
