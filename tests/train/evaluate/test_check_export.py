"""Faults of an exported folder that cost acceptance and raise nothing in an engine: each is named with both values."""

import json

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.train.checkpoint import load_drafter
from dflash_offline.train.export.check import check_export, differences
from dflash_offline.train.export.config import ExportConfig
from dflash_offline.train.export.export import export
from safetensors.torch import load_file, save_file

BOTH = ["zlab", "speculators"]
TENSORS = "model.safetensors"


@pytest.fixture(params=BOTH)
def exported(request, tiny_run, tmp_path):
    config = ExportConfig(out=str(tmp_path / "out"), checkpoint="latest", format=request.param)
    return export(tiny_run.run_dir, config).path


def found_in(folder, tiny_run):
    drafter, facts = load_drafter(tiny_run.run_dir, "latest", "cpu", torch.float32)
    return differences(folder, facts, drafter.state_dict())


def change(folder, layout_changes):
    """Changes keys of config.json: those of the folder's own format, by dotted name; ... removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    layout = "speculators" if "speculators_model_type" in config else "zlab"
    for dotted, value in layout_changes[layout].items():
        place, names = config, dotted.split(".")
        for name in names[:-1]:
            place = place[name]
        if value is ...:
            del place[names[-1]]
        else:
            place[names[-1]] = value
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", BOTH)
def test_an_export_is_its_run(tiny_run, tmp_path, layout, dtype) -> None:
    config = ExportConfig(out=str(tmp_path / "out"), checkpoint="latest", format=layout, target="another/name")
    export(tiny_run.run_dir, config, dtype=dtype)
    assert found_in(tmp_path / "out", tiny_run) == []
    check_export(tmp_path / "out", tiny_run.run_dir, "latest")


L = "transformer_layer_config."
CONFIG_FAULTS = {
    "taps shifted by one": (
        {
            "zlab": {"dflash_config.target_layer_ids": [1, 3, 5]},
            "speculators": {"aux_hidden_state_layer_ids": [2, 4, 6]},
        },
        {
            "zlab": ("taps (dflash_config.target_layer_ids)", [1, 3, 5], [0, 2, 4]),
            "speculators": ("taps (aux_hidden_state_layer_ids)", [2, 4, 6], [1, 3, 5]),
        },
    ),
    "mask token changed": (
        {"zlab": {"dflash_config.mask_token_id": 5}, "speculators": {"mask_token_id": 5}},
        {
            "zlab": ("mask token (dflash_config.mask_token_id)", 5, None),
            "speculators": ("mask token (mask_token_id)", 5, None),
        },
    ),
    "rope theta lost": (
        {
            "zlab": {"rope_theta": ..., "rope_parameters": ...},
            "speculators": {L + "rope_theta": ..., L + "rope_parameters": ...},
        },
        {
            "zlab": ("rope (rope_theta)", "absent", 10000.0),
            "speculators": (f"rope ({L}rope_theta)", "absent", 10000.0),
        },
    ),
    "rope of another kind": (
        {
            "zlab": {"rope_parameters.rope_type": "yarn"},
            "speculators": {L + "rope_parameters.rope_type": "yarn"},
        },
        {
            "zlab": ("rope (rope_parameters.rope_type)", "yarn", "default"),
            "speculators": (f"rope ({L}rope_parameters.rope_type)", "yarn", "default"),
        },
    ),
    "part of the head turned": (
        {"zlab": {"partial_rotary_factor": 0.25}, "speculators": {L + "partial_rotary_factor": 0.25}},
        {
            "zlab": ("rope (partial_rotary_factor)", 0.25, "absent"),
            "speculators": (f"rope ({L}partial_rotary_factor)", 0.25, "absent"),
        },
    ),
    "tied head": (
        {"zlab": {"tie_word_embeddings": True}, "speculators": {"tie_word_embeddings": True}},
        {name: ("head (tie_word_embeddings)", True, False) for name in BOTH},
    ),
    "block size": (
        {
            "zlab": {"block_size": 8, "dflash_config.block_size": 8},
            "speculators": {"block_size": 8},
        },
        {name: ("block size (block_size)", 8, 4) for name in BOTH},
    ),
    "causal": (
        {"zlab": {"is_causal": True}, "speculators": {"sliding_window_non_causal": False}},
        {
            "zlab": ("attention (is_causal)", True, "absent"),
            "speculators": ("attention (sliding_window_non_causal)", False, True),
        },
    ),
    "another tokenizer": (
        {"zlab": {"eos_token_id": 77}, "speculators": {L + "eos_token_id": 77}},
        {"zlab": ("eos_token_id", 77, None), "speculators": (f"{L}eos_token_id", 77, None)},
    ),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_changed_config_is_named_with_both_values(tiny_run, exported, fault) -> None:
    changes, told = CONFIG_FAULTS[fault]
    layout = "speculators" if "speculators" in (exported / "config.json").read_text() else "zlab"
    fact, wrong, right = told[layout]
    if right is None:  # what the run has
        spec, eos = tiny_run.drafter.spec, tiny_run.target.facts.eos_ids
        right = spec.mask_token_id if "mask" in fact else eos[0]
    change(exported, changes)
    found = {one.fact: (one.found, one.expected) for one in found_in(exported, tiny_run)}
    assert found[fact] == (wrong, right)
    with pytest.raises(UserError) as caught:
        check_export(exported, tiny_run.run_dir, "latest")
    assert f"{fact} is {wrong}, not {right}" in caught.value.happened
    assert len(str(caught.value).splitlines()) == 3


def test_a_layout_that_samples_from_the_anchor_is_refused(tiny_run, exported) -> None:
    change(exported, {name: {"sample_from_anchor": True} for name in BOTH})
    with pytest.raises(UserError, match="samples from the anchor"):
        check_export(exported, tiny_run.run_dir, "latest")


NAME = "layers.1.self_attn.k_norm.weight"
TENSOR_FAULTS = {
    "missing": (NAME, "absent", "a tensor"),
    "another dtype": (f"dtype of {NAME}", "float32", "bfloat16, as config.json says"),
    "another shape": (f"shape of {NAME}", (7,), (32,)),
    "one bit": (NAME, "other than the run's in 1 of 32 values", "equal"),
    "head of its own": ("lm_head.weight", "a tensor (3, 3)", "absent: a drafter has none of this name"),
    "bf16 frequencies": ("rotary_emb.inv_freq", "a tensor (16,)", "absent: a drafter has none of this name"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_changed_tensor_is_named_with_both_values(tiny_run, exported, fault) -> None:
    tensors = load_file(exported / TENSORS)
    if fault == "missing":
        del tensors[NAME]
    elif fault == "another dtype":
        tensors[NAME] = tensors[NAME].float()
    elif fault == "another shape":
        tensors[NAME] = tensors[NAME][:7].clone()
    elif fault == "one bit":
        tensors[NAME].view(torch.int16)[3] ^= 1
    elif fault == "head of its own":
        tensors["lm_head.weight"] = torch.zeros(3, 3, dtype=torch.bfloat16)
    else:
        tensors["rotary_emb.inv_freq"] = torch.ones(16, dtype=torch.bfloat16)
    save_file(tensors, exported / TENSORS)
    found = found_in(exported, tiny_run)
    assert [(one.fact, one.found, one.expected) for one in found] == [TENSOR_FAULTS[fault]]
    with pytest.raises(UserError, match="is not step 48"):
        check_export(exported, tiny_run.run_dir, "latest")


def test_another_checkpoint_is_another_drafter(tiny_run, exported) -> None:
    with pytest.raises(UserError, match=r"is not step 0 .*fc.weight is other than the run's in .* of .* values"):
        check_export(exported, tiny_run.run_dir, "0")


def test_a_mask_embedding_that_vllm_would_read_is_named(tiny_run, exported) -> None:
    (exported / "mask_embedding.pt").write_bytes(b"")
    assert [one.fact for one in found_in(exported, tiny_run)] == ["mask token (mask_embedding.pt)"]
