"""An exported folder is read back to the same drafter, and nothing else passes for one."""

import json
import shutil

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.train.checkpoint import load_drafter
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.export.config import ExportConfig
from dflash_offline.train.export.export import export, write_zlab
from dflash_offline.train.export.folders import read_drafter_folder, read_folder
from dflash_offline.train.export.formats import spec_of
from dflash_offline.train.export.tensors import num_parameters, tensor_shapes
from dflash_offline.train.export.zlab import zlab_config
from dflash_offline.train.kinds import AttentionKind, describe
from dflash_offline.train.spec import DrafterSpec
from safetensors.torch import load_file, save_file

SHAPES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "num_taps": 3,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "block_size": 8,
    "mask_token_id": 63,
    "tap_layers": (4, 0, 2),
    "num_target_layers": 6,
    "max_positions": 512,
    "attention": (AttentionKind(),) * 2,
}


FULL, CAUSAL, SLIDING, SLIDING_CAUSAL = (
    AttentionKind(window, is_causal) for window in (None, 64) for is_causal in (False, True)
)
WIDE = (SLIDING, SLIDING)
LAYOUTS = [
    *((kind, kind) for kind in (CAUSAL, SLIDING, SLIDING_CAUSAL)),
    *((kind, FULL) for kind in (SLIDING, SLIDING_CAUSAL)),
    (FULL, SLIDING, FULL),
    (SLIDING_CAUSAL, CAUSAL),
    (*[SLIDING_CAUSAL] * 4, FULL),
    (FULL, SLIDING_CAUSAL, FULL, SLIDING_CAUSAL),
]


def make_spec(**changes) -> DrafterSpec:
    return DrafterSpec(**(SHAPES | changes))


@pytest.fixture
def exported(tiny_run, tmp_path):
    report = export(tiny_run.run_dir, ExportConfig(out=str(tmp_path / "out"), checkpoint="latest"))
    return report.path


def outputs(drafter, width):
    """A block of `width` after 19 context tokens."""
    generator = torch.Generator().manual_seed(1)
    spec, dtype = drafter.spec, drafter.fc.weight.dtype
    cache = drafter.new_cache()
    taps = torch.randn(19, spec.num_taps * spec.hidden_size, generator=generator).to(dtype)
    drafter.extend(cache, taps, torch.arange(19))
    block = torch.randn(width, spec.hidden_size, generator=generator).to(dtype)
    return drafter.propose(cache, block, torch.arange(19, 19 + width))


def test_the_reloaded_drafter_gives_identical_outputs(tiny_run, exported):
    drafter, facts = load_drafter(tiny_run.run_dir, "latest", "cpu", torch.bfloat16)
    folder, state = read_drafter_folder(exported)
    assert folder.spec == facts.spec
    again = Drafter(folder.spec).to(torch.bfloat16)
    again.load_state_dict(state)
    assert torch.equal(outputs(again, 4), outputs(drafter, 4))
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}


def test_float32_export_keeps_every_bit(tiny_run, tmp_path):
    export(tiny_run.run_dir, ExportConfig(out=str(tmp_path / "out")), dtype=torch.float32)
    _, state = read_drafter_folder(tmp_path / "out")
    for name, tensor in tiny_run.drafter.state_dict().items():
        assert torch.equal(state[name], tensor)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_tensors_are_exactly_the_formats(tiny_run, exported):
    tensors = load_file(exported / "model.safetensors")
    spec = tiny_run.drafter.spec
    assert len(tensors) == 11 * spec.num_layers + 3
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == tensor_shapes(spec)
    assert not [name for name in tensors if "embed" in name or "lm_head" in name or "rot" in name]
    assert sum(tensor.numel() for tensor in tensors.values()) == num_parameters(spec)


def test_config_has_the_keys_that_engines_read(tiny_run, exported):
    config = json.loads((exported / "config.json").read_text())
    spec, facts = tiny_run.drafter.spec, tiny_run.target.facts
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["block_size"] == config["dflash_config"]["block_size"] == spec.block_size
    assert config["dflash_config"]["target_layer_ids"] == [0, 2, 4]
    assert config["dflash_config"]["mask_token_id"] == spec.mask_token_id
    assert config["dflash_config"]["slot_meaning"] == "slot k predicts its own position a+k"
    assert config["num_target_layers"] == facts.num_layers
    assert config["layer_types"] == ["full_attention"] * spec.num_layers
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == facts.rope["rope_theta"]
    assert config["rope_parameters"]["rope_type"] == "default"
    assert (config["use_sliding_window"], config["sliding_window"], config["tie_word_embeddings"]) == (
        False,
        None,
        False,
    )
    assert config["eos_token_id"] == facts.eos_ids[0]
    assert config["dtype"] == "bfloat16"
    for name in ("partial_rotary_factor", "mrope_section", "is_causal", "auto_map"):
        assert name not in config


