"""A random dense target, a random drafter for it, and samples as the store would hold them.

Tests reach these functions through the fixture `lab`: test modules cannot import each other.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from dflash_offline.extract.plan import make_plan
from dflash_offline.extract.targets.base import TargetFacts
from dflash_offline.extract.targets.hf import HfTarget, load_target
from dflash_offline.extract.targets.tasks import distinct_tasks
from dflash_offline.settings import resolve
from dflash_offline.store.create import create_store
from dflash_offline.store.frozen import write_frozen
from dflash_offline.store.manifest import Manifest
from dflash_offline.store.samples import SampleTable, SampleWriter
from dflash_offline.store.writer import StoreWriter
from dflash_offline.train import checkpoint
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.evaluate.decode import decode_plain
from dflash_offline.train.evaluate.steps import Draft
from dflash_offline.train.evaluate.walk import HeldOutSample
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.run import check_run, write_run
from dflash_offline.train.spec import DrafterSpec

TAPS = (0, 2)
EOS, MASK = 1, 2


@pytest.fixture(scope="session")
def lab() -> ModuleType:
    return sys.modules[__name__]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def make_target(seed: int, vocab_size: int = 12) -> HfTarget:
    """A random Qwen3 of 4 layers in fp32; few tokens, so that drafts agree by chance quite often."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        rope_parameters=rope,
        tie_word_embeddings=False,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    facts = TargetFacts(
        name="random",
        weights_sha256=f"seed-{seed}",
        architecture="Qwen3ForCausalLM",
        num_layers=4,
        hidden_size=32,
        vocab_size=vocab_size,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        rms_norm_eps=config.rms_norm_eps,
        rope=rope,
        max_positions=512,
        is_tied=False,
        dtype="float32",
        tokenizer_sha256="none",
        template_sha256="none",
        tokenizer_size=vocab_size,
        pad_id=0,
        eos_ids=(EOS,),
        mask_id=MASK,
    )
    model = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    return HfTarget(model, None, facts, "cpu")


def make_drafter(target: HfTarget, block_size: int, seed: int = 0, num_layers: int = 2) -> Drafter:
    """A random drafter for the target; weights large enough that its drafts vary."""
    facts = target.facts
    spec = DrafterSpec(
        hidden_size=facts.hidden_size,
        intermediate_size=48,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        num_taps=len(TAPS),
        vocab_size=facts.vocab_size,
        rms_norm_eps=facts.rms_norm_eps,
        rope_theta=10000.0,
        block_size=block_size,
        mask_token_id=MASK,
        tap_layers=TAPS,
        num_target_layers=facts.num_layers,
        max_positions=facts.max_positions,
        attention=(AttentionKind(),) * num_layers,
    )
    drafter = Drafter(spec)
    drafter.init_weights(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10.0)
    return drafter


class Scripted:
    """A drafter's side that is sure of what a function (taps, start, anchor) drafts."""

    def __init__(self, draft: Callable[[torch.Tensor, int, int], Sequence[int]], vocab_size: int = 12) -> None:
        self.draft, self.vocab_size = draft, vocab_size

    def propose(self, asked: Mapping[int, Draft]) -> list[torch.Tensor]:
        drafts = [self.draft(request.taps, request.start, request.anchor) for request in asked.values()]
        return [torch.nn.functional.one_hot(torch.tensor(ids), self.vocab_size).float() for ids in drafts]

    def close(self, text: int) -> None:
        pass


