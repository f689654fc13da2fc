"""Runs that are compared: the bare forward, one recorder with its writer, and workers in processes of their own."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from dflash_offline.extract.batching import in_turns
from dflash_offline.extract.dealing import Group, Order, WantsGroup
from dflash_offline.extract.launch import Dealer
from dflash_offline.extract.recorder import Recorder
from dflash_offline.extract.soundness import relative_error, run_alone, tolerance
from dflash_offline.extract.survey import Survey
from dflash_offline.extract.targets.hf import HfTarget
from dflash_offline.extract.targets.layers import first_layers
from dflash_offline.extract.writing import WriterProcess
from dflash_offline.store.manifest import read_manifest
from dflash_offline.watch import Channel, Job, run_all

from .targets import make_target

STALL_S = 300.0


@contextmanager
def recorder_of(found: Survey, target: HfTarget) -> Iterator[tuple[Recorder, Dealer, Channel]]:
    """A recorder in this process, as a worker has it; what it tells is dropped."""
    dealer = Dealer(found, set())
    ours, theirs = Pipe()
    Thread(target=drain, args=(ours,), daemon=True).start()
    channel = Channel(theirs, "bench")
    try:
        yield Recorder(channel, dealer.order(found.workers[0]), found.manifest, target), dealer, channel
    finally:
        theirs.close()


def drain(connection: Any) -> None:
    with suppress(EOFError, OSError):
        while True:
            connection.recv()


def finish(target: HfTarget) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def timed(target: HfTarget, run: Callable[[], None]) -> float:
    finish(target)
    started = time.perf_counter()
    run()
    finish(target)
    return time.perf_counter() - started


class Bare:
    """The forwards that recording a store takes, the ids on the device already, nothing caught and nothing kept."""

    def __init__(self, found: Survey, target: HfTarget) -> None:
        self.target, self.depth = target, max(found.manifest.tap_layers) + 1
        with recorder_of(found, target) as (recorder, dealer, _):
            groups = [in_turns(batches_of(recorder, group)) for group in dealer.groups]
            self.batches = [recorder.load(batch)[0] for batches in groups for batch in batches]

    @torch.no_grad()
    def __call__(self) -> None:
        with first_layers(self.target.decoder, self.depth):
            for ids in self.batches:
                self.target.decoder(input_ids=ids, use_cache=False)


def batches_of(recorder: Recorder, group: Group) -> list[np.ndarray]:
    first, last = np.searchsorted(recorder.plan["segment"], [group.segments.start, group.segments.stop])
    return recorder.batches_of(np.arange(first, last))


def error_of_allowed(found: Survey, target: HfTarget) -> float:
    """The largest error of a tap, in its batch against alone, of the sample that a worker's check takes: over what is
    let pass there."""
    taps = found.manifest.tap_layers
    with recorder_of(found, target) as (recorder, dealer, _):
        batches = batches_of(recorder, dealer.groups[0])
        ids, lengths = recorder.load(next((batch for batch in batches if len(batch) > 1), batches[0]))
    row = int(lengths.argmin())
    n = int(lengths[row])
    batched = target.record(ids, lengths, taps)[0][:, row, :n]
    alone = run_alone(target, ids[row, :n], taps, with_head=False).taps
    allowed = [tolerance(target.facts.dtype, layer + 1) for layer in taps]
    return max(relative_error(one, own) / most for one, own, most in zip(batched, alone, allowed))


@contextmanager
def recording(found: Survey, target: HfTarget) -> Iterator[Callable[[], None]]:
    """Inside, a call records the store, by one recorder and its writer, and comes back when everything is committed.

    Start-up and the check before the first segment are done before it.
    """
    with recorder_of(found, target) as (recorder, dealer, channel):
        slot_bytes, device = recorder.largest_batch_bytes(), found.workers[0]
        writer = WriterProcess(channel, found.store_dir, slot_bytes=slot_bytes, device=device, stall_s=STALL_S)
        with writer:
            recorder.check(batches_of(recorder, dealer.groups[0]))

            def run() -> None:
                for group in dealer.groups:
                    recorder.record(group, writer)
                writer.finish()

            yield run


def work(channel: Channel, order: Order, name: str) -> None:
    """A worker as `extract` starts it, with a target that is made instead of loaded."""
    target = make_target(name, order.device)
    manifest = read_manifest(Path(order.store_dir))
    recorder = Recorder(channel, order, manifest, target)
    slot_bytes = recorder.largest_batch_bytes()
    with WriterProcess(
        channel, Path(order.store_dir), slot_bytes=slot_bytes, device=order.device, stall_s=STALL_S
    ) as writer:
        while (group := channel.ask(WantsGroup(), STALL_S)) is not None:
            assert isinstance(group, Group)
            recorder.record(group, writer)
        writer.finish()


class NoBar:
    def update(self, count: int) -> None: ...

    def set_postfix_str(self, text: str, refresh: bool) -> None: ...


def workers_rate(found: Survey, name: str) -> float:
    """Positions a second of all workers from the first batch to the last; a process and a target each."""
    dealer = Dealer(found, set())
    dealer.bar = NoBar()
    jobs = [Job(f"shard {i} ({device})", work, (dealer.order(device), name)) for i, device in enumerate(found.workers)]
    run_all(jobs, stall_s=STALL_S, on_message=dealer.answer)
    return dealer.num_timed / dealer.timed_s