def test_transformers_reads_the_config(exported):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(exported)
    assert type(config).__name__ == "Qwen3Config"
    assert config.layer_types == ["full_attention"] * 2
    assert config.rope_parameters["rope_theta"] == 10000.0


def test_the_card_says_what_was_trained_and_how_to_serve(tiny_run, exported):
    card = (exported / "README.md").read_text()
    assert tiny_run.target.facts.weights_sha256 in card
    assert "step 48" in card
    assert '"num_speculative_tokens": 3' in card
    assert "--speculative-algorithm DFLASH" in card
    assert str(tiny_run.run_dir) not in card


@pytest.mark.parametrize(
    "sizes, count",
    [
        ((4096, 12288, 32, 8, 128, 5, 5, 151_936), 1_048_626_432),
        ((5120, 17408, 32, 8, 128, 5, 5, 248_320), 1_730_213_120),
        ((6144, 12288, 64, 16, 64, 5, 5, 154_880), 1_635_852_928),
    ],
    ids=["Qwen3-8B", "27B", "GLM-5-like"],
)
def test_parameter_counts_of_published_drafters(sizes, count):
    hidden, inner, heads, kv_heads, width, layers, taps, vocabulary = sizes
    spec = make_spec(
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        num_layers=layers,
        attention=(AttentionKind(),) * layers,
        num_taps=taps,
        tap_layers=tuple(range(taps)),
        vocab_size=vocabulary,
        mask_token_id=7,
    )
    assert num_parameters(spec) == count
    with torch.device("meta"):
        drafter = Drafter(spec)
    assert sum(parameter.numel() for parameter in drafter.parameters()) == count
    assert {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()} == tensor_shapes(spec)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"embedding_scale": 5.5, "output_multiplier": 0.25, "logit_softcap": 30.0},
        *({"num_layers": len(layers), "attention": layers} for layers in LAYOUTS),
    ],
    ids=lambda changes: describe(changes["attention"]) if "attention" in changes else " ".join(changes),
)
def test_config_and_spec_are_two_forms_of_one_thing(changes, tmp_path):
    spec = make_spec(**changes)
    config = json.loads(json.dumps(zlab_config(spec, {"eos_ids": [1, 2]}, "bfloat16")))
    assert spec_of(tmp_path / "config.json", config) == spec


@pytest.mark.parametrize("window", [8, 12])
def test_a_windowed_drafter_is_written_with_every_key_and_read_back(window, tmp_path):
    """Whatever of these keys an engine reads, it finds the window in every layer, and blocks that are not causal."""
    spec = make_spec(attention=(AttentionKind(window),) * 2)
    drafter = Drafter(spec)
    drafter.init_weights(3)
    assert write_zlab(tmp_path / "out", spec, drafter.state_dict(), {"eos_ids": [1]}, "card")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention"] * spec.num_layers
    assert (config["use_sliding_window"], config["sliding_window"], config["max_window_layers"]) == (True, window, 0)
    assert config["is_causal"] is False
    found, state = read_drafter_folder(tmp_path / "out")
    assert found.spec == spec
    again = Drafter(found.spec)
    again.load_state_dict(state)
    assert torch.equal(outputs(again, 8), outputs(drafter, 8))
    plain = Drafter(make_spec())
    plain.load_state_dict(state)
    assert not torch.equal(outputs(plain, 8), outputs(drafter, 8))


def test_transformers_reads_a_windowed_config(tmp_path):
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(zlab_config(make_spec(attention=WIDE), {}, "bfloat16")))
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.sliding_window, config.layer_types) == (64, ["sliding_attention"] * 2)
    config.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert spec_of(tmp_path / "again" / "config.json", saved) == make_spec(attention=WIDE)


def test_published_configs_without_our_keys_are_read(tmp_path):
    config = zlab_config(make_spec(), {}, "bfloat16")
    del config["block_size"], config["dflash_config"]["slot_meaning"], config["rope_parameters"]
    assert spec_of(tmp_path / "config.json", config) == make_spec()
    causal = make_spec(attention=(AttentionKind(64, True),) * 2)
    sliding = zlab_config(causal, {}, "bfloat16")
    del sliding["is_causal"]
    assert spec_of(tmp_path / "config.json", sliding) == causal
    mixed = make_spec(attention=(AttentionKind(), AttentionKind(64, True)))
    filled_in = zlab_config(mixed, {}, "bfloat16")
    assert "is_causal" not in filled_in
    del filled_in["layer_types"]  # then Qwen3Config takes max_window_layers
    assert spec_of(tmp_path / "config.json", filled_in) == mixed
    jet = zlab_config(make_spec(), {}, "bfloat16")
    jet["dflash_config"]["causal"] = True  # what vLLM reads
    assert spec_of(tmp_path / "config.json", jet) == make_spec(attention=(AttentionKind(None, True),) * 2)


