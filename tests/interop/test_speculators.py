"""speculators 0.9.0, in an environment of its own, computes our loss and our gradients from the same row, and loads
our exports, with the target that they name, to the same outputs of every block.

The same weights, row, target and anchors, float32 on a CPU. Chosen so that both mean the same: `sample_from_anchor` off
(slot k predicts its own position a+k), one answer a sample behind a prompt of at least a block, anchors that both take.
By design they differ in what this test keeps out or converts:
- it divides by the number of trained slots, we by the sum of their weights; here sums are compared;
- a window is measured from the anchor for the whole block, ours from each slot (as z-lab's runtime does): only a window
  that no sample fills means the same, and then tells whether slots see later ones of their block;
- its blocks run on behind the end of an answer or a sample and are trained on again where the next answer begins;
- any trained token may be an anchor, save the last block of the row, also where the next one is not trained on;
- its labels are the likeliest tokens of the target's recorded distribution, ours the tokens of the text: the states
  here are made to say the text;
- it keeps embedding, head and final norm of the target in its own checkpoints, and counts the taps' layers from 1.
"""

import dataclasses
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_offline.store.samples import eligible_anchors
from dflash_offline.train.batch import RowBatch
from dflash_offline.train.config import LossConfig
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.export.config import ExportConfig
from dflash_offline.train.export.export import export, write_zlab
from dflash_offline.train.export.folders import read_drafter_folder
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.slot import RowArrays, RowShape, RowSlot
from dflash_offline.train.slot_weights import default_gamma
from dflash_offline.train.spec import DrafterSpec
from dflash_offline.train.step import TrainStep
from environments import make_environment
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

pytestmark = pytest.mark.slow
PACKAGES = ["torch==2.13.0", "transformers==5.17.0", "pydantic>=2", "pydantic-settings>=2", "loguru<=0.7.3", "numpy"]
VOCABULARY, HIDDEN, NUM_TAPS, MASK = 48, 32, 3, 47
TOKENS, ANCHORS, NUM_KEPT = 256, 32, 27
SAMPLES = ((16, 60), (20, 90), (17, 80))  # prompt and whole length of each, tokens
WIDE = 1000  # a window that no sample fills
NORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Our settings, and theirs where they have other names."""

    block_size: int = 8
    attention: tuple[AttentionKind, ...] = (AttentionKind(),) * 2
    loss: LossConfig = LossConfig()
    their_loss: str = "ce"

    @property
    def spec(self) -> DrafterSpec:
        return DrafterSpec(
            hidden_size=HIDDEN,
            intermediate_size=40,
            num_layers=len(self.attention),
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            num_taps=NUM_TAPS,
            vocab_size=VOCABULARY,
            rms_norm_eps=NORM_EPS,
            rope_theta=10000.0,
            block_size=self.block_size,
            mask_token_id=MASK,
            tap_layers=(0, 2, 3),
            num_target_layers=6,
            max_positions=512,
            attention=self.attention,
        )

    @property
    def shape(self) -> RowShape:
        return RowShape(row_tokens=TOKENS, anchors=ANCHORS, block_size=self.block_size)


FULL, CAUSAL, SLIDING = AttentionKind(), AttentionKind(WIDE, True), AttentionKind(WIDE)
CASES = {
    "block-8": Case(),
    "block-10": Case(block_size=10),
    "block-16": Case(block_size=16),
    "causal": Case(attention=(CAUSAL, CAUSAL)),
    "mixed": Case(attention=(CAUSAL, FULL, CAUSAL), block_size=16),
    "sliding": Case(attention=(SLIDING, FULL)),
    "decay": Case(loss=LossConfig(gamma=2.5)),
    "dpace": Case(loss=LossConfig(weights="dpace", dpace_alpha=0.3)),
    "kl": Case(loss=LossConfig(objective="kl"), their_loss="kl_div"),
    "tv": Case(loss=LossConfig(objective="tv"), their_loss="tv"),
    "lk": Case(loss=LossConfig(objective="lk"), their_loss="nla"),
    "lk_hybrid": Case(loss=LossConfig(objective="lk_hybrid"), their_loss="lk_hybrid", block_size=16),
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with speculators 0.9.0 and those of its requirements that a drafter needs."""
    return make_environment(tmp_path_factory.mktemp("speculators"), PACKAGES, ["speculators==0.9.0"])


