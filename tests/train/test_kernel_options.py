"""The tiles of flex attention that are chosen for the shared memory of a card."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dflash_offline.train.attention import attend
from dflash_offline.train.blocks import RowMasks
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.kernel_options import BACKWARD, FORWARD, OWN, kernel_options, options_on
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.slot import TILE, RowShape
from dflash_offline.train.spec import DrafterSpec

KIB = 1024
HEADS = (64, 128, 256)


def forward_bytes(options: dict[str, int], head_dim: int, itemsize: int) -> int:
    """One tile of queries; keys and values of every stage (torch's flex_attention.py.jinja)."""
    tiles = [options["fwd_BLOCK_M"]] + [options["fwd_BLOCK_N"]] * 2 * options["fwd_num_stages"]
    return sum(tiles) * head_dim * itemsize


def backward_bytes(options: dict[str, int], head_dim: int, itemsize: int) -> int:
    """The larger of the two kernels in flex_backwards.py.jinja: two tiles held, two walked over, one of scores."""
    m1, n1, m2, n2, stages = (
        options[f"bwd_{name}"] for name in ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_stages")
    )
    kernels = []
    for still, moving in ((n1, m1), (m2, n2)):
        kernels.append((2 * still + 2 * stages * moving) * head_dim + still * moving)
    return max(kernels) * itemsize


@pytest.mark.parametrize("head_dim", HEADS)
def test_an_h100_takes_the_librarys_own_tiles(head_dim: int) -> None:
    assert kernel_options(227 * KIB, head_dim, 2) is None


def test_a_hopper_card_walks_heads_of_128_in_smaller_tiles_forward() -> None:
    """Those that were measured; the backward stays the library's, and so does all of another kind of card."""
    options = kernel_options(227 * KIB, 128, 2, (9, 0))
    assert options is not None
    assert list(options.values()) == [64, 64, 3, 4]
    assert kernel_options(227 * KIB, 128, 2, (10, 0)) is None
    assert kernel_options(227 * KIB, 64, 2, (9, 0)) is None
    assert kernel_options(99 * KIB, 128, 2, (9, 0)) == kernel_options(99 * KIB, 128, 2)


@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize("kib", [48, 99, 163])
def test_smaller_cards_get_tiles_that_fit(kib: int, head_dim: int) -> None:
    options = kernel_options(kib * KIB, head_dim, 2)
    if options is None:
        own = OWN[2, head_dim]
        assert max(tiles.size_bytes(head_dim, 2) for tiles in own) < kib * KIB
        return
    assert forward_bytes(options, head_dim, 2) <= kib * KIB
    assert backward_bytes(options, head_dim, 2) <= kib * KIB
    sides = [value for name, value in options.items() if "BLOCK" in name]
    assert all(TILE % side == 0 and side >= 16 for side in sides)
    assert options["bwd_BLOCK_N1"] % options["bwd_BLOCK_M1"] == 0  # torch asks for both
    assert options["bwd_BLOCK_M2"] % options["bwd_BLOCK_N2"] == 0


def test_a_workstation_card_gets_what_torch_has_for_it() -> None:
    """sm_120 in torch 2.13: (128, 64, 2 stages, 8 warps) and (64, 64, 64, 64, 1 stage) for heads of 128."""
    options = kernel_options(99 * KIB, 128, 2)
    assert options is not None
    assert list(options.values()) == [128, 64, 2, 8, 64, 64, 64, 64, 1, 4]


def test_less_memory_never_gives_larger_tiles() -> None:
    for head_dim in HEADS:
        for itemsize in (2, 4):
            found = [kernel_options(kib * KIB, head_dim, itemsize) for kib in range(16, 230, 4)]
            sizes = [forward_bytes(options, head_dim, itemsize) for options in found if options is not None]
            assert sizes == sorted(sizes)
            assert None not in found[: len(sizes)]


def test_odd_heads_are_rounded_up_as_the_kernels_do() -> None:
    assert kernel_options(99 * KIB, 96, 2) == kernel_options(99 * KIB, 128, 2)
    assert kernel_options(48 * KIB, 80, 2) == kernel_options(48 * KIB, 128, 2)


@pytest.mark.parametrize("tiles, sizes", [(FORWARD, "fwd"), (BACKWARD, "bwd")])
def test_the_largest_tiles_come_first(tiles, sizes) -> None:
    bytes_of = [one.size_bytes(128, 2) for one in tiles]
    assert len(set(tiles)) == len(tiles), sizes
    assert bytes_of[0] == max(bytes_of)
    assert bytes_of[-1] == min(bytes_of)


def test_flex_attention_gets_the_options(tiny_spec: Callable[..., DrafterSpec]) -> None:
    """They are constants of the graph that is compiled."""
    shape = RowShape(row_tokens=128, anchors=16, block_size=8)
    anchors, starts = torch.arange(1, 17), torch.zeros(16, dtype=torch.int64)
    (mask,) = RowMasks(anchors, starts, shape, [AttentionKind()], is_tiled=True).masks
    seen: list[dict[str, Any]] = []

    def backend(graph, _):
        calls = [node for node in graph.graph.nodes if "flex_attention" in str(node.target)]
        seen.extend(argument for node in calls for argument in node.args if isinstance(argument, dict))
        return graph.forward

    queries, keys = torch.randn(4, 128, 16), torch.randn(2, 128, 16)
    options = kernel_options(99 * KIB, 128, 2)
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    compiled(queries, (keys, keys), (keys, keys), mask, options)
    torch._dynamo.reset()
    assert options is not None
    assert [given for given in seen if given.items() >= options.items()]


def test_a_drafter_on_a_cpu_has_none(tiny_spec: Callable[..., DrafterSpec]) -> None:
    assert options_on(torch.device("cpu"), 128, 2) is None
    drafter = Drafter(tiny_spec()).to(torch.bfloat16)
    assert [layer.self_attn.kernel_options for layer in drafter.layers] == [None, None]


@pytest.mark.gpu
def test_a_drafter_on_cuda_has_those_of_the_card(tiny_spec: Callable[..., DrafterSpec]) -> None:
    """Needs a device that reports its shared memory."""
    drafter = Drafter(tiny_spec(head_dim=128)).to("cuda", torch.bfloat16)
    room = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    capability = torch.cuda.get_device_capability(0)
    assert drafter.layers[0].self_attn.kernel_options == kernel_options(room, 128, 2, capability)
