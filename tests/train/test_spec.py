"""The drafter's facts: what follows the target, what is refused, and the mask token."""

import json
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.train.config import DrafterConfig
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.spec import DrafterSpec, choose_mask_token, make_spec, require_free, require_recorded

TARGET: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_layers": 6,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope": {"rope_theta": 5e6, "rope_type": "yarn", "factor": 4.0},
    "max_positions": 1024,
    "embedding_scale": 2.0,
    "output_multiplier": 0.5,
    "logit_softcap": 30.0,
    "tokenizer_size": 262,
    "special_ids": [0, 1, 2, 3, 4, 5],
    "pad_id": 0,
    "bos_id": 1,
    "eos_ids": [2],
    "mask_id": None,
}


def test_what_is_not_set_follows_the_target() -> None:
    spec = make_spec(DrafterConfig(num_layers=2, block_size=8), TARGET, [4, 0, 2])
    assert (spec.hidden_size, spec.intermediate_size) == (128, 384)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 32)
    assert (spec.tap_layers, spec.num_taps, spec.num_target_layers) == ((4, 0, 2), 3, 6)
    assert (spec.rope_theta, spec.rms_norm_eps, spec.max_positions) == (5e6, 1e-5, 1024)
    assert (spec.embedding_scale, spec.output_multiplier, spec.logit_softcap) == (2.0, 0.5, 30.0)
    assert (spec.block_size, spec.mask_token_id, spec.num_layers) == (8, 262, 2)


def test_what_is_set_wins_over_the_target() -> None:
    config = DrafterConfig(intermediate_size=200, num_heads=6, num_kv_heads=3, head_dim=16, taps=(2, 0))
    spec = make_spec(config, TARGET, [4, 0, 2])
    assert (spec.intermediate_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (200, 6, 3, 16)
    assert spec.tap_layers == (2, 0)


@pytest.mark.parametrize(
    ("config", "target", "message"),
    [
        (DrafterConfig(taps=(0, 3)), {}, "store's taps"),
        (DrafterConfig(taps=(0, 0)), {}, "distinct"),
        (DrafterConfig(taps=()), {}, "distinct"),
        (DrafterConfig(), {"rope": {"rope_type": "default"}}, "rope_theta"),
        (DrafterConfig(), {"num_heads": None}, "drafter.num_heads"),
        (DrafterConfig(num_heads=3), {}, "equal groups"),
        (DrafterConfig(head_dim=15), {}, "even"),
    ],
)
def test_facts_that_do_not_fit_are_refused(config: DrafterConfig, target: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_spec(config, TARGET | target, [4, 0, 2])


def test_spec_survives_json() -> None:
    spec = make_spec(DrafterConfig(), TARGET, [4, 0, 2])
    assert DrafterSpec.from_dict(json.loads(json.dumps(spec.as_dict()))) == spec
    mixed = make_spec(DrafterConfig(window=64, layer_types=("4xsliding", "full"), causal="sliding"), TARGET, [4, 0, 2])
    assert DrafterSpec.from_dict(json.loads(json.dumps(mixed.as_dict()))) == mixed
    assert mixed.as_dict() == json.loads(json.dumps(mixed.as_dict())), "plain JSON types, lists and not tuples"


FULL, SLIDING, SLIDING_CAUSAL = AttentionKind(), AttentionKind(64), AttentionKind(64, True)
LAYERS: list[tuple[dict[str, Any], tuple[AttentionKind, ...]]] = [
    ({}, (FULL,) * 5),
    ({"num_layers": 2}, (FULL,) * 2),
    ({"window": 64}, (SLIDING,) * 5),
    ({"window": 64, "causal": "sliding"}, (SLIDING_CAUSAL,) * 5),
    ({"window": 64, "causal": "all", "num_layers": 1}, (SLIDING_CAUSAL,)),
    ({"causal": "all"}, (AttentionKind(is_causal=True),) * 5),
    ({"causal": "sliding"}, (FULL,) * 5),
    ({"layer_types": ("4xsliding", "1xfull"), "window": 64, "causal": "sliding"}, (*[SLIDING_CAUSAL] * 4, FULL)),
    ({"layer_types": ("full_attention", "sliding_attention"), "window": 64}, (FULL, SLIDING)),
    ({"layer_types": ("3xfull",)}, (FULL,) * 3),
]


@pytest.mark.parametrize("settings, attention", LAYERS, ids=[str(settings) for settings, _ in LAYERS])
def test_layers_see_what_the_settings_say(settings: dict[str, Any], attention: tuple[AttentionKind, ...]) -> None:
    spec = make_spec(DrafterConfig(**settings), TARGET, [4, 0, 2])
    assert spec.attention == attention
    assert spec.num_layers == len(attention)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_types": ("4xsliding", "full"), "window": 64, "num_layers": 4}, "for 4 layers"),
        ({"layer_types": ("full",), "num_layers": 2}, "layer_types = full_attention for 2 layers"),
        (
            {"layer_types": ("sliding", "full")},
            "drafter.window = none with drafter.layer_types = sliding_attention,full",
        ),
        (
            {"layer_types": ("2xfull",), "window": 64},
            "drafter.window = 64 with drafter.layer_types = full_attention,full",
        ),
    ],
)
def test_layers_that_contradict_themselves_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make_spec(DrafterConfig(**settings), TARGET, [4, 0, 2])
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("attention", "kinds", "reach"),
    [
        ((FULL, FULL), (FULL,), None),
        ((SLIDING_CAUSAL, SLIDING_CAUSAL, FULL), (SLIDING_CAUSAL, FULL), None),
        ((SLIDING, SLIDING_CAUSAL, SLIDING), (SLIDING, SLIDING_CAUSAL), 64),
        (
            (SLIDING, AttentionKind(9), AttentionKind(99, True)),
            (SLIDING, AttentionKind(9), AttentionKind(99, True)),
            99,
        ),
    ],
)
def test_kinds_and_reach(tiny_spec, attention, kinds, reach) -> None:
    spec = tiny_spec(attention=attention, num_layers=len(attention))
    assert (spec.kinds, spec.reach) == (kinds, reach)
    with pytest.raises(ValueError, match="attention"):
        tiny_spec(attention=attention, num_layers=len(attention) + 1)


