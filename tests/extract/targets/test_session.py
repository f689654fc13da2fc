"""Decoding with the cache: equal to forwards without one, after any roll-back."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from dflash_offline.extract.targets.hf import HfTarget
from dflash_offline.extract.targets.session import Session
from target_families import VERIFIED
from transformers.cache_utils import DynamicLayer

ATTENTION = [
    "t16-tied",
    "llama",
    "qwen3-windows",
    "mistral",
    "phi3",
    "gemma2",
    "gemma3",
    "granite",
    "qwen3-moe",
    "gpt-oss",
]
SPARSE = ["glm-moe-dsa", "deepseek-v32"]
HYBRID = ["t19-hybrid", "qwen3-next"]


def uncached(target: HfTarget, ids: list[int], taps: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [S, V] and taps [S, Lt*H] of one forward over all ids, by hidden_states."""
    with torch.no_grad():
        out = target.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return out.logits[0].float(), torch.cat([out.hidden_states[layer + 1][0] for layer in taps], dim=-1)


@pytest.mark.parametrize("name", [*ATTENTION, *SPARSE, *HYBRID])
def test_any_walk_of_forwards_and_roll_backs(loaded: Any, name: str) -> None:
    """The text grows and shrinks at random, past the sliding windows of 8 and back."""
    target, chooser, taps = loaded(name), random.Random(3), (2, 0)
    session = target.open(taps)
    text: list[int] = []
    for _ in range(25):
        keep = chooser.choice([len(text), len(text), chooser.randint(0, len(text))])
        session.roll_back(keep)
        text = text[:keep]
        new = [chooser.randrange(6, 262) for _ in range(chooser.randint(1, 9))]
        logits, states = session.forward(torch.tensor(new))
        text += new
        assert session.length == len(text)
        assert logits.dtype == torch.float32
        assert states.shape == (len(new), 2 * 64)
        expected_logits, expected_states = uncached(target, text, taps)
        torch.testing.assert_close(logits, expected_logits[keep:], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states, expected_states[keep:], rtol=1e-4, atol=1e-4)


def test_two_sessions_do_not_mix(loaded: Any) -> None:
    target = loaded("t16-tied")
    one, two = target.open((0,)), target.open((3, 1))
    ids = torch.arange(20, 30)
    one.forward(ids)
    _, states = two.forward(ids)
    torch.testing.assert_close(states, uncached(target, ids.tolist(), (3, 1))[1])
    assert (one.length, two.length) == (10, 10)


class CroppedSession(Session):
    """What transformers' `crop` alone does: key/value layers lose tokens, recurrent states keep them."""

    def roll_back(self, length: int) -> None:
        for layer in self._cache.layers:
            if type(layer) is DynamicLayer:
                layer.crop(length - self.length)
        self._tokens = self._tokens[:length]


@pytest.mark.parametrize("name", HYBRID)
def test_recurrent_states_are_rolled_back_and_a_plain_crop_is_not_enough(loaded: Any, name: str) -> None:
    """transformers #49036: drafts that were refused stay in the state of a Gated DeltaNet layer."""
    target, chooser, taps = loaded(name), random.Random(5), (0, 2)
    text = [chooser.randrange(6, 262) for _ in range(70)]
    refused = torch.tensor([chooser.randrange(6, 262) for _ in range(7)])
    expected, _ = uncached(target, text, taps)
    errors = {}
    for kind in (Session, CroppedSession):
        session = kind(target, taps)
        session.forward(torch.tensor(text[:40]))
        session.forward(torch.cat([torch.tensor(text[40:43]), refused]))
        session.roll_back(43)
        logits, _ = session.forward(torch.tensor(text[43:]))
        errors[kind] = float((logits - expected[43:]).abs().max())
    assert errors[Session] < 1e-5
    assert errors[CroppedSession] > 1e-3, "this test must be able to see a state that was not rolled back"


def test_rolling_back_twice_behind_the_last_forward_reads_the_text_again(loaded: Any) -> None:
    target, text = loaded("t19-hybrid"), list(range(20, 60))
    session = target.open((0,))
    for part in torch.tensor(text).split(10):
        session.forward(part)
    for length in (35, 33, 12, 1):
        session.roll_back(length)
        assert session.length == length
    logits, _ = session.forward(torch.tensor(text[1:9]))
    torch.testing.assert_close(logits, uncached(target, text[:9], (0,))[0][1:], rtol=1e-4, atol=1e-5)


def greedy(target: HfTarget, prompt: list[int], max_new_tokens: int) -> list[int]:
    """The slow reference: a whole forward for every token."""
    text = list(prompt)
    while len(text) < len(prompt) + max_new_tokens:
        text.append(int(uncached(target, text, (0,))[0][-1].argmax()))
        if text[-1] in target.facts.eos_ids:
            break
    return text[len(prompt) :]


@pytest.mark.parametrize("name", ["t16-tied", "qwen3-windows", "gemma2", *HYBRID])
def test_generate_equals_one_prompt_at_a_time(loaded: Any, name: str) -> None:
    target, chooser = loaded(name), random.Random(0)
    prompts = [[chooser.randrange(6, 262) for _ in range(length)] for length in (5, 12, 5, 5, 1)]
    assert target.generate(prompts, 12) == [greedy(target, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("name", VERIFIED)
def test_greedy_answers_are_those_of_transformers(loaded: Any, name: str) -> None:
    target = loaded(name)
    prompt = torch.randint(6, 262, (1, 9), generator=torch.Generator().manual_seed(2))
    answer = target.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, eos_token_id=[2]
    )
    target.open((0,))
    assert target.generate(prompt.tolist(), 12) == [answer[0, 9:].tolist()]


def test_generate_ends_rows_at_their_own_eos(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tokens the model likes are made ends, so that rows of one batch stop at different times."""
    target, chooser = loaded("tiny"), random.Random(1)
    prompts = [[chooser.randrange(6, 262) for _ in range(6)] for _ in range(12)]
    free = target.generate(prompts, 20)
    ends = tuple(sorted({answer[min(2 * i, len(answer) - 1)] for i, answer in enumerate(free) if i < 4}))
    monkeypatch.setattr(target, "facts", replace(target.facts, eos_ids=ends))
    answers = target.generate(prompts, 20)
    assert answers == [greedy(target, prompt, 20) for prompt in prompts]
    assert len({len(answer) for answer in answers}) > 2
    for answer in answers:
        assert answer[-1] in ends or len(answer) == 20
        assert not set(answer[:-1]) & set(ends)
    assert target.generate([], 5) == []
