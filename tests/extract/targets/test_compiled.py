"""Compiled layers: the states of the plain path, in few shapes, and counted."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from dflash_offline.extract.batching import make_batches
from dflash_offline.extract.targets.compiled import MOST_SHAPES, CompiledLayers, edges_up_to
from dflash_offline.extract.targets.hf import HfTarget, load_target
from torch._dynamo.testing import CompileCounter


@pytest.fixture
def target() -> HfTarget:
    torch._dynamo.reset()
    return load_target("tiny")


def batch(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(6, 262, (length,), generator=generator)
    return ids, torch.tensor(lengths)


def test_edges_add_a_quarter_at_most() -> None:
    edges = edges_up_to(8192)
    assert edges[:10] == [64, 80, 96, 112, 128, 160, 192, 224, 256, 320]
    assert (edges[-1], len(edges)) == (8192, 29)
    assert all(after <= 1.25 * before for before, after in pairwise(edges))
    assert edges_up_to(1) == [64]


def test_every_batch_of_a_budget_fits_its_shape_and_there_are_few(target: HfTarget) -> None:
    compiled, budget = CompiledLayers(target.decoder), 4096
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(52, 5000, (900,), generator=draw).tolist()
    shapes = set()
    for places in make_batches(lengths, budget):
        longest = max(lengths[place] for place in places)
        rows, edge = compiled.shape_for(len(places), longest, budget) or (0, 0)
        assert rows >= len(places)
        assert edge >= longest
        assert rows * edge <= max(1.25 * budget, edge)
        shapes.add((rows, edge))
    assert len(shapes) <= len(edges_up_to(5000))
    compiled.shapes = {(number, 1) for number in range(MOST_SHAPES)}
    assert compiled.shape_for(3, 100, budget) is None
    compiled.shapes.add((42, 112))
    assert compiled.shape_for(3, 100, budget) == (42, 112)
    assert CompiledLayers(target.decoder).shape_for(200, 9, budget) is None


def largest_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Of states [..., H], relative L2."""
    error = torch.linalg.vector_norm(got - expected, dim=-1) / torch.linalg.vector_norm(expected, dim=-1)
    return float(error.max())


def test_compiled_states_are_the_plain_ones_and_layers_share_what_is_compiled(target: HfTarget) -> None:
    counter = CompileCounter()
    target.__dict__["compiled"] = CompiledLayers(target.decoder, backend=counter)
    taps = (0, 2, 4)
    for lengths in ([60, 50, 41], [64, 3], [100, 99]):
        ids, counts = batch(lengths)
        shape = target.compiled.shape_for(len(lengths), max(lengths), 256)
        assert shape is not None
        got, final = target.record(ids, counts, taps, last=True, shape=shape)
        expected, plain = target.record(ids, counts, taps, last=True)
        assert got.shape == expected.shape
        assert final is not None
        assert plain is not None
        for row, n in enumerate(lengths):
            assert largest_error(got[:, row, :n], expected[:, row, :n]) < 1e-5
            assert largest_error(final[row, :n], plain[row, :n]) < 1e-5
    assert len(target.compiled.shapes) == 2
    assert 0 < counter.frame_count <= 2 * len(target.compiled.shapes), "the layers of a decoder share a graph"
    assert all("forward" not in vars(layer) for layer in target.decoder.layers)


@pytest.mark.slow
def test_the_kernels_of_inductor_give_the_plain_states(target: HfTarget) -> None:
    ids, counts = batch([60, 33])
    got, _ = target.record(ids, counts, (0, 3), shape=target.compiled.shape_for(2, 60, 256))
    expected, _ = target.record(ids, counts, (0, 3))
    for row, n in enumerate((60, 33)):
        assert largest_error(got[:, row, :n], expected[:, row, :n]) < 1e-4


def test_hooks_stay_outside(target: HfTarget) -> None:
    """A hook that a user of the layers registers is run each time, not traced once."""
    calls: list[Any] = []
    target.decoder.layers[0].register_forward_hook(lambda module, args, output: calls.append(1))
    target.__dict__["compiled"] = CompiledLayers(target.decoder, backend="eager")
    ids, counts = batch([10, 9])
    for _ in range(3):
        target.record(ids, counts, (1,), shape=(2, 64))
    assert len(calls) == 3


def test_a_forward_of_its_own_is_put_back(target: HfTarget) -> None:
    """accelerate sets one on each layer, with its hooks, where several GPUs hold a target."""
    calls: list[int] = []

    def hooked(number: int, forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(number)
            return forward(*args, **kwargs)

        return run

    first, *others = target.decoder.layers
    first.forward = own = hooked(0, first.forward)
    target.__dict__["compiled"] = CompiledLayers(target.decoder, backend="eager")
    ids, counts = batch([10, 9])
    target.record(ids, counts, (1,), shape=(2, 64))
    assert vars(first)["forward"] is own
    assert all("forward" not in vars(layer) for layer in others)
    calls.clear()
    target.record(ids, counts, (1,))
    assert calls == [0]
