"""A tiny store with random states, made by the store's own writer, and runs that train on it."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dflash_offline.extract.plan import make_plan
from dflash_offline.extract.targets.base import TargetFacts
from dflash_offline.settings import resolve
from dflash_offline.store.create import create_store
from dflash_offline.store.frozen import write_frozen
from dflash_offline.store.index import read_plan
from dflash_offline.store.manifest import Manifest
from dflash_offline.store.samples import SampleTable, SampleWriter
from dflash_offline.store.writer import StoreWriter
from dflash_offline.train.config import TrainConfig

VOCABULARY, HIDDEN, TAPS = 64, 32, (0, 2, 3)
FACTS = TargetFacts(
    name="random",
    weights_sha256="ab" * 32,
    architecture="Qwen3ForCausalLM",
    num_layers=6,
    hidden_size=HIDDEN,
    vocab_size=VOCABULARY,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    rms_norm_eps=1e-6,
    rope={"rope_type": "default", "rope_theta": 10000.0},
    max_positions=512,
    is_tied=False,
    dtype="float32",
    tokenizer_sha256="none",
    template_sha256="none",
    tokenizer_size=60,
    special_ids=(0, 1, 9, 58),
    pad_id=0,
    eos_ids=(1,),
)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def loss_mask_of(number: int, length: int) -> np.ndarray:
    """One answer at the end; in every third sample a second one before it."""
    mask = np.zeros(length, np.bool_)
    mask[length // 3 :] = True
    if number % 3 == 0:
        mask[length // 2 : length // 2 + 3] = False
        mask[-1] = False
    return mask


def make_store(
    folder: Path,
    *,
    num_train: int = 30,
    num_held_out: int = 5,
    shortest: int = 12,
    longest: int = 100,
    num_committed: int | None = None,
    seed: int = 0,
    taps: tuple[int, ...] = TAPS,
    codec: str = "raw",
    window: int | None = None,
    has_last: bool = False,
    origins: tuple[str, ...] = ("elsewhere",),
) -> Path:
    """A store of random samples; only the first `num_committed` segments are filled, all by default."""
    rng = np.random.default_rng(seed)
    with SampleWriter(folder / "data") as samples:
        for number in range(num_train + num_held_out):
            length = int(rng.integers(shortest, longest))
            ids = np.where(rng.random(length) < 0.8, 9, rng.integers(5, 55, length))  # a drafter learns the 9 at once
            split = "train" if number < num_train else "heldout"
            mask = loss_mask_of(number, length)
            origin = origins[number % len(origins)]
            samples.add(ids, mask, split=split, task="nines", source="made", source_line=number + 1, origin=origin)
    plan = make_plan(SampleTable(folder / "data"), bytes_per_position=float(len(taps) * HIDDEN * 2), window=window)
    manifest = Manifest(
        target=dataclasses.asdict(FACTS),
        data={"facts": {"seed": seed}},
        tap_layers=taps,
        hidden_size=HIDDEN,
        has_last=has_last,
        window=window,
        codec=codec,
        segment_positions=plan.segment_positions,
        num_segments=plan.num_segments,
        num_samples=plan.num_samples,
        num_positions=plan.num_positions,
        plan_sha256=plan.sha256,
    )
    store = folder / "store"
    create_store(store, manifest, plan.table, folder / "data")
    fill_segments(store, manifest, range(plan.num_segments if num_committed is None else num_committed))
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: 0.2 * torch.randn(VOCABULARY, HIDDEN, generator=generator) for name in ("embedding", "head")}
    write_frozen(store, {**tensors, "norm": torch.ones(HIDDEN)}, dataclasses.asdict(FACTS))
    return store


def fill_segments(store: Path, manifest: Manifest, segments: range, shift: int = 0) -> None:
    """Commits segments; another `shift` gives other states for the same samples."""
    writer = StoreWriter(store, manifest)
    firsts = dict(zip(*(read_plan(store)[name].to_pylist() for name in ("sample_id", "first"))))
    for segment in segments:
        sink = writer.open(segment)
        for sample_id, position, n in zip(*(sink.plan[name].tolist() for name in ("sample_id", "position", "n"))):
            first = firsts[sample_id]
            shape = (len(manifest.tap_layers), first + n, HIDDEN)
            values = np.random.default_rng(sample_id + shift).normal(size=shape)[:, first:]
            bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            sink.append(sample_id, position, bits, last_states(sample_id, first, n) if manifest.has_last else None)
        sink.commit({"host": "test"})


def last_states(sample_id: int, first: int, n: int) -> np.ndarray:
    """Last states u16 [n, H] of a sample's recorded tokens: noise around one state, which a drafter learns at once."""
    common = 2 * np.random.default_rng(7).normal(size=HIDDEN)
    values = common + np.random.default_rng(sample_id + 10**6).normal(size=(first + n, HIDDEN))[first:]
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


SETTINGS = (
    "steps=12",
    "rows.row_tokens=128",
    "rows.anchors=16",
    "drafter.num_layers=2",
    "drafter.block_size=8",
    "optim.lr=0.01",
    "eval_every=4",
    "checkpoint_every=3",
    "cpu_threads=1",
    "devices=cpu",
    "stall_s=300",
)


def make_config(store: Path, out: Path, *settings: str) -> TrainConfig:
    own = [f"store={store}", f"out={out}"]
    return resolve(TrainConfig, name="train", overrides=[*SETTINGS, *own, *settings])


def start_command(store: Path, out: Path, *settings: str) -> subprocess.Popen[str]:
    """`dflash train` in a process of its own, as a user runs it."""
    own = [item for setting in (*SETTINGS, *settings) for item in ("--set", setting)]
    command = [sys.executable, "-m", "dflash_offline.cli", "train", "--store", str(store), "--out", str(out), *own]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, cwd=out.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def metrics_of(run_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if kind is None or line["kind"] == kind]


def same_checkpoint(left: Path, right: Path) -> None:
    """Asserts that two checkpoint folders hold the same bits."""
    assert sorted(p.name for p in left.iterdir()) == sorted(p.name for p in right.iterdir())
    assert (left / "drafter.safetensors").read_bytes() == (right / "drafter.safetensors").read_bytes()
    assert json.loads((left / "state.json").read_text()) == json.loads((right / "state.json").read_text())
    states = [torch.load(folder / "optimizer.pt", weights_only=True) for folder in (left, right)]
    assert_same(states[0], states[1], "optimizer")


def assert_same(left: Any, right: Any, name: str) -> None:
    assert type(left) is type(right), name
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), name
    elif isinstance(left, dict):
        assert list(left) == list(right), name
        for key in left:
            assert_same(left[key], right[key], f"{name}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), name
        for i, (a, b) in enumerate(zip(left, right)):
            assert_same(a, b, f"{name}[{i}]")
    else:
        assert left == right, name


@pytest.fixture(scope="session")
def lab() -> SimpleNamespace:
    """The functions above: test modules cannot import each other."""
    functions = (
        make_store,
        fill_segments,
        last_states,
        make_config,
        start_command,
        metrics_of,
        same_checkpoint,
        assert_same,
    )
    return SimpleNamespace(**{function.__name__: function for function in functions})


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete store, shared by all tests; nobody writes to it."""
    return make_store(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def reference_run(tmp_path_factory: pytest.TempPathFactory, tiny_store: Path) -> Path:
    """A run of the default test settings that nobody disturbed."""
    from dflash_offline.train.worker import train

    out = tmp_path_factory.mktemp("reference") / "run"
    train(make_config(tiny_store, out))
    return out