@pytest.mark.parametrize(
    "layers, keys",
    [
        ((FULL, FULL), (None, None, False, None, 2)),
        ((CAUSAL, CAUSAL), (True, True, False, None, 2)),
        ((SLIDING, SLIDING), (False, None, True, 64, 0)),
        ((SLIDING_CAUSAL, SLIDING_CAUSAL), (True, None, True, 64, 0)),
        ((SLIDING_CAUSAL, FULL), (None, None, True, 64, 0)),
        ((FULL, SLIDING_CAUSAL), (None, None, True, 64, 1)),
        ((SLIDING, FULL), (False, None, True, 64, 0)),
        ((SLIDING_CAUSAL, CAUSAL), (True, True, True, 64, 0)),
    ],
    ids=lambda value: describe(value) if isinstance(value[0], AttentionKind) else "",
)
def test_each_variant_has_its_keys(layers, keys):
    config = zlab_config(make_spec(attention=layers), {}, "bfloat16")
    names = ("use_sliding_window", "sliding_window", "max_window_layers")
    found = config.get("is_causal"), config["dflash_config"].get("causal"), *(config[name] for name in names)
    assert found == keys


@pytest.mark.parametrize(
    "layers, told",
    [
        ((AttentionKind(64), AttentionKind(32)), "1 x sliding 64, 1 x sliding 32"),
        ((SLIDING, CAUSAL), "1 x sliding 64, 1 x full causal"),
        ((AttentionKind(7), AttentionKind(7)), "a window of 7 with blocks of 8"),
    ],
)
def test_attention_that_the_format_cannot_say_is_refused_before_a_file_is_written(layers, told, tmp_path):
    spec = make_spec(attention=layers)
    with pytest.raises(UserError, match=told) as caught:
        write_zlab(tmp_path / "out", spec, Drafter(spec).state_dict(), {}, "card")
    assert len(str(caught.value).splitlines()) == 3
    assert list(tmp_path.iterdir()) == []


def test_the_same_export_again_changes_nothing(tiny_run, exported):
    before = {path.name: path.stat().st_mtime_ns for path in exported.iterdir()}
    report = export(tiny_run.run_dir, ExportConfig(out=str(exported), checkpoint="latest"))
    assert not report.is_new
    assert "unchanged" in report.text()
    assert {path.name: path.stat().st_mtime_ns for path in exported.iterdir()} == before
    assert [path.name for path in exported.parent.iterdir()] == ["out"]


