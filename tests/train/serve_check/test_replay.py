"""Drafts along a finished text are the cycles of decoding, and each altered fact is told from its profile."""

import dataclasses
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.evaluate.decode import decode
from dflash_offline.train.evaluate.drafting import DrafterProposer
from dflash_offline.train.export.export import write_zlab
from dflash_offline.train.export.folders import read_drafter_folder
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.serve_check.altered import altered_profiles
from dflash_offline.train.serve_check.diagnosis import diagnose
from dflash_offline.train.serve_check.profile import Profile, distance
from dflash_offline.train.serve_check.replay import Drafting, profile_of, replay
from dflash_offline.train.serve_check.texts import read_text

TOLERANCE = 0.005
WINDOW = 5
TAPS = (1, 2)


@pytest.fixture(scope="module")
def exam(make_exam: Any, lab: ModuleType) -> Any:
    """A drafter fitted to its taps, of which one earlier and one later layer can be read."""
    torch.set_num_threads(1)
    plain = make_exam(4, seed=3, count=12, max_new_tokens=40)
    drafter = Drafter(dataclasses.replace(plain.drafter.spec, tap_layers=TAPS))
    drafter.load_state_dict(plain.drafter.state_dict())
    samples = []
    for prompt, answer in zip(plain.prompts, plain.answers):
        mask = np.array([False] * len(prompt) + [True] * len(answer))
        samples.append(lab.record(plain.target, prompt + answer, mask, taps=TAPS))
    lab.fit(drafter, plain.embedding, plain.head, samples, 80)
    return dataclasses.replace(plain, drafter=drafter)


def drafting_of(exam: Any, drafter: Drafter | None = None) -> Drafting:
    return Drafting.of(drafter or exam.drafter, exam.embedding, exam.head)


def engine_cycles(exam: Any, drafter: Drafter, number: int, head: torch.Tensor | None = None) -> list[int]:
    """The accepted drafts of each cycle by decoding with the target, those behind the end of the answer counted."""
    block_size, answer = drafter.spec.block_size, exam.answers[number]
    done = decode(
        exam.target.open(drafter.spec.tap_layers),
        DrafterProposer(drafter, exam.embedding, exam.head if head is None else head, "float32"),
        exam.prompts[number],
        block_size=block_size,
        max_new_tokens=len(answer) + block_size,
        stop_ids=[],
    )
    assert done.tokens[: len(answer)] == answer
    cycles, known = [], 1
    for cycle in done.cycles:
        if known >= len(answer):
            break
        cycles.append(cycle.accepted)
        known += cycle.produced
    return cycles


def engine_profile(exam: Any, drafter: Drafter, head: torch.Tensor | None = None) -> Profile:
    cycles = [count for i in range(len(exam.prompts)) for count in engine_cycles(exam, drafter, i, head)]
    return Profile.of(cycles, drafter.spec.block_size - 1)


def test_cycles_are_those_of_decoding_prompt_by_prompt(exam: Any) -> None:
    drafting, lengths = drafting_of(exam), set()
    for i, (prompt, answer) in enumerate(zip(exam.prompts, exam.answers)):
        text = read_text(exam.target, prompt, answer, exam.drafter.spec.tap_layers, 2)
        cycles = replay(drafting, text)
        assert cycles == engine_cycles(exam, exam.drafter, i)
        lengths |= set(cycles)
    assert lengths == {0, 1, 2, 3}, "drafts of every length must be seen here, or it shows little"


def test_a_text_goes_on_as_the_target_would(exam: Any, lab: ModuleType) -> None:
    prompt, answer = exam.prompts[0], exam.answers[0][:5]
    text = read_text(exam.target, prompt, answer, exam.drafter.spec.tap_layers, 3)
    assert text.ids[: text.end] == prompt + answer
    assert text.ids[text.end :] == exam.answers[0][5:8]
    assert {layer: taps.shape for layer, taps in text.taps.items()} == {
        layer: (text.end, exam.target.facts.hidden_size) for layer in exam.drafter.spec.tap_layers
    }


@pytest.fixture(scope="module")
def windowed(exam: Any, lab: ModuleType) -> Any:
    """The same exam with a drafter of sliding layers that also scales its embedding; weights of the first one."""
    spec = dataclasses.replace(
        exam.drafter.spec, attention=(AttentionKind(WINDOW), AttentionKind()), embedding_scale=3.0
    )
    drafter = Drafter(spec)
    drafter.load_state_dict(exam.drafter.state_dict())
    return dataclasses.replace(exam, drafter=drafter)


