"""What is chosen for cards of several sizes, the table, and that a refusal names a change that then fits."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.train.memory_choice import (
    HEAD_ROWS_MOST,
    Choice,
    Demand,
    candidates,
    choose,
    chunk_sizes,
    memory_table,
    require_room,
    room_bytes,
)
from dflash_offline.train.replay import choose_graph
from dflash_offline.train.slot import RowShape, default_anchors
from dflash_offline.train.spec import DrafterSpec

WIDE = {
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_layers": 5,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "num_taps": 5,
    "tap_layers": (1, 16, 31, 46, 61),
    "vocab_size": 248_320,
    "block_size": 16,
}
GB = 10**9


@pytest.fixture
def demand(tiny_spec: Callable[..., DrafterSpec]) -> Callable[..., Demand]:
    """dflash-spec 6.2's drafter of a 27B target, six samples of 8,192 tokens a row; keyword arguments change it."""

    def make(row_tokens: int = 49_152, anchors: int = 3072, **changes: Any) -> Demand:
        settings = {
            "spec": tiny_spec(**WIDE),
            "shape": RowShape(row_tokens=row_tokens, anchors=anchors, block_size=16),
            "optimizer": "adamw",
            "objective": "ce",
            "dtype": "bfloat16",
            "codec": "raw",
            "head_is_tied": False,
            "least_row_tokens": 8192,
        }
        return Demand(**{**settings, **changes})

    return make


def chosen(demand: Demand, card_gb: int) -> Choice:
    choice = choose(demand, card_gb * GB)
    assert choice is not None
    assert choice.plan.peak_bytes <= room_bytes(card_gb * GB)
    return choice


def test_a_27b_row_needs_checkpointing_on_80_gb(demand) -> None:
    """dflash-spec 6.2: about 28 GB of weights' state, 5 of embedding and head, 2.5 of taps, 40 of activations.
    A second set of taps is that of the next row, on its way.

    Its estimate of the activations leaves out keys, values, queries before their norm, and the fused taps twice.
    """
    small, middle, large = (chosen(demand(), card) for card in (80, 96, 141))
    assert [choice.is_checkpointed for choice in (small, middle, large)] == [True, False, False]
    assert large.chunk_blocks == max(chunk_sizes(demand().shape)) > middle.chunk_blocks
    parts = {part.name: part.size_bytes / GB for part in [*large.plan.held, *large.plan.largest.parts]}
    assert parts["target's embedding and head"] == pytest.approx(5.1, abs=0.1)
    assert parts["row buffers"] == pytest.approx(2.5, abs=0.1)
    keys, queries, fused = 5 * 3 * 2 * 49_152 * 8 * 128, 5 * 49_152 * 32 * 128, 2 * 49_152 * 5120
    assert parts["activations"] == pytest.approx(39.8 + 2 * (keys + queries + fused) / GB, rel=0.02)
    state = sum(parts[name] for name in parts if name.startswith(("weights", "masters", "optimizer state")))
    assert state == pytest.approx(27.7 * 14 / 16, rel=0.02)  # of its 16 bytes a weight 2 are the row's gradients
    kept = {part.name: part.size_bytes / GB for part in small.plan.moments[0].parts}
    assert kept["activations"] == pytest.approx(2.5 + 2 * fused / GB, rel=0.02)


