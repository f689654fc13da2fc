"""`compile`: a store of compiled layers holds the states of the plain ones, and the shapes are counted."""

from collections.abc import Callable
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.dealing import Compiled
from dflash_offline.extract.launch import Dealer, report
from dflash_offline.extract.recorder import Recorder
from dflash_offline.extract.survey import survey
from dflash_offline.extract.targets.compiled import CompiledLayers, edges_up_to
from dflash_offline.extract.targets.hf import load_target
from dflash_offline.extract.writing import Entry, Room, SegmentFiller
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.writer import create_store
from dflash_offline.watch import Channel

STEP = 2.0**-7  # two units in the last place of bfloat16, relative: other shapes round differently


class Inline:
    def __init__(self, filler: SegmentFiller) -> None:
        self.filler = filler

    def room(self, shape: tuple[int, ...]) -> Room:
        return Room(torch.empty(shape, dtype=torch.uint8))

    def put(self, room: Room, entries: tuple[Entry, ...]) -> None:
        self.filler.write(room.rows.numpy(), entries)


def states_of(store: Path) -> list[np.ndarray]:
    reader, found = StoreReader(store, partial=True), []
    for i in range(len(reader)):
        shape = (len(reader.manifest.tap_layers), int(reader.samples.n[i]), reader.manifest.hidden_size)
        bits = np.empty(shape, np.uint16)
        reader.read(i, bits)
        found.append((bits.astype(np.uint32) << 16).view(np.float32))
    return found


def test_compiled_layers_record_the_plain_states_in_counted_shapes(
    tmp_path: Path, data: Path, whole_store: Path, make_config: Callable[..., ExtractConfig]
) -> None:
    torch._dynamo.reset()
    found = survey(make_config(data, tmp_path / "store", compile=True))
    create_store(found.store_dir, found.manifest, found.plan.table, data)
    dealer, target = Dealer(found, set()), load_target(found.facts.name)
    target.__dict__["compiled"] = CompiledLayers(target.decoder, backend="eager")
    ours, theirs = Pipe()
    recorder = Recorder(Channel(theirs, "here"), dealer.order("cpu"), found.manifest, target)
    filler = SegmentFiller(found.store_dir, found.manifest, lambda _: None)
    told: list[Any] = []
    for group in dealer.groups:
        recorder.record(group, Inline(filler))
        while ours.poll():
            told.append(ours.recv()[1])
    counted = [message.num_shapes for message in told if isinstance(message, Compiled)]
    assert counted == list(range(1, len(target.compiled.shapes) + 1))
    assert 1 < len(counted) <= len(edges_up_to(150))
    assert all(rows * edge <= 1.25 * 600 for rows, edge in target.compiled.shapes)
    for got, expected in zip(states_of(tmp_path / "store"), states_of(whole_store), strict=True):
        scale = np.maximum(np.abs(expected), 0.01 * np.abs(expected).max(-1, keepdims=True))
        assert (np.abs(got - expected) / scale).max() < STEP
    for message in told:
        if isinstance(message, Compiled):
            dealer.answer("shard 0 (cpu)", message)
    assert f"compiled   for {len(counted)} shapes of a batch at most" in report(dealer, 1.0).text()