@dataclass(frozen=True, slots=True)
class Target:
    """The frozen ends of a target: embedding and head [V, H], the weight of its final norm [H]."""

    embedding: Tensor
    head: Tensor
    norm: Tensor


@pytest.fixture(scope="module")
def target() -> Target:
    rng = torch.Generator().manual_seed(5)
    embedding, head = (torch.randn(VOCABULARY, HIDDEN, generator=rng) for _ in range(2))
    return Target(embedding, head / head.norm(dim=1, keepdim=True), 0.5 + torch.rand(HIDDEN, generator=rng))


def drafter_of(spec: DrafterSpec) -> Drafter:
    """A drafter whose every weight is random and matters."""
    drafter, rng = Drafter(spec), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=rng)
            else:
                parameter.normal_(1.0, 0.3, generator=rng)
    return drafter


def to_bits(states: Tensor) -> np.ndarray:
    """The bytes of bfloat16 states [..., H]: u8 [..., 2H]."""
    return states.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()


def row_of(case: Case, target: Target) -> RowArrays:
    """The samples and padding behind them; a state's likeliest next token is that of the text."""
    slot = RowSlot(shape=case.shape, num_taps=NUM_TAPS, hidden_size=HIDDEN, codec_name="raw", has_last=True)
    row, rng = slot.allocate(), np.random.default_rng(3)
    assert row.last is not None
    eligible, place = np.zeros(TOKENS, np.bool_), 0
    row.sample_ids[:] = -1
    for number, (prompt, length) in enumerate(SAMPLES):
        own, recorded = slice(place, place + length), slice(place, place + length - 1)
        row.ids[own] = rng.integers(0, MASK, length)
        row.loss_mask[own] = np.arange(length) >= prompt
        row.sample_ids[own], row.positions[own] = number, np.arange(length)
        eligible[own] = eligible_anchors(row.loss_mask[own])
        taps = torch.from_numpy(rng.standard_normal((NUM_TAPS, length - 1, HIDDEN)))
        noise = torch.from_numpy(rng.standard_normal((length - 1, HIDDEN)))
        following = target.head[torch.from_numpy(row.ids[place + 1 : place + length])]
        row.taps[:, recorded] = to_bits(taps)
        row.last[recorded] = to_bits((following + 0.05 * noise) / target.norm)
        place += length
    both = np.flatnonzero(eligible[: TOKENS - case.block_size])  # they take none from the last block of a row
    ends = [sum(length for _, length in SAMPLES[: number + 1]) - 3 for number in range(len(SAMPLES))]
    drawn = rng.choice(np.setdiff1d(both, ends), NUM_KEPT - len(ends), replace=False)
    kept = np.sort([*ends, *drawn])
    row.anchors[:], row.keep[:] = kept[-1], np.arange(ANCHORS) < NUM_KEPT
    row.anchors[:NUM_KEPT] = kept
    return row


def their_case(case: Case) -> dict[str, Any]:
    """Their configuration and the arguments of their forward."""
    spec, kinds = case.spec, case.attention
    are_sliding = [kind.window is not None for kind in kinds]
    window = {"use_sliding_window": True, "sliding_window": WIDE} if any(are_sliding) else {}
    layers = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in are_sliding],
    }
    config = {
        "draft_vocab_size": spec.vocab_size,
        "block_size": spec.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in spec.tap_layers],
        "mask_token_id": spec.mask_token_id,
        "sliding_window_non_causal": not any(kind.is_causal for kind in kinds),
        "sample_from_anchor": False,
    }
    loss = case.loss
    weights = {"decay": "fixed-exp-decay", "dpace": "dpace"}[loss.weights]
    call = {"loss": case.their_loss, "gamma": loss.gamma or default_gamma(spec.block_size)}
    call |= {"per_position_loss_weight": weights, "dpace_alpha": loss.dpace_alpha}
    return {"config": config, "layers": layers | window, "call": call}


