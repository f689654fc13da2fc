"""Both formats say a drafter completely, and a foreign layout is refused by its name."""

import json
from pathlib import Path

import pytest
from dflash_offline import UserError
from dflash_offline.train.export.formats import config_of, layout_of_config, leaves, spec_of
from dflash_offline.train.kinds import AttentionKind

PATH = Path("folder/config.json")
LAYOUTS = ["full", "full causal", "sliding", "sliding causal", "mixed", "mixed causal", "mixed all causal"]


def written(layout, spec, shelf):
    return json.loads(json.dumps(config_of(layout, spec, shelf.TARGET, "bfloat16")))


@pytest.mark.parametrize("name", [*LAYOUTS, "four and one"])
def test_zlab_says_every_layout(tiny_spec, shelf, name) -> None:
    attention = shelf.LAYOUTS[name]
    spec = tiny_spec(attention=attention, num_layers=len(attention), tap_layers=(4, 0, 2))
    assert spec_of(PATH, written("zlab", spec, shelf)) == spec


@pytest.mark.parametrize("name", LAYOUTS)
def test_speculators_says_what_both_of_its_readers_run_alike(tiny_spec, shelf, name) -> None:
    spec = tiny_spec(attention=shelf.LAYOUTS[name], tap_layers=(4, 0, 2))
    if name in shelf.OF_SPECULATORS:
        assert spec_of(PATH, written("speculators", spec, shelf)) == spec
        return
    with pytest.raises(UserError, match="cannot be served from the speculators format") as caught:
        config_of("speculators", spec, shelf.TARGET, "bfloat16")
    assert "--format vllm" in caught.value.advice
    assert len(str(caught.value).splitlines()) == 3


def test_speculators_has_every_key_of_its_table(tiny_spec, shelf) -> None:
    spec = tiny_spec(tap_layers=(4, 0, 2))
    config = written("speculators", spec, shelf)
    assert config["aux_hidden_state_layer_ids"] == [5, 1, 3]
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "dflash"
    assert config["speculators_config"]["proposal_methods"] == [
        {"proposal_type": "greedy", "speculative_tokens": 7, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    ]
    assert config["speculators_config"]["default_proposal_method"] == "greedy"
    verifier = {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]}
    assert config["speculators_config"]["verifier"] == verifier
    assert (config["mask_token_id"], config["block_size"], config["draft_vocab_size"]) == (47, 8, 48)
    assert config["target_hidden_size"] is None
    assert config["sample_from_anchor"] is False
    assert config["sliding_window_non_causal"] is True  # false would make vLLM's full layers causal
    layers = config["transformer_layer_config"]
    assert layers["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert layers["layer_types"] == ["full_attention"] * 2
    assert "rope_scaling" not in layers


@pytest.mark.parametrize("causal", [True, False])
def test_the_window_key_is_of_the_layers(tiny_spec, shelf, causal) -> None:
    spec = tiny_spec(attention=(AttentionKind(16, causal),) * 2)
    config = written("speculators", spec, shelf)
    assert config["sliding_window_non_causal"] is not causal
    assert config["transformer_layer_config"]["sliding_window"] == 16


def test_transformers_reads_the_layers(tiny_spec, shelf) -> None:
    from transformers import Qwen3Config

    config = written("speculators", tiny_spec(attention=shelf.LAYOUTS["mixed"]), shelf)
    read = Qwen3Config(**config["transformer_layer_config"])
    assert (read.sliding_window, read.layer_types) == (64, ["sliding_attention", "full_attention"])
    assert read.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}


FOREIGN = [
    ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2"),
    ({"architectures": ["Qwen3DSparkModel"]}, "samples from the anchor"),
    ({"architectures": ["DFlashDraftModel"], "sample_from_anchor": True}, "samples from the anchor"),
    ({"architectures": ["DFlashDraftModel"], "dflash_config": {"shift_label": True}}, "samples from the anchor"),
    ({"architectures": ["Qwen3DFlashModel"], "dspark_block_size": 7}, "samples from the anchor"),
    ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, "EAGLE"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "no format that is known here"),
    ({}, "no format that is known here"),
    ({"speculators_model_type": "dspark"}, "DSpark"),
    ({"speculators_model_type": "dflash2"}, "DFlash 2"),
    ({"speculators_model_type": "eagle3"}, "another kind of drafter"),
    ({"speculators_model_type": "dflash", "sample_from_anchor": True}, "samples from the anchor"),
]


