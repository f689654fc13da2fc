"""A folder is read back to the same drafter bit for bit, and a damaged or foreign one is refused."""

import json
import shutil

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.export.config import ExportConfig
from dflash_offline.train.export.export import export
from dflash_offline.train.export.folders import is_run, read_drafter_folder, read_folder
from dflash_offline.train.export.tensors import tensors_sha256
from safetensors.torch import load_file, save_file

BOTH = ["zlab", "speculators"]
TORN = "model.safetensors"


def cases(shelf_layouts=("full", "full causal", "sliding", "sliding causal", "mixed", "mixed causal")):
    own = ("full", "sliding", "sliding causal", "mixed")
    return [(layout, name) for layout in BOTH for name in shelf_layouts if layout == "zlab" or name in own]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout, name", cases())
def test_the_reloaded_drafter_gives_the_same_bits(write_drafter, shelf, layout, name, dtype) -> None:
    path, drafter = write_drafter(layout, dtype=dtype, attention=shelf.LAYOUTS[name])
    folder, tensors = read_drafter_folder(path)
    assert (folder.spec, folder.layout) == (drafter.spec, layout)
    assert folder.dtype == str(dtype).removeprefix("torch.")
    again = Drafter(folder.spec).to(dtype)
    again.load_state_dict(tensors)
    outputs = shelf.block_outputs(drafter)
    assert torch.equal(shelf.block_outputs(again), outputs)
    for other in shelf.LAYOUTS.values():
        if len(other) == 2 and other != drafter.spec.attention:
            assert not torch.equal(shelf.block_outputs(shelf.with_layers(drafter, other)), outputs)


@pytest.mark.parametrize("name", ["full", "sliding", "mixed"])
def test_from_one_format_to_the_other_and_back_is_the_same(write_drafter, tmp_path, shelf, name) -> None:
    path, _ = write_drafter(attention=shelf.LAYOUTS[name])
    target = dict(shelf.TARGET)
    there, back = tmp_path / "there", tmp_path / "back"
    wanted = ExportConfig(out=str(there), format="speculators", target="some/target")
    export(path, wanted, read_target=lambda given: target | {"name": given})
    assert read_folder(there).layout == "speculators"
    export(there, ExportConfig(out=str(back)))
    for file in ("config.json", TORN):
        assert (back / file).read_bytes() == (path / file).read_bytes()
    assert (
        f"converted from | a folder in the format of speculators, tensors sha256 `{tensors_sha256(there)}`"
        in (back / "README.md").read_text()
    )


def test_a_folder_of_this_machine_is_in_the_printed_command_and_not_in_the_card(write_drafter, tmp_path, shelf) -> None:
    path, _ = write_drafter()
    place = str(tmp_path / "target")
    told = ExportConfig(out=str(tmp_path / "out"), format="vllm", target=place)
    report = export(path, told, read_target=lambda given: shelf.TARGET | {"name": given})
    assert report.commands[0].startswith(f"vllm serve {place} ")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "vllm serve target " in card
    assert str(tmp_path) not in card
    told = ExportConfig(out=str(tmp_path / "one"), format="speculators", target=place)
    report = export(path, told, read_target=lambda given: shelf.TARGET | {"name": given})
    assert "a folder of this machine" in report.text()
    assert str(tmp_path) not in (tmp_path / "one" / "README.md").read_text()


def test_what_neither_folder_nor_option_says_is_asked_for(write_drafter, tmp_path, shelf) -> None:
    path, _ = write_drafter()
    with pytest.raises(UserError, match="does not say the name and architecture of its target") as caught:
        export(path, ExportConfig(out=str(tmp_path / "out"), format="speculators"))
    assert "--target" in caught.value.advice
    foreign, drafter = write_drafter("speculators")
    shelf.rewrite(foreign, {"transformer_layer_config.num_target_layers": ...})
    assert read_folder(foreign).spec.num_target_layers == max(drafter.spec.tap_layers) + 2
    with pytest.raises(UserError, match="does not say the num_layers of its target") as caught:
        export(foreign, ExportConfig(out=str(tmp_path / "out")))
    assert caught.value.advice == "name the target: --target some/target"
    assert not (tmp_path / "out").exists()
    told = ExportConfig(out=str(tmp_path / "out"), target="some/target")
    export(foreign, told, read_target=lambda given: shelf.TARGET)
    assert read_folder(tmp_path / "out").spec == drafter.spec


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"hidden_size": 64}, "hidden_size 32, and the target has 64"),
        ({"vocab_size": 64}, "vocab_size 48, and the target has 64"),
        ({"num_layers": 8}, "num_layers 6, and the target has 8"),
        ({"num_layers": 4}, "tap 3, and the target has layers 0 to 3"),
    ],
    ids=["hidden_size", "vocab_size", "num_layers", "taps"],
)
def test_a_folder_of_another_target_is_refused(write_drafter, shelf, changes, told) -> None:
    path, _ = write_drafter()
    with pytest.raises(UserError) as caught:
        read_folder(path).fitted(shelf.TARGET | changes)
    assert told in caught.value.happened
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "dtype", "integers", "torn", "gone", "no config"])
def test_a_damaged_folder_is_refused_by_name(write_drafter, layout, fault) -> None:
    path, _ = write_drafter(layout, dtype=torch.bfloat16)
    tensors = load_file(path / TORN)
    name, told = "layers.1.self_attn.q_norm.weight", None
    if fault == "missing":
        del tensors[name]
        told = f"{name} is missing"
    elif fault == "extra":
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        told = "rotary_emb.inv_freq is unknown"
    elif fault == "shape":
        tensors[name] = torch.zeros(5, dtype=torch.bfloat16)
        told = f"{name} has shape (5,), not (8,)"
    elif fault in ("dtype", "integers"):
        tensors[name] = tensors[name].to(torch.float32 if fault == "dtype" else torch.int8)
        told = f"{name} is {'float32' if fault == 'dtype' else 'I8'}, others are bfloat16"
    if told is not None:
        save_file(tensors, path / TORN)
    elif fault == "torn":
        (path / TORN).write_bytes((path / TORN).read_bytes()[:-10])
        told = "cannot be read"
    else:
        (path / (TORN if fault == "gone" else "config.json")).unlink()
        told = "cannot be read"
    for read in (read_folder, read_drafter_folder):
        with pytest.raises(UserError) as caught:
            read(path)
        assert told in caught.value.happened
        assert str(path) in caught.value.happened
        assert len(str(caught.value).splitlines()) == 3