def plain(states: np.ndarray) -> Tensor:
    """The states [..., H] that bytes of bfloat16 hold, in float32."""
    return torch.from_numpy(states).view(torch.bfloat16).float()


def row_tensors(row: RowArrays) -> dict[str, Tensor]:
    """The row as their collate function names and lays it out."""
    assert row.last is not None
    return {
        "taps": torch.cat(list(plain(row.taps)), dim=1),
        "last": plain(row.last),
        "ids": torch.from_numpy(row.ids[:TOKENS]),
        "loss_mask": torch.from_numpy(row.loss_mask[:TOKENS]),
        "document_ids": torch.from_numpy(row.sample_ids).long(),
        "position_ids": torch.from_numpy(row.positions).long(),
        "anchors": torch.from_numpy(row.anchors).long(),
        "keep": torch.from_numpy(row.keep),
    }


# What the layers of our exports see.
EXPORTED = {
    "export-full": (FULL, FULL),
    "export-causal": (CAUSAL, CAUSAL),
    "export-sliding": (SLIDING, SLIDING),
    "export-mixed": (SLIDING, FULL),
    "export-mixed-late": (FULL, SLIDING),
}
EXPORT_ANCHORS = (3, 17, 40, 63, 90)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with a head of its own, which an export names."""
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("target")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def write_export(folder: Path, name: str, attention: tuple[AttentionKind, ...], target_folder: Path) -> None:
    """An export in the speculators format, by way of a folder in z-lab's, and the row to run it on."""
    drafter = drafter_of(Case(attention=attention).spec)
    facts = {"name": str(target_folder), "architecture": "Qwen3ForCausalLM", "num_layers": 6, "eos_ids": [1]}
    facts |= {"hidden_size": HIDDEN, "vocab_size": VOCABULARY}
    write_zlab(folder / f"{name}-zlab", drafter.spec, drafter.state_dict(), facts, "card")
    wanted = ExportConfig(out=str(folder / name), format="speculators", target=str(target_folder))
    export(folder / f"{name}-zlab", wanted, read_target=lambda _: facts)
    rng = torch.Generator().manual_seed(2)
    row = {
        "taps": torch.randn(100, NUM_TAPS * HIDDEN, generator=rng),
        "ids": torch.randint(0, MASK, (100,), generator=rng),
        "anchors": torch.tensor(EXPORT_ANCHORS),
    }
    save_file(row, folder / f"{name}.row.safetensors")


@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_loads_and_computes_the_same_blocks(name: str, exchange: Path, target_folder: Path) -> None:
    info = json.loads((exchange / "result.json").read_text())["exports"][name]
    assert info == {"missing": [], "unexpected": [], "mismatched": []}
    theirs, row = load_file(exchange / f"{name}.outputs.safetensors"), load_file(exchange / f"{name}.row.safetensors")
    folder, tensors = read_drafter_folder(exchange / name)
    drafter, frozen = Drafter(folder.spec), load_file(target_folder / "model.safetensors")
    drafter.load_state_dict(tensors)
    embedding, head = frozen["model.embed_tokens.weight"], frozen["lm_head.weight"]
    block_size = folder.spec.block_size
    for number, anchor in enumerate(EXPORT_ANCHORS):
        cache = drafter.new_cache()
        drafter.extend(cache, row["taps"][:anchor], torch.arange(anchor))
        ids = torch.tensor([int(row["ids"][anchor]), *[MASK] * (block_size - 1)])
        ours = drafter.propose(cache, embedding[ids], anchor + torch.arange(block_size))  # [B, H]
        block = slice(number * block_size, (number + 1) * block_size)
        assert (ours - theirs["hidden"][block]).abs().max() < 1e-5
        assert (ours @ head.T - theirs["logits"][block]).abs().max() < 1e-4