@pytest.mark.parametrize("config, told", FOREIGN, ids=lambda value: value if isinstance(value, str) else "")
def test_a_foreign_layout_is_refused_by_name(config, told) -> None:
    with pytest.raises(UserError, match=told) as caught:
        layout_of_config(PATH, config)
    assert len(str(caught.value).splitlines()) == 3
    assert str(PATH) in caught.value.happened


def test_a_published_config_may_say_that_it_does_not_sample_from_the_anchor(tiny_spec, shelf) -> None:
    config = written("zlab", tiny_spec(), shelf)
    config["dflash_config"] |= {"sample_from_anchor": False, "shift_label": False}
    assert spec_of(PATH, config) == tiny_spec()


SPECULATORS_FAULTS = [
    ({"draft_vocab_size": 40}, "draft_vocab_size = 40"),
    ({"target_hidden_size": 64}, "target_hidden_size = 64"),
    ({"mask_token_id": None}, "mask_token_id"),
    ({"aux_hidden_state_layer_ids": [0, 2, 3]}, "aux_hidden_state_layer_ids"),
    ({"block_size": 4}, "speculative_tokens = 7"),
    ({"own": {"rope_theta": None, "rope_parameters": None}}, "rope_theta"),
    ({"own": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn"}}}, "yarn"),
    ({"own": {"attention_bias": True}}, "attention_bias"),
    ({"own": {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}}, "sliding_window"),
    ({"own": {"head_dim": None}}, "head_dim"),
]


@pytest.mark.parametrize("changes, told", SPECULATORS_FAULTS, ids=[told for _, told in SPECULATORS_FAULTS])
def test_a_faulty_speculators_config_is_refused(tiny_spec, shelf, changes, told) -> None:
    config = written("speculators", tiny_spec(), shelf)
    config["transformer_layer_config"] |= changes.pop("own", {})
    with pytest.raises(UserError) as caught:
        spec_of(PATH, config | changes)
    assert told in caught.value.happened
    assert len(str(caught.value).splitlines()) == 3


def test_full_layers_are_bidirectional_in_the_speculators_library_whatever_its_key_says(tiny_spec, shelf) -> None:
    config = written("speculators", tiny_spec(), shelf)
    assert spec_of(PATH, config | {"sliding_window_non_causal": False}) == tiny_spec()
    mixed = written("speculators", tiny_spec(attention=shelf.LAYOUTS["mixed"]), shelf)
    found = spec_of(PATH, mixed | {"sliding_window_non_causal": False})
    assert found.attention == shelf.LAYOUTS["mixed causal"]


@pytest.mark.parametrize("changes", [{"embedding_scale": 5.5}, {"output_multiplier": 0.5}, {"logit_softcap": 30.0}])
def test_what_a_target_does_to_rows_and_logits_is_in_zlab_and_refused_in_speculators(tiny_spec, shelf, changes) -> None:
    spec = tiny_spec(**changes)
    config = written("zlab", spec, shelf)
    assert spec_of(PATH, config) == spec
    keys = {"embedding_scale": "input_embedding_scale", "logit_softcap": "final_logit_softcapping"}
    for name, value in changes.items():
        assert config["dflash_config"][keys.get(name, name)] == value
    assert config.get("logit_scale", 1.0) == spec.output_multiplier  # what vLLM reads
    with pytest.raises(UserError, match=f"{next(iter(changes))} = .* no key for it") as caught:
        config_of("speculators", spec, shelf.TARGET, "bfloat16")
    assert len(str(caught.value).splitlines()) == 3


def test_leaves_are_the_values_by_dotted_key() -> None:
    assert leaves({"a": 1, "b": {"c": [2], "d": {"e": None}}}) == {"a": 1, "b.c": [2], "b.d.e": None}
