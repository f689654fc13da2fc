"""Compiling a second time is an error on CUDA: case c31, whose lengths and modes would end in a dense step."""

import pytest
import torch
from dflash_offline.train.device import compiled_once
from torch._dynamo.exc import RecompileError
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

LENGTHS = (128, 256, 384, 512, 640, 768)  # of case c31: with two grad modes twelve versions, torch allows eight


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(attention, length: int, is_training: bool) -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cpu")
    with torch.set_grad_enabled(is_training):
        x = torch.randn(1, 1, length, 16)
        attention(x, x, x, block_mask=mask)


def test_c31_another_length_or_mode_is_an_error_long_before_the_limit() -> None:
    attention = torch.compile(flex_attention, dynamic=False, backend="eager")
    refused = []
    with compiled_once(torch.device("cuda")):
        for length in LENGTHS:
            for is_training in (True, False):
                try:
                    run(attention, length, is_training)
                except RecompileError:
                    refused.append((length, is_training))
        run(attention, LENGTHS[0], True)  # the first version still runs
    assert refused == [(n, mode) for n in LENGTHS for mode in (True, False)][1:]


def test_outside_and_on_a_cpu_torch_is_left_alone() -> None:
    double = torch.compile(lambda x: x * 2, dynamic=False, backend="eager")
    with compiled_once(torch.device("cpu")):
        for length in (3, 4):
            double(torch.ones(length))
    with compiled_once(torch.device("cuda")), pytest.raises(RecompileError):
        double(torch.ones(5))
    double(torch.ones(6))