@pytest.mark.parametrize(("reach", "recorded"), [(64, 64), (1, 64), (None, None), (64, None)])
def test_a_store_that_holds_enough_is_taken(reach: int | None, recorded: int | None) -> None:
    require_recorded(reach, recorded, "store")


@pytest.mark.parametrize(("reach", "told"), [(None, "none: not all of its layers have one"), (65, "window is 65")])
def test_a_store_that_holds_too_little_is_refused(reach: int | None, told: str) -> None:
    with pytest.raises(UserError, match=told):
        require_recorded(reach, 64, "store")


def test_foreign_facts_are_refused_by_name() -> None:
    values = make_spec(DrafterConfig(), TARGET, [0]).as_dict()
    with pytest.raises(UserError, match="colour"):
        DrafterSpec.from_dict(values | {"colour": 1})
    with pytest.raises(UserError, match="rope_theta"):
        DrafterSpec.from_dict({k: v for k, v in values.items() if k != "rope_theta"})
    with pytest.raises(UserError, match="its own position"):
        DrafterSpec.from_dict(values | {"slot_meaning": "slot k predicts a+k+1"})


@pytest.mark.parametrize(
    ("requested", "changes", "expected"),
    [
        (None, {}, 262),  # the first embedding row beyond the tokenizer
        (None, {"mask_id": 5}, 5),
        (300, {}, 300),
        (5, {"mask_id": 5}, 5),
        (77, {"tokenizer_size": 320}, 77),  # nothing else is left; whether text holds it is asked later, of the store
        (77, {"mask_id": 77}, 77),
        (262, {}, 262),
        (3, {}, 3),  # a special token that is no pad, begin or end
        (319, {}, 319),
    ],
)
def test_mask_token_is_chosen(requested: int | None, changes: dict, expected: int) -> None:
    assert choose_mask_token(requested, TARGET | changes) == expected


@pytest.mark.parametrize(
    ("requested", "changes", "message"),
    [
        (0, {}, "mask token 0 is the padding token"),
        (1, {}, "mask token 1 is the begin token"),
        (2, {}, "mask token 2 is an end token"),
        (2, {"mask_id": 2}, "mask token 2 is an end token"),
        (None, {"mask_id": 0}, "mask token 0 is the padding token"),
        (320, {}, "mask token 320 lies outside"),
        (77, {}, "mask token 77 is an ordinary token"),
        (261, {}, "mask token 261 is an ordinary token"),
        (77, {"mask_id": 5}, "mask token 77 is an ordinary token"),
        (77, {"mask_id": 5, "tokenizer_size": 320}, "mask token 77 is an ordinary token"),
        (-1, {}, "mask token -1 lies outside"),
        (None, {"tokenizer_size": 320}, "fills all 320 rows"),
        (None, {"tokenizer_size": 999}, "fills all 320 rows"),
        (None, {"mask_id": 400}, "mask token 400 lies outside"),
    ],
)
def test_mask_token_is_refused(requested: int | None, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_mask_token(requested, TARGET | changes)


def test_a_mask_token_that_text_holds_is_refused_unless_the_tokenizer_declares_it() -> None:
    with pytest.raises(UserError, match="mask token 77 is not free: 3 of 9 samples hold it"):
        require_free(77, TARGET, 3, 9)
    require_free(77, TARGET, 0, 9)
    require_free(5, TARGET | {"mask_id": 5}, 1, 9)
