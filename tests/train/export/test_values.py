"""Single values of a foreign config.json and of its tensors: each wrong one is refused by name, before any use."""

import json
import shlex

import pytest
from dflash_offline import UserError
from dflash_offline.train.export.config import ExportConfig
from dflash_offline.train.export.export import export
from dflash_offline.train.export.folders import read_drafter_folder, read_folder
from safetensors.torch import load_file, save_file

TENSORS = "model.safetensors"
TAPS, LAYERS = "dflash_config.target_layer_ids", "transformer_layer_config."


def refused(path, told, read=read_folder):
    with pytest.raises(UserError) as caught:
        read(path)
    assert told in caught.value.happened
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    "name, value",
    [
        *((TAPS, taps) for taps in ([0, 2, 2], [-1, 2, 3], [0, 2, 60], [0, 2, 5], "023", ["0", "2", "3"])),
        *((TAPS, taps) for taps in ([0.0, 2.0, 3.0], [False, True, 3], [], 3)),
        *(("dflash_config.mask_token_id", token) for token in (48, -1, "4", 4.0, True)),
        *(("block_size", size) for size in (0, 1, -1, 8.5, "8", True)),
        *(("num_hidden_layers", count) for count in (0, -1, "2", 2.0, 10**9)),
        *(("num_key_value_heads", count) for count in (0, "2")),
        *(("rope_theta", theta) for theta in (0, -1.0, "10000", True, float("1e999"))),
        *(("is_causal", causal) for causal in ("false", 1)),
        *(("rms_norm_eps", eps) for eps in (-1, "1e-6")),
        *(("dflash_config.input_embedding_scale", scale) for scale in (0, "x")),
        *(("dflash_config.final_logit_softcapping", cap) for cap in (0, -1)),
        ("eos_token_id", "</s>"),
        ("layer_types", "full_attention"),
        ("layer_types", [{}, {}]),
        ("num_target_layers", "6"),
        ("dflash_config", [1]),
        ("rope_parameters", "x"),
        ("rope_parameters.type", "yarn"),
        ("rope_parameters.mrope_section", [1, 2, 1]),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(write_drafter, shelf, name, value) -> None:
    path, _ = write_drafter()
    changes = {name: value}
    if name == "block_size":
        changes["dflash_config.block_size"] = value
    if name == "rope_theta":
        changes["rope_parameters"] = None
    shelf.rewrite(path, changes)
    refused(path, "Infinity" if value == float("inf") else name.rsplit(".", 1)[-1])


@pytest.mark.parametrize(
    "name, value",
    [
        *(("aux_hidden_state_layer_ids", ids) for ids in ([0, 2, 3], [1, 3, 3], [1, 3, 7], "123", [])),
        ("mask_token_id", 48),
        ("sliding_window_non_causal", "false"),
        ("speculators_config.proposal_methods", "greedy"),
        ("speculators_config.verifier", "some/target"),
        ("speculators_config.verifier.architectures", "Qwen3ForCausalLM"),
        ("quantization_config", {"quant_method": "fp8"}),
        (f"{LAYERS}num_target_layers", "x"),
    ],
)
def test_a_wrong_value_of_the_speculators_format_is_refused(write_drafter, shelf, name, value) -> None:
    path, _ = write_drafter("speculators")
    shelf.rewrite(path, {name: value})
    wanted = "target_layer_ids" if value == [1, 3, 7] else name.rsplit(".", 1)[-1]
    refused(path, wanted)


def test_null_is_as_if_it_were_not_there(write_drafter, shelf) -> None:
    path, drafter = write_drafter()
    shelf.rewrite(path, {"dflash_config.input_embedding_scale": None, "output_multiplier": None})
    assert read_folder(path).spec == drafter.spec


def test_two_places_of_a_scale_must_agree(write_drafter, shelf) -> None:
    path, _ = write_drafter()
    shelf.rewrite(path, {"dflash_config.input_embedding_scale": 2.0, "input_embedding_scale": 3.0})
    refused(path, "input_embedding_scale = [2.0, 3.0]")


@pytest.mark.parametrize("text, told", [('"mask_token_id": 7, ', "'mask_token_id' twice"), ('"x": NaN, ', "NaN")])
def test_json_that_readers_take_in_several_ways_is_refused(write_drafter, text, told) -> None:
    path, _ = write_drafter()
    file = path / "config.json"
    file.write_text(file.read_text().replace('"mask_token_id"', f'{text}"mask_token_id"', 1))
    refused(path, told)


def test_json_nested_without_end_is_refused(write_drafter) -> None:
    path, _ = write_drafter()
    (path / "config.json").write_text("[" * 100_000)
    refused(path, "RecursionError")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(write_drafter, value) -> None:
    path, _ = write_drafter()
    tensors = load_file(path / TENSORS)
    tensors["fc.weight"][0, 0] = value
    save_file(tensors, path / TENSORS)
    refused(path, "not finite, like fc.weight", read_drafter_folder)


def test_weights_that_float16_cannot_hold_are_not_exported(write_drafter, tmp_path) -> None:
    path, _ = write_drafter()
    tensors = load_file(path / TENSORS)
    tensors["norm.weight"][0] = 1e6
    save_file(tensors, path / TENSORS)
    with pytest.raises(UserError, match=r"not finite, like norm\.weight"):
        export(path, ExportConfig(out=str(tmp_path / "out"), dtype="float16"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("files", [{"fc.weight": "../other/model.safetensors"}, {"fc.weight": 1}, ["fc.weight"]])
def test_an_index_that_leads_out_of_the_folder_is_refused(write_drafter, tmp_path, files) -> None:
    path, _ = write_drafter()
    (tmp_path / "other").mkdir()
    (path / TENSORS).rename(tmp_path / "other" / TENSORS)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    refused(path, "cannot be read")


@pytest.mark.parametrize("served", ["zlab", "speculators"])
def test_a_folder_with_blanks_and_quotes_is_one_word_of_the_commands(write_drafter, shelf, tmp_path, served) -> None:
    path, _ = write_drafter()
    out = str(tmp_path / "bob's drafter")
    told = ExportConfig(out=out, format=served, target="some/target")
    for command in export(path, told, read_target=lambda given: shelf.TARGET).commands:
        words = shlex.split(command)
        assert out in words or json.loads(words[-1])["model"] == out