@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_saved_by_their_class_is_read_back_unchanged(name: str, exchange: Path) -> None:
    (ours, tensors), (theirs, again) = (read_drafter_folder(exchange / n) for n in (name, f"{name}-again"))
    assert theirs.spec == ours.spec
    assert theirs.target == ours.target
    assert set(again) == set(tensors)
    assert all(torch.equal(again[key], tensor) for key, tensor in tensors.items())


def test_what_the_slots_of_an_export_see_matters_here(exchange: Path) -> None:
    outputs = [
        load_file(exchange / f"{name}.outputs.safetensors")["hidden"] for name in ("export-causal", "export-full")
    ]
    assert (outputs[0] - outputs[1]).abs().max() > 1e-2


@pytest.fixture(scope="module")
def exchange(python: Path, target: Target, target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that both sides have written to, see speculators_side.py."""
    folder = tmp_path_factory.mktemp("exchange")
    frozen = {field.name: getattr(target, field.name) for field in dataclasses.fields(target)}
    for name, case in CASES.items():
        tensors = drafter_of(case.spec).state_dict() | frozen | row_tensors(row_of(case, target))
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / f"{name}.safetensors")
    (folder / "cases.json").write_text(json.dumps({name: their_case(case) for name, case in CASES.items()}))
    for name, attention in EXPORTED.items():
        write_export(folder, name, attention, target_folder)
    (folder / "exports.json").write_text(json.dumps(list(EXPORTED)))
    command = [python, Path(__file__).with_name("speculators_side.py"), folder]
    no_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # where there is one, it compiles its forward
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=no_gpu)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_ours(name: str, exchange: Path, target: Target) -> None:
    case = CASES[name]
    row, drafter = row_of(case, target), drafter_of(case.spec)
    batch = RowBatch(case.spec, case.shape, torch.device("cpu"), torch.float32, has_last=True)
    step = TrainStep(drafter, target.embedding, target.head, case.shape, case.loss, norm=target.norm, norm_eps=NORM_EPS)
    batch.load(row)
    step.accumulate(batch)

    theirs = json.loads((exchange / "result.json").read_text())[name]
    counts = theirs["metrics"]
    num_trained = counts["full_acc_total"]
    assert set(row.anchors[row.keep].tolist()) <= set(theirs["own_anchors"]), "anchors that they would never draw"
    assert num_trained == float(batch.valid.sum())
    assert num_trained < NUM_KEPT * (case.block_size - 1), "some blocks must reach over the end of a sample"
    denominator = num_trained + 1e-5  # theirs
    assert float(step.sums.values[0]) == pytest.approx(theirs["loss"] * denominator, rel=1e-5)
    gradients = load_file(exchange / f"{name}.gradients.safetensors")
    ours = dict(zip(dict(drafter.named_parameters()), step.gradients))
    assert set(gradients) == set(ours)
    for key, gradient in gradients.items():
        error = (ours[key] - gradient * denominator).norm() / (gradient * denominator).norm()
        assert error < 1e-5, f"{key}: {error:.1e}"
    assert step.sums.metrics()["accuracy"] == pytest.approx(counts["full_acc_sum"] / num_trained)


def test_what_the_slots_see_matters_here(exchange: Path) -> None:
    """The cases that differ in attention alone have other gradients, so their parity says something."""
    same = [load_file(exchange / f"{name}.gradients.safetensors")["fc.weight"] for name in ("block-8", "causal")]
    assert (same[0] - same[1]).norm() / same[0].norm() > 0.05