@pytest.mark.parametrize("anchors", [8, 24, 1016, 1536, 2048, 3072])
def test_chunks_divide_the_anchors_and_stay_below_what_pays(demand, anchors: int) -> None:
    sizes = chunk_sizes(RowShape(row_tokens=128, anchors=anchors, block_size=16))
    assert all(anchors % size == 0 and size * 15 <= HEAD_ROWS_MOST for size in sizes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1
    assert not [size for size in range(sizes[0] + 1, anchors) if anchors % size == 0 and size * 15 <= HEAD_ROWS_MOST]


def test_larger_cards_never_get_a_slower_choice(demand) -> None:
    """With an objective of which a chunk takes much."""
    wanted = demand(objective="kl")
    order = list(candidates(wanted))
    places = []
    for card_gb in range(70, 170, 4):
        choice = chosen(wanted, card_gb)
        places.append(order.index((choice.chunk_blocks, choice.is_checkpointed)))
    assert places == sorted(places, reverse=True)
    assert len(set(places)) > 2


def test_what_is_settled_is_kept(demand) -> None:
    for settings in ({"chunk_blocks": 24}, {"checkpointing": "on"}, {"cuda_graph": "off"}, {"cuda_graph": "on"}):
        choice = chosen(demand(8192, 512, **settings), 141)
        assert settings.get("chunk_blocks") in (None, 24) or choice.chunk_blocks == 16  # 24 does not divide 512
        assert choice.is_checkpointed == ("checkpointing" in settings)
        assert choice.has_graph == (settings.get("cuda_graph") != "off")


def test_a_graph_is_left_out_where_it_does_not_fit_beside_an_exam(demand) -> None:
    """It keeps a row's activations while an exam makes its own."""
    with_graph, without = chosen(demand(16_384, 2048), 141), chosen(demand(16_384, 2048), 96)
    assert (with_graph.has_graph, without.has_graph) == (True, False)
    assert with_graph.plan.largest.name == "exam"
    assert (with_graph.chunk_blocks, with_graph.is_checkpointed) == (without.chunk_blocks, without.is_checkpointed)
    card = torch.device("cuda")
    assert choose_graph("auto", card, has_room=True)[0]
    has_graph, note = choose_graph("auto", card, has_room=False)
    assert not has_graph
    assert "does not fit" in str(note)


REFUSED = [
    ({"checkpointing": "off"}, 80, "checkpointing=on"),
    ({"cuda_graph": "on", "row_tokens": 16_384, "anchors": 2048, "checkpointing": "off"}, 80, "cuda_graph=off"),
    ({"optimizer": "muon"}, 48, "rows.anchors=512"),
    ({"row_tokens": 98_304, "anchors": 12_288}, 80, None),
    ({"row_tokens": 262_144, "anchors": 64, "has_default_anchors": True}, 64, None),
    ({"row_tokens": 8192, "anchors": 1024, "chunk_blocks": 1024, "checkpointing": "on"}, 48, None),
]


@pytest.mark.parametrize("settings, card_gb, change", REFUSED)
def test_a_refusal_names_a_change_that_then_fits(demand, settings, card_gb: int, change: str | None) -> None:
    asked = demand(**settings)
    with pytest.raises(UserError) as caught:
        require_room(asked, card_gb * GB, is_new=True)
    assert len(str(caught.value).splitlines()) == 3
    ((name, value),) = re.findall(r"--set (\S+)=(\S+)", str(caught.value))
    assert change in (None, f"{name}={value}")
    assert choose(changed(asked, name, value), card_gb * GB) is not None
    if name in ("rows.anchors", "rows.row_tokens"):
        step = 64 if name == "rows.anchors" else 128
        assert choose(changed(asked, name, str(int(value) + step)), card_gb * GB) is None


def changed(demand: Demand, name: str, value: str) -> Demand:
    """The demand of the same command with this --set."""
    shape = demand.shape
    if name == "rows.anchors":
        return dataclasses.replace(demand, shape=dataclasses.replace(shape, anchors=int(value)))
    if name == "rows.row_tokens":
        anchors = default_anchors(int(value), 16) if demand.has_default_anchors else shape.anchors
        changed_shape = dataclasses.replace(shape, row_tokens=int(value), anchors=anchors)
        return dataclasses.replace(demand, shape=changed_shape)
    if name == "loss.chunk_blocks":
        return dataclasses.replace(demand, chunk_blocks=int(value))
    return dataclasses.replace(demand, **{name: value})


def test_a_drafter_that_no_setting_makes_fit_is_refused(demand) -> None:
    with pytest.raises(UserError, match="train a smaller drafter") as caught:
        require_room(demand(), 24 * GB, is_new=True)
    assert len(str(caught.value).splitlines()) == 3


def test_a_resumed_run_keeps_its_rows(demand) -> None:
    """Fewer anchors would make another run of it."""
    asked = demand(98_304, 12_288, optimizer="muon")
    with pytest.raises(UserError, match="rows.anchors="):
        require_room(asked, 80 * GB, is_new=True)
    with pytest.raises(UserError, match="train a smaller drafter"):
        require_room(asked, 80 * GB, is_new=False)
    with pytest.raises(UserError, match="--set checkpointing=on"):
        require_room(demand(checkpointing="off", chunk_blocks=512), 80 * GB, is_new=False)


def test_the_table_adds_up_and_names_what_each_part_grows_with(demand) -> None:
    choice = chosen(demand(), 141)
    first, *rows, last = memory_table(choice).splitlines()
    total, card = (float(number) for number in re.findall(r"[\d.]+(?= of| GiB)", first))
    assert total == pytest.approx(choice.plan.peak_bytes / 2**30, abs=0.06)
    assert card == pytest.approx(141e9 / 2**30, abs=0.06)
    sizes = [float(number) for row in rows for number in re.findall(r" (\d+\.\d)  \S", row)]
    assert len(sizes) == len(rows)
    assert sum(sizes) == pytest.approx(total, abs=0.06 * len(sizes))
    assert any("activations" in row and "rows.anchors" in row for row in rows)
    assert last.strip() == "loss.chunk_blocks = 512, checkpointing off, CUDA graph off"