def altered_of(exam: Any) -> dict[str, Profile]:
    facts = SimpleNamespace(pad_id=0, bos_id=None, eos_ids=exam.target.facts.eos_ids)
    target = SimpleNamespace(facts=facts, open=exam.target.open)
    return altered_profiles(drafting_of(exam), target, list(zip(exam.prompts, exam.answers)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def altered(exam: Any) -> dict[str, Profile]:
    return altered_of(exam)


@pytest.fixture(scope="module")
def altered_windowed(windowed: Any) -> dict[str, Profile]:
    return altered_of(windowed)


def ours_of(exam: Any) -> Profile:
    spec = exam.drafter.spec
    pairs = zip(exam.prompts, exam.answers)
    texts = [read_text(exam.target, *pair, spec.tap_layers, spec.block_size - 2) for pair in pairs]
    return profile_of(drafting_of(exam), texts)


@pytest.fixture(scope="module")
def ours(exam: Any) -> Profile:
    return ours_of(exam)


@pytest.fixture(scope="module")
def ours_windowed(windowed: Any) -> Profile:
    return ours_of(windowed)


def tampered(exam: Any, folder: Path, **changes: Any) -> Drafter:
    """A drafter as an engine has it that reads a folder whose config says something else than the run."""
    spec = dataclasses.replace(exam.drafter.spec, **changes)
    write_zlab(folder, spec, exam.drafter.state_dict(), exam.target.facts.as_plain(), "card")
    found, tensors = read_drafter_folder(folder)
    assert found.spec == spec
    drafter = Drafter(found.spec)
    drafter.load_state_dict(tensors)
    return drafter.eval()


def require_named(fact: str, engine: Profile, ours: Profile, altered: dict[str, Profile]) -> None:
    assert distance(engine, ours) > TOLERANCE, "the fault must be seen in the acceptance"
    found = diagnose(engine, ours, altered, TOLERANCE)
    assert found.named, found.text()
    assert found.named[0].fact.startswith(fact), found.text()
    assert found.named[0].distance == 0


@pytest.mark.parametrize(
    "fact, changes",
    [
        ("taps: layers [0, 1]", {"tap_layers": (0, 1)}),
        ("mask token: 0 (pad)", {"mask_token_id": 0}),
        ("rope: theta 1e+06", {"rope_theta": 1e6}),
    ],
)
def test_a_folder_with_one_wrong_fact_is_told_by_its_acceptance(
    fact: str, changes: dict[str, Any], exam: Any, ours: Profile, altered: dict[str, Profile], tmp_path: Path
) -> None:
    require_named(fact, engine_profile(exam, tampered(exam, tmp_path / "export", **changes)), ours, altered)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fact, changes",
    [
        ("mask token: 1 (eos)", {"mask_token_id": 1}),
        ("attention: all layers causal", {"attention": (AttentionKind(WINDOW, True), AttentionKind(None, True))}),
        ("attention: windows ignored", {"attention": (AttentionKind(), AttentionKind())}),
        (
            "attention: sliding layers causal",
            {"attention": (AttentionKind(WINDOW, is_causal=True), AttentionKind())},
        ),
        ("embedding scale: 1", {"embedding_scale": 1.0}),
    ],
)
def test_other_wrong_facts_are_told(
    fact: str,
    changes: dict[str, Any],
    windowed: Any,
    ours_windowed: Profile,
    altered_windowed: dict[str, Profile],
    tmp_path: Path,
) -> None:
    engine = engine_profile(windowed, tampered(windowed, tmp_path / "export", **changes))
    require_named(fact, engine, ours_windowed, altered_windowed)


def test_a_head_taken_for_the_embedding_is_told(exam: Any, ours: Profile, altered: dict[str, Profile]) -> None:
    engine = engine_profile(exam, exam.drafter, head=exam.embedding)
    require_named("head: the target's embedding", engine, ours, altered)


@pytest.mark.slow
def test_a_head_that_is_not_there_is_told(exam: Any, ours: Profile, altered: dict[str, Profile]) -> None:
    engine = engine_profile(exam, exam.drafter, head=torch.zeros_like(exam.head))
    require_named("head: none", engine, ours, altered)


@pytest.fixture(scope="module")
def far(make_exam: Any, lab: ModuleType) -> Any:
    """Long prompts, and a drafter that looks at single tokens far back: there a small error is a large angle."""
    torch.set_num_threads(1)
    plain = make_exam(4, seed=3, count=1, max_new_tokens=2)
    first = lab.make_drafter(plain.target, 4, seed=9)
    drafter = Drafter(dataclasses.replace(first.spec, rope_theta=3.0))
    drafter.load_state_dict(first.state_dict())
    with torch.no_grad():
        for layer in drafter.layers:
            layer.self_attn.q_norm.weight.mul_(5.0)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 12, size=400).tolist() for _ in range(5)]
    answers = [lab.answer(plain.target, prompt, 30) for prompt in prompts]
    samples = [
        lab.record(plain.target, prompt + answer, np.arange(len(prompt + answer)) >= len(prompt))
        for prompt, answer in zip(prompts, answers)
    ]
    lab.fit(drafter, plain.embedding, plain.head, samples, 30)
    return dataclasses.replace(plain, drafter=drafter, prompts=prompts, answers=answers)


def test_frequencies_rounded_to_bfloat16_are_told(far: Any) -> None:
    rounded = Drafter(far.drafter.spec)
    rounded.load_state_dict(far.drafter.state_dict())
    rounded.inv_freq = far.drafter.inv_freq.bfloat16().float()  # as where a whole module is cast
    require_named("rope: frequencies rounded to bfloat16", engine_profile(far, rounded), ours_of(far), altered_of(far))