def test_a_head_of_its_own_is_none_of_a_zlab_drafter(write_drafter) -> None:
    path, _ = write_drafter()
    save_file(load_file(path / TORN) | {"lm_head.weight": torch.zeros(48, 32)}, path / TORN)
    with pytest.raises(UserError, match=r"lm_head\.weight is unknown"):
        read_folder(path)


def test_copies_of_the_target_in_an_older_speculators_folder_are_not_read(write_drafter) -> None:
    path, drafter = write_drafter("speculators")
    copies = {"embed_tokens.weight": torch.zeros(48, 32), "verifier_norm.weight": torch.ones(32)}
    save_file(load_file(path / TORN) | copies, path / TORN)
    folder, tensors = read_drafter_folder(path)
    assert set(folder.copies) == set(copies)
    assert set(tensors) == set(drafter.state_dict())
    save_file(load_file(path / TORN) | {"lm_head.weight": torch.zeros(40, 32)}, path / TORN)
    with pytest.raises(UserError, match=r"lm_head\.weight has shape \(40, 32\), not \(48, 32\)"):
        read_folder(path)


def test_torchspec_names_are_refused_by_name(write_drafter) -> None:
    path, _ = write_drafter()
    tensors = load_file(path / TORN)
    tensors["context_proj.weight"] = tensors.pop("fc.weight")
    save_file(tensors, path / TORN)
    with pytest.raises(UserError, match="TorchSpec's names, like context_proj") as caught:
        read_folder(path)
    assert len(str(caught.value).splitlines()) == 3


def test_shards_are_read_as_one(write_drafter, shelf, tmp_path) -> None:
    path, drafter = write_drafter()
    tensors = load_file(path / TORN)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, path / file)
    (path / TORN).unlink()
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    folder, found = read_drafter_folder(path)
    assert folder.spec == drafter.spec
    assert all(torch.equal(found[name], tensor) for name, tensor in drafter.state_dict().items())
    before = tensors_sha256(path)
    other = shutil.copytree(path, tmp_path / "other")
    save_file({n: tensors[n] + (n == names[-1]) for n in names[9:]}, other / "model-00002-of-00002.safetensors")
    assert tensors_sha256(other) != before
    (path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        read_folder(path)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"block_size": 16}, "block_size = [8, 16]"),
        ({"dflash_config.mask_token_id": ...}, "mask_token_id"),
        ({"rope_theta": ..., "rope_parameters": ...}, "rope_theta = []"),
        ({"dflash_config.use_swa": True}, "use_swa"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"dflash_config.attention_value_scale": 0.5}, "attention_value_scale"),
        ({"is_neox_style": False}, "is_neox_style"),
        ({"dflash_config.projector_type": "domino"}, "projector_type"),
        ({"output_multiplier": 1.0, "logit_scale": 0.5}, "logit_scale"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_keys_that_contradict_or_mean_another_drafter_are_refused(write_drafter, shelf, changes, told) -> None:
    path, _ = write_drafter()
    shelf.rewrite(path, changes)
    with pytest.raises(UserError) as caught:
        read_folder(path)
    assert told in caught.value.happened
    assert len(str(caught.value).splitlines()) == 3


def test_a_mask_embedding_of_its_own_is_refused(write_drafter) -> None:
    path, _ = write_drafter()
    (path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UserError, match="an embedding of their own"):
        read_folder(path)


def test_a_run_is_told_from_a_folder(write_drafter, tmp_path) -> None:
    path, _ = write_drafter()
    assert not is_run(path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    assert is_run(tmp_path / "run")
    assert is_run(tmp_path / "absent")
