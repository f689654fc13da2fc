"""What a CUDA graph may be replayed on. Capture and replay themselves need a GPU: test_step_gpu.py."""

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.train.replay import choose_graph, places_of, require_same_places


def test_buffers_that_are_the_same_memory_pass() -> None:
    memory = torch.zeros(4, 6)
    require_same_places(places_of([memory, memory[1]]), places_of([memory.view(4, 6), memory[1]]))


@pytest.mark.parametrize(
    "other",
    [
        lambda memory: memory.clone(),
        lambda memory: memory[1:],
        lambda memory: memory.t(),
        lambda memory: memory.view(6, 4),
        lambda memory: memory.view(torch.int32),
    ],
)
def test_another_address_shape_stride_or_format_is_named(other) -> None:
    first, memory = torch.zeros(3), torch.zeros(4, 6)
    with pytest.raises(RuntimeError, match="captured on 2 buffers; of the 2 given now, number 1 is another"):
        require_same_places(places_of([first, memory]), places_of([first, other(memory)]))


def test_fewer_buffers_are_named() -> None:
    memory = torch.zeros(3)
    with pytest.raises(RuntimeError, match="of the 1 given now, number 1 is another"):
        require_same_places(places_of([memory, memory]), places_of([memory]))


def test_a_graph_is_chosen_on_cuda_alone() -> None:
    assert choose_graph("auto", torch.device("cpu")) == (False, None)
    assert choose_graph("off", torch.device("cpu")) == (False, None)
    assert choose_graph("auto", torch.device("cuda"))[0]
    assert choose_graph("on", torch.device("cuda"))[0]
    assert choose_graph("off", torch.device("cuda")) == (False, "rows run launch by launch: cuda_graph = off")
    with pytest.raises(UserError, match="cuda_graph = 'on' on device cpu"):
        choose_graph("on", torch.device("cpu"))