def frozen_ends(target: HfTarget) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and head [V, H]."""
    parts, _ = target.frozen()
    return parts["embedding"], parts["head"]


def random_prompts(count: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, size=int(rng.integers(2, 9))).tolist() for _ in range(count)]


def answer(target: HfTarget, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    session = target.open(TAPS)
    return decode_plain(session, prompt, max_new_tokens=max_new_tokens, stop_ids=target.facts.eos_ids).tokens


def record(
    target: HfTarget, ids: Sequence[int], loss_mask: np.ndarray, task: str = "", taps: tuple[int, ...] = TAPS
) -> HeldOutSample:
    """The sample as a store holds it: taps of the positions that a drafter reads, rounded to bfloat16."""
    eligible = loss_mask[:-1] & loss_mask[1:]
    num_recorded = int(np.flatnonzero(eligible)[-1]) + 1 if eligible.any() else 0
    states, _ = target.record(torch.tensor([list(ids)]), torch.tensor([len(ids)]), taps)  # [Lt, 1, S, H]
    bits = states[:, 0, :num_recorded].to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
    return HeldOutSample(np.array(ids, np.uint32), loss_mask, bits, task)


def fit(
    drafter: Drafter, embedding: torch.Tensor, head: torch.Tensor, samples: list[HeldOutSample], steps: int
) -> None:
    """Trains on every eligible position of the samples, one sample a step, by plain autograd."""
    samples = [s for s in samples if s.taps.shape[1]]
    size, mask_id = drafter.spec.block_size, drafter.spec.mask_token_id
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    for step in range(steps):
        sample = samples[step % len(samples)]
        ids = torch.from_numpy(sample.ids.astype(np.int64))
        anchors = torch.from_numpy(np.flatnonzero(sample.loss_mask[:-1] & sample.loss_mask[1:]))  # [A]
        planes = torch.from_numpy(sample.taps.view(np.int16)).view(torch.bfloat16).float()  # [Lt, n, H]
        num_recorded = planes.shape[1]
        block_ids = torch.full((len(anchors), size), mask_id)
        block_ids[:, 0] = ids[anchors]
        places = anchors[:, None] + torch.arange(size)  # [A, B]
        context = torch.arange(num_recorded)[None, None] < anchors[:, None, None]  # [A, 1, n]
        block = torch.arange(len(anchors)).repeat_interleave(size)
        mask = torch.cat([context.expand(-1, size, -1).flatten(0, 1), block[:, None] == block[None]], dim=1)
        hidden = drafter(
            planes.transpose(0, 1).flatten(1),
            embedding[block_ids.flatten()],
            torch.arange(num_recorded),
            places.flatten(),
            (mask,),
        ).view(len(anchors), size, -1)[:, 1:]
        inside = places[:, 1:] < len(ids)
        labels = torch.where(inside, ids[places[:, 1:].clamp(max=len(ids) - 1)], -100)
        loss = torch.nn.functional.cross_entropy((hidden @ head.T).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@dataclass
class Exam:
    """A target, a drafter, and answers that the target wrote greedily."""

    target: HfTarget
    drafter: Drafter
    embedding: torch.Tensor
    head: torch.Tensor
    prompts: list[list[int]]
    answers: list[list[int]]
    max_new_tokens: int

    def sample(self, i: int) -> HeldOutSample:
        mask = np.array([False] * len(self.prompts[i]) + [True] * len(self.answers[i]))
        return record(self.target, self.prompts[i] + self.answers[i], mask)


@pytest.fixture(scope="session")
def make_exam():
    def build(block_size: int, *, seed: int, steps: int = 0, count: int = 12, max_new_tokens: int = 40) -> Exam:
        target = make_target(seed)
        drafter = make_drafter(target, block_size, seed)
        prompts = random_prompts(count, target.facts.vocab_size, seed)
        answers = [answer(target, prompt, max_new_tokens) for prompt in prompts]
        exam = Exam(target, drafter, *frozen_ends(target), prompts, answers, max_new_tokens)
        fit(drafter, exam.embedding, exam.head, [exam.sample(i) for i in range(count)], steps)
        return exam

    return build


TINY_TAPS = (0, 2, 4)
TINY_TOKENS = 24  # of an answer of the packaged target


@dataclass
class TinyRun:
    """The packaged target, a store of its greedy answers, and a run with one checkpoint."""

    target: HfTarget
    tasks: list[Any]
    prompts: list[list[int]]
    answers: list[list[int]]
    store: Path
    run_dir: Path
    drafter: Drafter


def render(target: HfTarget, text: str) -> list[int]:
    chat = [{"role": "user", "content": text}]
    rendered = target.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return target.tokenizer(rendered, add_special_tokens=False)["input_ids"]


def write_store(
    folder: Path,
    target: HfTarget,
    samples: list[tuple[list[int], np.ndarray, str, str]],
    *,
    window: int | None = None,
    **facts: Any,
) -> Path:
    """A complete store of samples (ids, loss_mask, split, task); keyword arguments change target facts."""
    with SampleWriter(folder / "data") as writer:
        for line, (ids, loss_mask, split, task) in enumerate(samples, start=1):
            writer.add(np.array(ids), loss_mask, split=split, task=task, source="made", source_line=line)
    hidden = target.facts.hidden_size
    table = SampleTable(folder / "data")
    plan = make_plan(table, bytes_per_position=float(len(TINY_TAPS) * hidden * 2), window=window)
    told = dataclasses.asdict(target.facts) | facts
    manifest = Manifest(
        target=told,
        data={"facts": {}},
        tap_layers=TINY_TAPS,
        hidden_size=hidden,
        window=window,
        segment_positions=plan.segment_positions,
        num_segments=plan.num_segments,
        num_samples=plan.num_samples,
        num_positions=plan.num_positions,
        plan_sha256=plan.sha256,
    )
    store = folder / "store"
    create_store(store, manifest, plan.table, folder / "data")
    rows = plan.table.to_pylist()
    writer = StoreWriter(store, manifest)
    for segment in range(plan.num_segments):
        sink = writer.open(segment)
        for row in (row for row in rows if row["segment"] == segment):
            ids, _ = table.tokens_at(row["tokens_file"], row["tokens_row"])
            taps, _ = target.record(torch.from_numpy(ids.astype(np.int64))[None], torch.tensor([len(ids)]), TINY_TAPS)
            taps = taps[:, 0, row["first"] : row["first"] + row["n"]]
            bits = taps.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint16)
            sink.append(row["sample_id"], row["position"], bits)
        sink.commit({"host": "test"})
    parts, _ = target.frozen()
    write_frozen(store, parts, told)
    return store


def make_run(store: Path, run_dir: Path, *settings: str) -> checkpoint.Drafter:
    """A run that has not trained a step, as `dflash train` sets it up; its drafter is not saved yet."""
    own = [f"store={store}", f"out={run_dir}", "steps=48", "drafter.num_layers=2", "drafter.block_size=4", *settings]
    run = check_run(resolve(TrainConfig, name="train", overrides=own), lambda: "cpu")
    run_dir.mkdir()
    write_run(run)
    drafter = Drafter(run.facts.spec)
    drafter.init_weights(0)
    return drafter


def save_step(run_dir: Path, drafter: Drafter, step: int) -> None:
    state = checkpoint.LoopState(step=step, epoch=0, row=0, best_step=step, best_acceptance_length=1.0)
    checkpoint.save(run_dir, state, drafter.state_dict(), {})


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """Six held-out prompts, and a drafter fitted a little to the answers, so that it is sometimes right."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny-run")
    target = load_target("tiny", dtype="float32")
    tasks = distinct_tasks(6, 5, held_out=True)
    prompts = [render(target, task.prompt) for task in tasks]
    answers = target.generate(prompts, TINY_TOKENS)
    samples = []
    for i, (prompt, text) in enumerate(zip(prompts, answers)):
        mask = np.array([False] * len(prompt) + [True] * len(text))
        samples.append((prompt + text, mask, "heldout", tasks[i].kind))
        samples.append((prompt + text + [0], np.append(mask, False), "train", tasks[i].kind))
    store = write_store(folder, target, samples)
    drafter = make_run(store, folder / "run")
    parts, _ = target.frozen()
    embedding, head = parts["embedding"], parts.get("head", parts["embedding"])
    save_step(folder / "run", drafter, 0)
    recorded = [record(target, ids, mask, taps=TINY_TAPS) for ids, mask, _, _ in samples[::2]]
    fit(drafter, embedding, head, recorded, 48)
    save_step(folder / "run", drafter, 48)
    return TinyRun(target, tasks, prompts, answers, store, folder / "run", drafter)