def test_a_folder_with_something_else_is_refused_and_left_alone(tiny_run, exported):
    with pytest.raises(UserError, match="is not this export"):
        export(tiny_run.run_dir, ExportConfig(out=str(exported), checkpoint="0"))
    (exported / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not this export"):
        export(tiny_run.run_dir, ExportConfig(out=str(exported), checkpoint="latest"))
    assert (exported / "notes.txt").read_text() == "mine"
    assert [path.name for path in exported.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["file", "foreign folder", "half an export", "link to nothing"])
def test_a_place_that_is_taken_is_seen_before_the_checkpoint_is_read(tiny_run, tmp_path, kind):
    run_dir, out = tmp_path / "run", tmp_path / "taken"
    step_dir = run_dir / "checkpoints" / "step-00000048"
    shutil.copytree(tiny_run.run_dir, run_dir)
    for path in step_dir.glob("*.safetensors"):
        path.write_bytes(b"broken")
    if kind == "file":
        out.write_text("mine")
    elif kind == "link to nothing":
        out.symlink_to(tmp_path / "nothing")
    else:
        out.mkdir()
        (out / ("notes.txt" if kind == "foreign folder" else "README.md")).write_text("mine")
    config = ExportConfig(out=str(out), checkpoint="48")
    with pytest.raises(UserError, match="'.*taken' is there and is not this export") as caught:
        export(run_dir, config)
    assert len(str(caught.value).splitlines()) == 3
    with pytest.raises(UserError, match="step-00000048"):
        export(run_dir, ExportConfig(out=str(tmp_path / "free"), checkpoint="48"))


@pytest.mark.parametrize(
    "settings, is_run_by_sglang",
    [
        ([], True),
        (["drafter.window=8", "drafter.causal=sliding"], True),
        (["drafter.window=8", "drafter.layer_types=sliding,full", "drafter.causal=sliding"], True),
        (["drafter.window=8"], False),
        (["drafter.causal=all"], False),
        (["drafter.window=8", "drafter.layer_types=sliding,full", "drafter.causal=all"], False),
    ],
    ids=lambda value: " ".join(value) or "full" if isinstance(value, list) else "",
)
def test_sglang_gets_a_command_only_for_layers_that_it_runs_as_trained(
    lab, tiny_run, tmp_path, settings, is_run_by_sglang
):
    """It runs sliding layers causal inside the block and full ones not, and reads no other word on it."""
    drafter = lab.make_run(tiny_run.store, tmp_path / "run", *settings)
    lab.save_step(tmp_path / "run", drafter, 3)
    text = export(tmp_path / "run", ExportConfig(out=str(tmp_path / "out"))).text()
    card = (tmp_path / "out" / "README.md").read_text()
    for told in (text, card):
        assert "vllm serve" in told
        assert ("sglang.launch_server" in told) == is_run_by_sglang
        assert ("o command for SGLang" in told) == (not is_run_by_sglang)
    if not is_run_by_sglang:
        note = next(line for line in text.splitlines() if line.startswith("note: no command for SGLang"))
        assert note.endswith(describe(drafter.spec.attention))


def test_an_empty_folder_is_filled(tiny_run, tmp_path):
    (tmp_path / "deep" / "out").mkdir(parents=True)
    assert export(tiny_run.run_dir, ExportConfig(out=str(tmp_path / "deep" / "out"))).is_new


def test_an_empty_folder_behind_a_link_is_filled(tiny_run, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    for is_new in (True, False):
        assert export(tiny_run.run_dir, ExportConfig(out=str(tmp_path / "out"), checkpoint="latest")).is_new == is_new
    assert (tmp_path / "out").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]


def test_a_checkpoint_beside_a_folder_is_refused(exported, tmp_path):
    with pytest.raises(UserError, match="checkpoint = '3' does nothing with the drafter's folder"):
        export(exported, ExportConfig(out=str(tmp_path / "again"), checkpoint="3"))


def test_weights_that_are_not_finite_are_named_by_their_checkpoint(tiny_run, tmp_path):
    run_dir = shutil.copytree(tiny_run.run_dir, tmp_path / "run")
    weights = run_dir / "checkpoints" / "step-00000048" / "drafter.safetensors"
    save_file({name: tensor * float("nan") for name, tensor in load_file(weights).items()}, weights)
    state = json.loads((weights.parent / "state.json").read_text())
    del state["crc32c"]  # as an earlier version wrote it; with it the file is known for another one
    (weights.parent / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=f"tensors of '{weights.parent}' are not finite"):
        export(run_dir, ExportConfig(out=str(tmp_path / "out"), checkpoint="latest"))
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_leaves_nothing(tiny_run, tmp_path, monkeypatch):
    def broken(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dflash_offline.train.export.write.publish", broken)
    with pytest.raises(UserError, match="ENOSPC"):
        export(tiny_run.run_dir, ExportConfig(out=str(tmp_path / "out")))
    assert list(tmp_path.iterdir()) == []


SLIDES = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}


def rewrite(folder, **changes):
    """Changes keys of config.json; names with a dot lie in dflash_config."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        place = config["dflash_config"] if name.startswith("own_") else config
        place[name.removeprefix("own_")] = value
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"block_size": 16}, "block_size"),
        ({"own_mask_token_id": None}, "mask_token_id"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"own_shift_label": True}, "shift_label"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"own_slot_meaning": "slot k predicts a+k+1"}, "slot_meaning"),
        ({"rope_theta": 5000.0}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn"}}, "rope_type"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        (SLIDES | {"sliding_window": None}, "sliding_window"),
        (SLIDES | {"sliding_window": 3}, "sliding_window"),
        (SLIDES | {"sliding_window": 64, "is_causal": False, "own_causal": True}, "causal"),
        ({"own_is_causal": True}, "dflash_config.is_causal"),
        ({"attention_bias": True}, "attention_bias"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"num_hidden_layers": 3, "layer_types": None}, "layers.2"),
        ({"own_target_layer_ids": [0, 2]}, "fc.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_contradictions_and_other_layouts_are_refused(exported, changes, said):
    rewrite(exported, **changes)
    with pytest.raises(UserError) as caught:
        read_folder(exported)
    assert said in caught.value.happened


@pytest.mark.parametrize("change", ["missing", "unknown", "shape", "torn", "gone"])
def test_other_tensors_are_refused(exported, change):
    path = exported / "model.safetensors"
    tensors = load_file(path)
    if change == "missing":
        del tensors["layers.1.self_attn.q_norm.weight"]
    elif change == "unknown":
        tensors["lm_head.weight"] = torch.zeros(2, 2)
    elif change == "shape":
        tensors["norm.weight"] = torch.zeros(5)
    if change in ("missing", "unknown", "shape"):
        save_file(tensors, path)
    elif change == "torn":
        path.write_bytes(path.read_bytes()[:-10])
    else:
        path.unlink()
    with pytest.raises(UserError):
        read_folder(exported)
