"""What another process made, taken in runs, against the same outcomes taken one by one."""

import copy
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.extract.collect import Collector
from dflash_offline.extract.config import PrepareConfig
from dflash_offline.extract.counts import Counts
from dflash_offline.extract.cutting import CutSample
from dflash_offline.extract.lines.inputs import LeftOut
from dflash_offline.extract.parcel import packed
from dflash_offline.extract.rejected import RejectedWriter
from dflash_offline.extract.work import Outcome
from dflash_offline.store.samples import MadeSample, SampleWriter, made_sample

SOURCES = [Path("/x/a.jsonl"), Path("/y/a.jsonl"), Path("/x/b.jsonl")]
Chunks = list[tuple[Path, list[Outcome]]]


@dataclass
class Bar:
    num_lines: int = 0

    def update(self, count: int) -> None:
        self.num_lines += count


def sample_of(draw: random.Random, known: list[MadeSample]) -> CutSample:
    """A new one or one that was there before, whole or cut."""
    if not known or draw.random() < 0.8:
        n = draw.randint(2, draw.choice([3, 40, 300]))
        mask = np.array([draw.random() < 0.7 for _ in range(n)])
        mask[-2:] = True
        known.append(made_sample(np.array(draw.choices(range(50), k=n), dtype="<u4"), mask))
    made = draw.choice(known[-30:])
    return CutSample(made, len(made.ids) + draw.choice([0] * 9 + [5]), int(made.mask.sum()))


def outcome(draw: random.Random, number: int, known: list[MadeSample]) -> Outcome:
    """Most give one whole sample and have nothing else to tell."""
    found = Outcome(number, draw.choice([None, f"id {number}"]), draw.choice([0] * 12 + [2]))
    if draw.random() < 0.06:
        found.fault = LeftOut("no answer", "nothing is there")
        return found
    found.samples = [sample_of(draw, known) for _ in range(draw.choice([1] * 12 + [2, 3]))]
    found.split, found.task = draw.choice(["train", "heldout"]), draw.choice(["", "maths"])
    found.origin = draw.choice(["target greedy", "elsewhere"])
    match draw.randrange(30):
        case 0:
            found.samples_left_out.append((len(found.samples) + 1, LeftOut("too long", "9 tokens")))
        case 1:
            found.turns_left_out.append((1, LeftOut("empty answer", "")))
        case 2:
            found.unread_options.append("tools")
        case 3:
            found.noted["tools_unread"] = 1
    return found


def chunks_of(draw: random.Random) -> Chunks:
    known: list[MadeSample] = []
    chunks: Chunks = []
    for source in SOURCES:
        number = 0
        for _ in range(draw.randint(1, 4)):
            chunk = []
            for _ in range(draw.choice([0, 1, 5, 60])):
                number += draw.randint(1, 3)
                chunk.append(outcome(draw, number, known))
            chunks.append((source, chunk))
    return chunks


def collected(folder: Path, chunks: Chunks, config: PrepareConfig, rows: int, *, in_parcels: bool) -> list[Any]:
    """All that is left of a run: what was raised, counts, places, the bar, the bytes of the files."""
    counts, bar = Counts({}), Bar()
    folder.mkdir()
    try:
        with SampleWriter(folder, rows) as writer, RejectedWriter(folder) as rejected:
            collector = Collector(config, counts, writer, rejected, bar)
            collector.name_sources(SOURCES)
            counts.sources.update(dict.fromkeys(collector.names.values(), 0))
            for source, outcomes in chunks:
                if in_parcels:
                    collector.take_parcel(source, packed(outcomes))
                else:
                    collector.take(source, copy.deepcopy(outcomes))
    except UserError as error:
        return [str(error)]
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return [repr(counts.as_plain()), counts.first_left_out, collector.places, bar.num_lines, files]


@pytest.mark.parametrize("seed", range(24))
def test_runs_are_taken_as_single_outcomes_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Doubles in a parcel, before it and in other sources, kept or dropped; cut samples, surrogates, notes, faults."""
    monkeypatch.setattr("dflash_offline.store.tokens_file.BATCH_SAMPLES", 7)
    monkeypatch.setattr("dflash_offline.store.tokens_file.BATCH_TOKENS", 500)
    monkeypatch.setattr("dflash_offline.store.tokens_file.MAX_BATCHES", 5)
    draw = random.Random(seed)
    chunks, rows = chunks_of(draw), draw.choice([3, 10, 1000])
    config = PrepareConfig(duplicates=("drop", "drop", "keep")[seed % 3], strict=seed % 8 == 7)
    slow = collected(tmp_path / "slow", chunks, config, rows, in_parcels=False)
    fast = collected(tmp_path / "fast", chunks, config, rows, in_parcels=True)
    assert fast == slow
    assert (len(slow) == 1) == config.strict
