"""Speculative output is the target's own greedy output, on a dense and on a hybrid target, whatever is drafted."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dflash_offline.extract.targets.hf import HfTarget, load_target
from dflash_offline.extract.targets.session import Session
from dflash_offline.extract.targets.tasks import distinct_tasks
from dflash_offline.train.evaluate.decode import Decoded, decode, decode_plain
from transformers.cache_utils import DynamicLayer

BLOCK, LIMIT = 8, 160
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class CroppedSession(Session):
    """What transformers' `crop` alone does: key/value layers lose tokens, recurrent states keep them."""

    def roll_back(self, length: int) -> None:
        for layer in self._cache.layers:
            if type(layer) is DynamicLayer:
                layer.crop(length - self.length)
        self._tokens = self._tokens[:length]


@pytest.fixture(scope="module")
def targets() -> dict[tuple[str, str], HfTarget]:
    return {}


@pytest.fixture
def open_target(targets: dict[tuple[str, str], HfTarget]) -> Any:
    """open_target(name, device): loaded once, float32."""

    def get(name: str, device: str) -> HfTarget:
        if (name, device) not in targets:
            targets[name, device] = load_target(name, device=device, dtype="float32")
        return targets[name, device]

    return get


def prompts_of(target: HfTarget, count: int) -> list[list[int]]:
    chats = [[{"role": "user", "content": task.prompt}] for task in distinct_tasks(count, 7, held_out=True)]
    render = target.tokenizer.apply_chat_template
    return [render(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


class Guesser:
    """Drafts the plain answer up to a random place, then nonsense: every number of drafts is accepted some time."""

    def __init__(self, answer: Sequence[int], num_prompt: int, seed: int) -> None:
        self.answer, self.num_prompt, self.chooser = [*answer, *[0] * BLOCK], num_prompt, random.Random(seed)

    def __call__(self, taps: torch.Tensor, start: int, anchor: int) -> list[int]:
        place = min(start - self.num_prompt, len(self.answer) - BLOCK)  # an answer that went astray may be longer
        drafts = self.answer[place + 1 : place + BLOCK]
        num_right = self.chooser.randrange(BLOCK)
        nonsense = [(token + self.chooser.randrange(1, 512)) % 512 for token in drafts]  # never the right one
        return drafts[:num_right] + nonsense[num_right:]


def both(target: HfTarget, prompt: list[int], number: int, kind: type[Session] = Session) -> tuple[Decoded, Decoded]:
    """The plain answer, and the speculative one from drafts that are right up to a random place."""
    options = {"stop_ids": target.facts.eos_ids, "max_new_tokens": LIMIT}
    plain = decode_plain(target.open((0,)), prompt, **options)
    guesser = Guesser(plain.tokens, len(prompt), number)
    return plain, decode(kind(target, (0,)), guesser, prompt, block_size=BLOCK, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [10, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["tiny", "tiny-hybrid"])
def test_every_answer_equals_plain_decoding(open_target: Any, name: str, count: int, device: str) -> None:
    target, lengths = open_target(name, device), set()
    for number, prompt in enumerate(prompts_of(target, count)):
        plain, speculative = both(target, prompt, number)
        assert speculative.tokens == plain.tokens
        lengths |= {cycle.produced for cycle in speculative.cycles}
    assert lengths == set(range(1, BLOCK + 1))


@pytest.mark.parametrize("device", DEVICES)
def test_a_plain_crop_would_lose_answers_of_the_hybrid(open_target: Any, device: str) -> None:
    """The test above can fail: with what transformers' crop rolls back, it does (transformers #49036)."""
    target, num_equal = open_target("tiny-hybrid", device), 0
    for number, prompt in enumerate(prompts_of(target, 10)):
        plain, speculative = both(target, prompt, number, CroppedSession)
        num_equal += plain.tokens == speculative.tokens
    assert num_equal <= 5
