"""Which kernels recurrent layers run on: read from transformers, said once, and refused on CUDA where they are slow."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.targets.hf import load_target
from dflash_offline.extract.targets.kernels import Kernel, kernel_note, slow_kernels

GATED_DELTA = {"chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"}
CONVOLUTION = {"causal_conv1d_fn", "causal_conv1d_update"}
NAMES = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")


@pytest.fixture
def fake_fla(tmp_path: Path) -> Path:
    """A folder with an importable fla that dies on CPU tensors, as the real one does."""
    (tmp_path / "fla" / "ops").mkdir(parents=True)
    broken = "".join(f"def {name}(*a, **k):\n    raise RuntimeError('0 active drivers')\n" for name in NAMES)
    for path in ("__init__.py", "ops/__init__.py", "ops/gated_delta_rule.py"):
        (tmp_path / "fla" / path).write_text(broken)
    return tmp_path


def outcome_of(program: str, *args: str) -> str:
    """What a process of its own prints: transformers decides once in a process."""
    command = [sys.executable, "-c", program, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_hybrid_on_a_cpu_runs_in_plain_torch_and_says_so(loaded: Any) -> None:
    target = loaded("t19-hybrid")
    assert {kernel.function for kernel in target.kernels} == GATED_DELTA | CONVOLUTION
    assert not any(kernel.is_fast for kernel in target.kernels)
    assert {kernel.function for kernel in slow_kernels(target.kernels)} == GATED_DELTA
    assert "in plain torch, as always on a CPU" in target.kernel_note
    target.require_fast_kernels()  # a CPU has no fast ones


def test_a_target_of_attention_layers_has_no_kernels_to_speak_of(loaded: Any) -> None:
    assert loaded("t16-tied").kernels == ()
    assert loaded("t16-tied").kernel_note is None


def test_the_line_says_what_is_known_and_no_more() -> None:
    fast, slow = (Kernel("chunk_gated_delta_rule", "fla", is_fast) for is_fast in (True, False))
    convolution = Kernel("causal_conv1d_fn", "causal_conv1d", False)
    assert "it knows no faster kernels" in kernel_note("t", (), "cuda:0")
    assert "run on fast kernels (flash-linear-attention)" in kernel_note("t", (fast,), "cuda:0")
    assert "chunk_gated_delta_rule in plain torch (without flash-linear-attention)" in kernel_note(
        "t", (slow,), "cuda:0"
    )
    assert "causal_conv1d_fn in plain torch (without causal-conv1d)" in kernel_note("t", (convolution, fast), "cuda:0")


def test_plain_torch_on_cuda_is_refused(case_target: Any, loaded: Any) -> None:
    target = load_target(str(case_target("plain", "t19-hybrid")))
    target.device = torch.device("cuda", 3)
    with pytest.raises(UserError, match="in plain torch on cuda:3: flash-linear-attention is not") as caught:
        target.require_fast_kernels()
    assert len(str(caught.value).splitlines()) == 3
    assert "pip install flash-linear-attention, or give --slow-kernels" in str(caught.value)
    target.kernels = tuple(replace(kernel, is_fast=kernel.package == "fla") for kernel in target.kernels)
    target.require_fast_kernels()  # the convolution alone is no reason


def test_fla_is_hidden_from_a_cpu_also_where_cuda_is(case_target: Any, fake_fla: Path) -> None:
    program = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import fla
torch.cuda.is_available = lambda: True
from dflash_offline.extract.targets.hf import load_target
target = load_target(sys.argv[2], device="cpu")
target.record(torch.arange(8)[None], torch.tensor([8]), (0,))
print(target.kernel_note)
"""
    assert "as always on a CPU" in outcome_of(program, str(fake_fla), str(case_target("plain", "t19-hybrid")))


def test_a_process_that_took_fla_says_so_and_refuses_a_cpu(case_target: Any, fake_fla: Path) -> None:
    """The positive proof: what transformers took is read, not guessed from what is installed or logged."""
    program = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import logging
logging.disable(logging.CRITICAL)
from transformers.models.qwen3_5 import modeling_qwen3_5
from dflash_offline import UserError
from dflash_offline.extract.targets.hf import load_target
from dflash_offline.extract.targets.kernels import kernels_in
print(sorted(kernel.function for kernel in kernels_in(modeling_qwen3_5) if kernel.is_fast))
try:
    load_target(sys.argv[2], device="cpu")
except UserError as error:
    print(error)
"""
    lines = outcome_of(program, str(fake_fla), str(case_target("plain", "t19-hybrid"))).splitlines()
    assert lines[0] == str(sorted(GATED_DELTA))
    assert "on a CPU, in a process that loaded" in lines[1]
    assert len(lines) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-2), ("bfloat16", 5e-2)])
def test_fast_kernels_agree_with_plain_torch(case_target: Any, tmp_path: Path, dtype: str, tolerance: float) -> None:
    """Needs a GPU and flash-linear-attention: the same weights in two processes, one without the package."""
    pytest.importorskip("fla")
    program = """
import sys, torch
folder, dtype, out, how = sys.argv[1:]
if how == "torch":
    sys.modules["fla"] = sys.modules["causal_conv1d"] = None
from dflash_offline.extract.targets.hf import load_target
from dflash_offline.extract.targets.kernels import slow_kernels
target = load_target(folder, device="cuda", dtype=dtype)
assert bool(slow_kernels(target.kernels)) == (how == "torch"), target.kernels
rng = torch.Generator().manual_seed(0)
lengths = torch.tensor([300, 257, 64, 5])
ids = torch.randint(6, 262, (4, 300), generator=rng)
taps, _ = target.record(ids, lengths, (0, 1, 2))
torch.save([taps[:, i, :n].float().cpu() for i, n in enumerate(lengths.tolist())], out)
"""
    states = {}
    for how in ("torch", "fla"):
        out = tmp_path / how
        outcome_of(program, str(case_target("plain", "t19-hybrid")), dtype, str(out), how)
        states[how] = torch.load(out)
    for slow, fast in zip(states["torch"], states["fla"]):
        assert (fast - slow).norm() / slow.norm() < tolerance
