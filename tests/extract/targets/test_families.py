"""What is known of each family before it runs, and that docs/targets.md names those that the tests prove."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.targets import adapter
from dflash_offline.extract.targets.adapter import COMMON, Adapter, adapter_of, only_state
from dflash_offline.extract.targets.base import default_taps
from dflash_offline.extract.targets.facts import read_facts
from target_families import PAGE, REFUSED, VERIFIED, with_table
from transformers import AutoModelForImageTextToText

WRAPPERS = [name for name, family in VERIFIED.items() if family.wrapper]
ADAPTERS = sorted(path.stem for path in Path(adapter.__file__).parent.glob("adapter_*.py"))


@pytest.mark.parametrize("name", VERIFIED)
def test_facts_are_read_without_weights_and_hold_for_the_model(loaded: Any, family_folder: Any, name: str) -> None:
    family, facts = VERIFIED[name], read_facts(str(family_folder(name)))
    assert facts == loaded(name).facts
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size, facts.intermediate_size) == (4, 64, 262, 96)
    assert (facts.is_tied, facts.is_recurrent) == (family.is_tied, family.is_recurrent)
    assert (facts.head_dim, facts.num_heads, facts.eos_ids, facts.max_positions) == (family.head_dim, 4, (2,), 512)
    assert facts.rope["rope_theta"] == family.theta
    assert default_taps(facts.num_layers) == (0, 1, 2)


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_text_part_of_a_wrapper_gives_the_states_of_the_whole(loaded: Any, family_folder: Any, name: str) -> None:
    whole = AutoModelForImageTextToText.from_pretrained(family_folder(name)).eval()
    ids = torch.arange(6, 46).reshape(2, 20)
    with torch.no_grad():
        states = whole(input_ids=ids, output_hidden_states=True).hidden_states
    taps, _ = loaded(name).record(ids, torch.tensor([20, 20]), (0, 2))
    for index, layer in enumerate((0, 2)):
        torch.testing.assert_close(taps[index], states[layer + 1], rtol=1e-5, atol=1e-5)


def test_the_page_names_the_families_of_the_tests() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "run `python tests/support/target_families.py`"
    for family, _ in REFUSED.values():
        assert family.title in page.partition("## What is refused")[2]


def test_every_adapter_is_proved_by_a_family() -> None:
    proved = {f"adapter_{family.model_type}" for family in VERIFIED.values()}
    assert set(ADAPTERS) == {name for name in ADAPTERS if name in proved}
    assert ADAPTERS
    for name in ADAPTERS:
        assert adapter_of(name.removeprefix("adapter_")) != COMMON


def test_a_family_without_a_file_has_the_common_layout() -> None:
    for model_type in ("llama", "no_such_family", "../adapter", "a.b", ""):
        assert adapter_of(model_type) is COMMON


def test_a_layer_that_leaves_hidden_and_residual_apart_is_refused() -> None:
    """The tap must be their sum, and nobody but an adapter can say which two tensors belong together."""
    hidden, residual = torch.ones(1, 3, 4), torch.full((1, 3, 4), 2.0)
    assert only_state(hidden) is hidden
    assert only_state((hidden, None, torch.ones(1, 2, 3, 3))) is hidden
    with pytest.raises(UserError, match=r"gives 2 tensors of shape \[1, 3, 4\]"):
        only_state((hidden, residual))
    summed = Adapter(state=lambda output: output[0] + output[1])
    assert torch.equal(summed.state((hidden, residual)), torch.full((1, 3, 4), 3.0))


def test_a_split_layer_of_a_real_target_is_refused_when_it_records(loaded: Any) -> None:
    target = loaded("t16-tied")
    layer = target.decoder.layers[2]
    handle = layer.register_forward_hook(lambda module, args, output: (output, output.clone()))
    try:
        with pytest.raises(UserError, match="gives 2 tensors"):
            target.record(torch.arange(6, 14)[None], torch.tensor([8]), (2,))
    finally:
        handle.remove()


def test_attributes_that_differ_by_layer_are_those_of_the_first(loaded: Any) -> None:
    """Gemma 4's full-attention layers have wider heads; transformers refuses to name one width for all."""
    target = loaded("gemma4")
    widths = {layer.self_attn.head_dim for layer in target.decoder.layers}
    assert len(widths) == 2
    assert target.facts.head_dim == target.decoder.layers[0].self_attn.head_dim == 16


def test_the_model_of_a_wrapper_may_be_nested() -> None:
    inner = SimpleNamespace(layers=[], norm=None)
    outer = SimpleNamespace(get_decoder=lambda: SimpleNamespace(model=inner))
    assert adapter_of("llama4_text").decoder(outer) is inner
