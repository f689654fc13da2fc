"""Kinds of attention and layouts: every layout is read back from its layers, and other layers are none."""

import itertools

import pytest
from dflash_offline import UserError
from dflash_offline.train.kinds import (
    CAUSAL_CHOICES,
    FULL,
    SLIDING,
    AttentionKind,
    Layout,
    describe,
    layout_of,
    named_layers,
)

ALL_NAMES = [names for count in range(1, 5) for names in itertools.product((SLIDING, FULL), repeat=count)]


@pytest.mark.parametrize("causal", CAUSAL_CHOICES)
@pytest.mark.parametrize("names", ALL_NAMES, ids=lambda names: "".join(name[0] for name in names))
def test_layers_and_layout_are_two_forms_of_one_thing(names: tuple[str, ...], causal: str) -> None:
    window = 9 if SLIDING in names else None
    attention = Layout(layer_types=names, window=window, causal=causal).attention()
    for name, kind in zip(names, attention, strict=True):
        assert kind.window == (9 if name == SLIDING else None)
        assert kind.is_causal == {"no": False, "sliding": name == SLIDING, "all": True}[causal]
    found = layout_of(attention)
    assert found is not None
    assert (found.layer_types, found.window, found.attention()) == (names, window, attention)
    if len(set(names)) == 2:
        assert found.causal == causal


@pytest.mark.parametrize(
    "attention",
    [
        (AttentionKind(9), AttentionKind(8)),
        (AttentionKind(9), AttentionKind(9, True)),
        (AttentionKind(), AttentionKind(None, True)),
        (AttentionKind(9), AttentionKind(None, True)),
    ],
)
def test_layers_that_no_config_can_say_have_no_layout(attention: tuple[AttentionKind, ...]) -> None:
    assert layout_of(attention) is None


def test_layers_in_words() -> None:
    attention = (*[AttentionKind(2048, True)] * 4, AttentionKind(), AttentionKind(2048, True))
    assert describe(attention) == "4 x sliding 2048 causal, 1 x full, 1 x sliding 2048 causal"


@pytest.mark.parametrize(
    "names",
    [
        ("4xsliding", "1xfull"),
        ("4xsliding", "full"),
        ("sliding", "3xsliding_attention", "full_attention"),
        (*[SLIDING] * 4, FULL),
    ],
)
def test_names_may_be_short_and_counted(names: tuple[str, ...]) -> None:
    assert named_layers(names) == (*[SLIDING] * 4, FULL)


@pytest.mark.parametrize("name", ["", "Full", "0xfull", "-1xfull", "xfull", "4 x full", "chunked_attention", "5"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"drafter\.layer_types holds") as caught:
        named_layers(("full", name))
    assert repr(name) in caught.value.happened
    assert len(str(caught.value).splitlines()) == 3
