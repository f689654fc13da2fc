"""Serves the steps of one text or of many: texts that want the same thing get it in one forward.

A text that ends makes room for the next. Knows the requests of `steps` and nothing of drafts, acceptance or models.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .acceptance import Cycle
from .steps import Answer, Draft, Forward, Read, Request, Steps
from .target import BatchSession, Session, read_prompt


@dataclass(frozen=True, slots=True)
class Decoded:
    """An answer: its token ids (the stop token included), the cycles it took, and its share of the wall time.

    What n texts waited for together counts 1/n for each, so that the shares add up to the time of all.
    `prompt_s` is the part of `wall_s` until the first token was known. Plain decoding has no cycles.
    """

    tokens: list[int]
    cycles: tuple[Cycle, ...]
    prompt_s: float
    wall_s: float


class TargetSide(Protocol):
    """Texts inside a target, told apart by number."""

    def read(self, text: int, prompt: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Starts a text: see `steps.Read`."""
        ...

    def forward(self, asked: Mapping[int, Forward]) -> list[tuple[Tensor, Tensor]]:
        """Serves all started texts, see `steps.Forward`; in the order of `asked`."""
        ...

    def close(self, text: int) -> None:
        """Forgets a text."""
        ...


class DrafterSide(Protocol):
    """Texts inside a drafter, told apart by number."""

    def propose(self, asked: Mapping[int, Draft]) -> list[Tensor]:
        """See `steps.Draft`; in the order of `asked`. A text begins with its first request."""
        ...

    def close(self, text: int) -> None:
        """Forgets a text."""
        ...


class OneByOne:
    """A session for each text, and a forward for each: what every target can do."""

    def __init__(self, open_session: Callable[[], Session]) -> None:
        self.open_session = open_session
        self.sessions: dict[int, Session] = {}

    def read(self, text: int, prompt: Sequence[int]) -> tuple[Tensor, Tensor]:
        self.sessions[text] = self.open_session()
        return read_prompt(self.sessions[text], prompt)

    def forward(self, asked: Mapping[int, Forward]) -> list[tuple[Tensor, Tensor]]:
        results = []
        for text, request in asked.items():
            self.sessions[text].roll_back(request.start)
            results.append(self.sessions[text].forward(torch.tensor(request.ids)))
        return results

    def close(self, text: int) -> None:
        del self.sessions[text]


class Together:
    """One batch session; prompts are read one at a time, so that no padding is ever read."""

    def __init__(self, open_session: Callable[[], Session], batch: BatchSession) -> None:
        self.open_session, self.batch = open_session, batch

    def read(self, text: int, prompt: Sequence[int]) -> tuple[Tensor, Tensor]:
        session = self.open_session()
        found = read_prompt(session, prompt)
        self.batch.add(text, session)
        return found

    def forward(self, asked: Mapping[int, Forward]) -> list[tuple[Tensor, Tensor]]:
        starts = [request.start for request in asked.values()]
        return self.batch.forward(list(asked), starts, [torch.tensor(request.ids) for request in asked.values()])

    def close(self, text: int) -> None:
        self.batch.close(text)


def serve(texts: Sequence[Steps], target: TargetSide, drafter: DrafterSide | None, batch: int) -> list[Decoded]:
    """The answers of all texts, at most `batch` of them at a time, in their order.

    `drafter` may be None where no text drafts.
    """
    return Lockstep(texts, target, drafter).run(batch)


class Lockstep:
    """The texts that are being decoded, and what each of them waits for."""

    def __init__(self, texts: Sequence[Steps], target: TargetSide, drafter: DrafterSide | None) -> None:
        self.texts, self.target, self.drafter = texts, target, drafter
        self.asked: dict[int, Request] = {}
        self.answers: dict[int, Answer] = {}
        self.prompt_s, self.wall_s = [0.0] * len(texts), [0.0] * len(texts)

    @torch.no_grad()
    def run(self, batch: int) -> list[Decoded]:
        self.charged = time.perf_counter()
        waiting = iter(range(len(self.texts)))
        while True:
            while len(self.asked) < batch and (number := next(waiting, None)) is not None:
                self.start(number)
            if not self.asked:
                break
            self.serve_drafts()
            self.serve_forwards()
        return [
            Decoded(self.answers[i].tokens, self.answers[i].cycles, self.prompt_s[i], self.wall_s[i])
            for i in range(len(self.texts))
        ]

    def start(self, number: int) -> None:
        request = next(self.texts[number])
        assert isinstance(request, Read), f"a text begins with its prompt, not with {request}"
        self.tell(number, self.target.read(number, request.prompt))
        self.charge([number])
        self.prompt_s[number] = self.wall_s[number]

    def serve_drafts(self) -> None:
        asked = {number: request for number, request in self.asked.items() if isinstance(request, Draft)}
        if asked:
            assert self.drafter is not None, "a text drafts, and there is no drafter"
            self.tell_all(asked, self.drafter.propose(asked))

    def serve_forwards(self) -> None:
        asked = {number: request for number, request in self.asked.items() if isinstance(request, Forward)}
        if asked:
            self.tell_all(asked, self.target.forward(asked))

    def tell_all(self, asked: Collection[int], results: Sequence[object]) -> None:
        for number, result in zip(asked, results, strict=True):
            self.tell(number, result)
        self.charge(asked)

    def tell(self, number: int, result: object) -> None:
        """Hands a text what it waited for; it asks for the next thing, or ends."""
        try:
            self.asked[number] = self.texts[number].send(result)
        except StopIteration as end:
            self.answers[number] = end.value
            self.asked.pop(number, None)
            self.target.close(number)
            if self.drafter is not None:
                self.drafter.close(number)

    def charge(self, numbers: Collection[int]) -> None:
        """The time since the last charge, in equal parts to these texts."""
        now = time.perf_counter()
        for number in numbers:
            self.wall_s[number] += (now - self.charged) / len(numbers)
        self.charged = now
