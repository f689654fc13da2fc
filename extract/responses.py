"""Answers written by the target itself, greedily, for `--responses target`.

Knows prompts as token ids and a target that generates; the answers are kept as the ids that
came out, never tokenized again. Prompts of one length share a batch, whose padded tokens,
answers included, stay within the token budget.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .chats.chat import Sample


class Generator(Protocol):
    """What a target must offer: greedy answers, each ending with its eos id or cut."""

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt with the target's answer; `is_cut` when the limit came before an eos."""

    sample: Sample
    is_cut: bool


def answer_prompts(
    target: Generator,
    prompts: Sequence[list[int]],
    *,
    eos_ids: Sequence[int],
    max_new_tokens: int,
    longest: int,
    token_budget: int,
    bar: Any,
) -> list[Answer]:
    """One answer per prompt, in the order given; `bar` is a tqdm that counts prompts.

    Every prompt must leave room for at least one token below `longest`.
    """
    answers: list[Answer | None] = [None] * len(prompts)
    for places, num_new in generation_batches(
        [len(prompt) for prompt in prompts], max_new_tokens, longest, token_budget
    ):
        written = target.generate([prompts[place] for place in places], num_new)
        for place, ids in zip(places, written):
            sample = Sample(list(prompts[place]), [False] * len(prompts[place]))
            sample.extend(sample.ids, ids)
            answers[place] = Answer(sample, ids[-1] not in eos_ids)
        bar.update(len(places))
    done = [answer for answer in answers if answer is not None]
    assert len(done) == len(prompts), f"{len(done)} answers for {len(prompts)} prompts"
    return done


def generation_batches(
    lengths: Sequence[int], max_new_tokens: int, longest: int, token_budget: int
) -> Iterator[tuple[list[int], int]]:
    """(places, tokens to write) of each batch: equal prompt lengths, at least one prompt.

    A batch of n prompts costs n * (prompt + new tokens), the size of its cache when it ends.
    """
    by_length: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        by_length.setdefault(length, []).append(place)
    for length, places in sorted(by_length.items()):
        num_new = min(max_new_tokens, longest - length)
        assert num_new >= 1, f"a prompt of {length} tokens leaves no room in {longest}"
        size = max(1, token_budget // (length + num_new))
        for start in range(0, len(places), size):
            yield places[start : start + size], num_new
