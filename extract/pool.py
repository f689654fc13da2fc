"""Chunks of input lines dealt to processes, their outcomes taken in the order of the input.

One process does the same in this one. Knows the order of chunks, nothing of what becomes of them.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..watch import Channel, Job, run_all
from .config import PrepareConfig
from .lines.inputs import Chunk, source_files
from .parcel import Parcel, packed
from .targets.facts import tokenizer_facts
from .work import Maker, Outcome

AHEAD = 4  # chunks a process may have done before the oldest one is back, so that memory stays flat
PAUSE_S = 0.02
BYTES_A_PROCESS = 16 * 2**20  # a process pays for its start (2 s) from about here on
MOST_PROCESSES = 32


@dataclass(frozen=True, slots=True)
class Done:
    """A worker's message: the outcomes of the chunk with this number."""

    number: int
    parcel: Parcel


LATER = "later"
WANTS_WORK = "a chunk"


def num_processes(config: PrepareConfig, sources: Sequence[Path]) -> int:
    """As asked, else one per core that this process may use, as far as the inputs are worth it."""
    if config.processes is not None:
        return config.processes
    files = [part for path in sources for part in source_files(path)]
    worth = 1 + sum(path.stat().st_size for path in files) // BYTES_A_PROCESS
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES, worth)


class Taker(Protocol):
    """Whoever wants the outcomes of all chunks, in the order of the input."""

    def take(self, source: Path, outcomes: list[Outcome]) -> None: ...

    def take_parcel(self, source: Path, parcel: Parcel) -> None: ...


def run_pool(chunks: Iterator[Chunk], maker: Maker, processes: int, taker: Taker) -> None:
    """Gives every chunk to a process and its outcomes to the taker, in order.

    Raises what a worker raised, ChildDied and Stalled as `watch` does; no process is left then.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each; the children inherit it
    if processes == 1:
        for chunk in chunks:
            taker.take(chunk.source, maker.make(chunk))
        return
    jobs = [Job(f"prepare {number}", work, (maker,)) for number in range(processes)]
    deal = Deal(chunks, AHEAD * processes, taker.take_parcel)
    run_all(jobs, stall_s=maker.config.stall_s, on_message=deal.answer)


class Deal:
    """The parent's side: deals chunks, and holds outcomes back until those before them are taken."""

    def __init__(self, chunks: Iterator[Chunk], most_open: int, take: Callable[[Path, Parcel], None]) -> None:
        self.chunks = enumerate(chunks)
        self.most_open = most_open
        self.take = take
        self.sources: dict[int, Path] = {}
        """Of the chunks that are dealt and not taken yet."""
        self.waiting: dict[int, Parcel] = {}
        self.next = 0

    def answer(self, _name: str, message: object) -> object:
        if isinstance(message, Done):
            self.waiting[message.number] = message.parcel
            while self.next in self.waiting:
                self.take(self.sources.pop(self.next), self.waiting.pop(self.next))
                self.next += 1
            return None
        if len(self.sources) >= self.most_open:
            return LATER
        dealt = next(self.chunks, None)
        if dealt is not None:
            self.sources[dealt[0]] = dealt[1].source
        return dealt


def work(channel: Channel, maker: Maker) -> None:
    """A child's work: chunks until there is none.

    The maker brings its tokenizer along, which loads no torch: reading the target anew would take three times the
    memory and, from a GGUF file, nine seconds.
    """
    sent, arrived = maker.side.tokenizer_sha256, tokenizer_facts(maker.side.tokenizer)["tokenizer_sha256"]
    assert arrived == sent, f"the tokenizer changed on its way to a process: {sent}, then {arrived}"
    while True:
        dealt = channel.ask(WANTS_WORK, maker.config.stall_s)
        if dealt is None:
            return
        if dealt == LATER:
            time.sleep(PAUSE_S)
            continue
        number, chunk = dealt  # type: ignore[misc]
        channel.tell(Done(number, packed(maker.make(chunk))))
