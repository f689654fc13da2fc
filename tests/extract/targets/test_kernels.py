"""Which kernels recurrent layers run on: heard from transformers, and refused on CUDA where they are slow."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.targets import kernels

GATED_DELTA = {"chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"}
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what runs where CUDA is absent")


@NO_GPU
def test_a_hybrid_on_a_cpu_says_what_runs_in_plain_torch(loaded: Any) -> None:
    target = loaded("t19-hybrid")
    assert set(kernels.fallbacks()) >= GATED_DELTA | {"causal_conv1d_fn", "causal_conv1d_update"}
    assert set(kernels.needed_fallbacks()) >= GATED_DELTA
    assert "causal_conv1d_fn" not in kernels.needed_fallbacks()
    assert "chunk_gated_delta_rule" in target.kernel_note
    assert "flash-linear-attention" in target.kernel_note
    target.require_fast_kernels()  # a CPU has no fast ones


def test_a_target_of_attention_layers_has_no_kernels_to_speak_of(loaded: Any) -> None:
    assert loaded("t16-tied").kernel_note is None


@NO_GPU
def test_plain_torch_on_cuda_is_refused(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = loaded("t19-hybrid")
    monkeypatch.setattr(target, "device", torch.device("cuda", 3))
    with pytest.raises(UserError, match="in plain torch on cuda:3: flash-linear-attention is not") as caught:
        target.require_fast_kernels()
    assert len(str(caught.value).splitlines()) == 3
    assert "--slow-kernels" in str(caught.value)
    dense = loaded("t16-tied")
    monkeypatch.setattr(dense, "device", torch.device("cuda", 3))
    dense.require_fast_kernels()


def test_it_is_heard_although_transformers_was_silenced(case_target: Any) -> None:
    program = """
import os, sys
os.environ["TRANSFORMERS_VERBOSITY"] = "critical"
import torch
torch.cuda.is_available = lambda: False
from dflash_offline.extract.targets.hf import load_target
print(load_target(sys.argv[1]).kernel_note)
"""
    command = [sys.executable, "-c", program, str(case_target("plain", "t19-hybrid"))]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "chunk_gated_delta_rule" in outcome.stdout, outcome.stderr


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
from dflash_offline.extract.targets import kernels
from dflash_offline.extract.targets.hf import load_target
target = load_target(folder, device="cuda", dtype=dtype)
assert bool(kernels.needed_fallbacks()) == (how == "torch"), kernels.fallbacks()
rng = torch.Generator().manual_seed(0)
lengths = torch.tensor([300, 257, 64, 5])
ids = torch.randint(6, 262, (4, 300), generator=rng)
taps, _ = target.record(ids, lengths, (0, 1, 2))
torch.save([taps[:, i, :n].float().cpu() for i, n in enumerate(lengths.tolist())], out)
"""
    states = {}
    for how in ("torch", "fla"):
        out = tmp_path / how
        folder = str(case_target("plain", "t19-hybrid"))
        command = [sys.executable, "-c", program, folder, dtype, str(out), how]
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert outcome.returncode == 0, outcome.stderr[-3000:]
        states[how] = torch.load(out)
    for slow, fast in zip(states["torch"], states["fla"]):
        assert (fast - slow).norm() / slow.norm() < tolerance
