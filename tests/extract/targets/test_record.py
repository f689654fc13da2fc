"""Recording: each tap is the layer's own output, for every batching, and no layer runs in vain."""

from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.targets.hf import HfTarget, load_target
from dflash_offline.extract.targets.layers import first_layers
from target_families import VERIFIED
from torch.utils._python_dispatch import TorchDispatchMode

TARGETS = ["t16-tied", "t19-hybrid", *VERIFIED]


def batch(target: HfTarget, lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids, right-padded with the pad id, and the lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(6, 262, (length,), generator=generator)
    return ids, torch.tensor(lengths)


def reference(target: HfTarget, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """hidden_states of transformers: entry l+1 is the output of layer l, the last one after the norm."""
    with torch.no_grad():
        return target.model(ids, output_hidden_states=True, use_cache=False).hidden_states


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest L2 error of a state [..., H], relative to its length."""
    error = torch.linalg.vector_norm(got - expected, dim=-1) / torch.linalg.vector_norm(expected, dim=-1)
    return float(error.max())


@pytest.mark.parametrize("name", TARGETS)
def test_taps_equal_hidden_states_bit_for_bit(loaded: Any, name: str) -> None:
    """In the order of the list, with and without the layers after the deepest tap."""
    target = loaded(name)
    lengths = [24, 24, 24]
    ids, counts = batch(target, lengths)
    states = reference(target, ids)
    last_layer = target.facts.num_layers - 1
    for taps in ((1,), (0, 2), (2, 0), tuple(range(last_layer))):
        for last in (False, True):
            recorded, final = target.record(ids, counts, taps, last=last)
            assert recorded.shape == (len(taps), len(lengths), 24, 64)
            for index, layer in enumerate(taps):
                assert torch.equal(recorded[index], states[layer + 1]), (taps, layer)
            assert (final is not None) == last
            if final is not None:
                assert torch.equal(target.norm(final), states[-1]), "before the final norm"


@pytest.mark.parametrize("name", TARGETS)
def test_states_equal_those_of_the_row_alone(loaded: Any, name: str) -> None:
    """c19: for every batching used, 1e-5 in float32; what is behind a row's end does not matter."""
    target = loaded(name)
    lengths = [40, 9, 1, 23, 17]
    ids, counts = batch(target, lengths)
    taps = (0, 2)
    together, last = target.record(ids, counts, taps, last=True)
    assert last is not None
    scribbled = ids.clone()
    for row, length in enumerate(lengths):
        scribbled[row, length:] = 7
    other, _ = target.record(scribbled, counts, taps)
    for row, length in enumerate(lengths):
        alone, alone_last = target.record(ids[row : row + 1, :length], counts[row : row + 1], taps, last=True)
        assert alone_last is not None
        for got in (together[:, row, :length], other[:, row, :length]):
            assert relative_error(got, alone[:, 0]) < 1e-5
        assert relative_error(last[row, :length], alone_last[0]) < 1e-5


@pytest.mark.parametrize("name", TARGETS)
def test_layers_after_the_deepest_tap_and_the_head_do_not_run(loaded: Any, name: str) -> None:
    """Nor does the decoder gather the states of all layers."""
    target, ran, gathered = loaded(name), [], []
    modules = {f"layer {i}": layer for i, layer in enumerate(target.decoder.layers)}
    modules["head"] = target.model.get_output_embeddings()
    handles = [module.register_forward_hook(lambda *_, name=name: ran.append(name)) for name, module in modules.items()]
    handles.append(target.decoder.register_forward_hook(lambda *args: gathered.append(args[-1].hidden_states)))
    ids, counts = batch(target, [8])
    target.record(ids, counts, (2, 0))
    assert ran == ["layer 0", "layer 1", "layer 2"]
    ran.clear()
    target.record(ids, counts, (1,), last=True)
    assert ran == [f"layer {i}" for i in range(target.facts.num_layers)]
    assert gathered == [None, None]
    for handle in handles:
        handle.remove()


def test_the_target_is_whole_again_after_an_error(loaded: Any) -> None:
    target = loaded("t16-tied")
    layers = target.decoder.layers
    hooks = [len(layer._forward_hooks) for layer in layers]

    def failing() -> None:
        with first_layers(target.decoder, 2):
            assert len(target.decoder.layers) == 2
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        failing()
    assert target.decoder.layers is layers
    with pytest.raises(IndexError):
        target.record(torch.full((1, 4), 10**6), torch.tensor([4]), (1,))
    assert target.decoder.layers is layers
    assert [len(layer._forward_hooks) for layer in layers] == hooks


def test_bad_taps_are_refused(loaded: Any) -> None:
    ids, counts = batch(loaded("t16-tied"), [4])
    for taps in ((), (1, 1), (5,), (9,)):
        with pytest.raises(UserError):
            loaded("t16-tied").record(ids, counts, taps)
        with pytest.raises(UserError):
            loaded("t16-tied").open(taps)


def test_bfloat16_is_kept(case_target: Any) -> None:
    target = load_target(str(case_target()), dtype="bfloat16")
    ids, counts = batch(target, [16, 5])
    taps, last = target.record(ids, counts, (0, 4), last=True)
    assert last is not None
    assert taps.dtype == last.dtype == torch.bfloat16
    assert target.facts.dtype == "bfloat16"
    assert torch.equal(taps[1, 0], reference(target, ids)[5][0])


@pytest.mark.gpu
def test_states_on_a_gpu_agree_with_the_cpu(case_target: Any) -> None:
    """Needs a device: another set of kernels computes the same states, bf16 within its rounding."""
    ids, counts = batch(load_target(str(case_target())), [100, 64, 3])
    expected, _ = load_target(str(case_target())).record(ids, counts, (0, 4))
    for dtype, tolerance in (("float32", 1e-3), ("bfloat16", 5e-2)):
        got, _ = load_target(str(case_target()), device="cuda", dtype=dtype).record(ids, counts, (0, 4))
        for row, length in enumerate(counts.tolist()):
            torch.testing.assert_close(
                got[:, row, :length].float().cpu(), expected[:, row, :length], rtol=tolerance, atol=tolerance
            )


class Asked(TorchDispatchMode):
    """Counts the numbers that the host asks a tensor for: on a GPU each would wait for all that was sent before."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", TARGETS)
def test_recording_asks_the_device_for_nothing(loaded: Any, name: str) -> None:
    target = loaded(name)
    ids, counts = batch(target, [24, 9, 17])
    with Asked() as asked:
        target.record(ids, counts, (0, 2))
    assert asked.count == 0


def test_a_forward_by_itself_does_ask(loaded: Any) -> None:
    """Whether its rows hold several texts: what `record` knows."""
    target = loaded("t16-tied")
    with Asked() as asked, torch.no_grad():
        target.decoder(input_ids=batch(target, [24, 9, 17])[0], use_cache=False)
    assert asked.count == 1
