"""Decoding with the cache: equal to forwards without one, after any roll-back."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from dflash_offline import UserError
from dflash_offline.extract.targets.hf import HfTarget

ATTENTION = ["t16-tied", "llama", "qwen3-windows", "gemma2", "gemma3", "granite", "qwen3-moe"]


def uncached(target: HfTarget, ids: list[int], taps: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [S, V] and taps [S, Lt*H] of one forward over all ids, by hidden_states."""
    with torch.no_grad():
        out = target.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return out.logits[0].float(), torch.cat([out.hidden_states[layer + 1][0] for layer in taps], dim=-1)


@pytest.mark.parametrize("name", ATTENTION)
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


def test_recurrent_targets_are_refused_for_decoding(loaded: Any) -> None:
    with pytest.raises(UserError, match="recurrent layers") as caught:
        loaded("t19-hybrid").open((0,))
    assert len(str(caught.value).splitlines()) == 3


def greedy(target: HfTarget, prompt: list[int], max_new_tokens: int) -> list[int]:
    """The slow reference: a whole forward for every token."""
    text = list(prompt)
    while len(text) < len(prompt) + max_new_tokens:
        text.append(int(uncached(target, text, (0,))[0][-1].argmax()))
        if text[-1] in target.facts.eos_ids:
            break
    return text[len(prompt) :]


@pytest.mark.parametrize("name", ["t16-tied", "qwen3-windows", "gemma2", "t19-hybrid"])
def test_generate_equals_one_prompt_at_a_time(loaded: Any, name: str) -> None:
    target, chooser = loaded(name), random.Random(0)
    prompts = [[chooser.randrange(6, 262) for _ in range(length)] for length in (5, 12, 5, 5, 1)]
    assert target.generate(prompts, 12) == [greedy(target, prompt, 12) for prompt in prompts]


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
