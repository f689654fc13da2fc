"""Kills four to six writers of one store at random moments, again and again, and checks what they leave.

Run as a program of its own, `killed_writers.py FOLDER KILLS SEED CODEC`, since it forks. Starts another store when
one is complete before enough writers were killed. Prints one JSON line: kills, rounds, stores.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import small_store as small
from dflash_offline.store.files import remove_temporaries
from dflash_offline.store.index import committed_segments
from dflash_offline.store.reader import StoreReader

NUM_SAMPLES = 160
LIFE_S = 0.06  # a writer lives at most so long: about the time of ten segments


class Lab:
    """One plan, and what a store of it looks like when nobody was killed."""

    def __init__(self, folder: Path, codec: str) -> None:
        self.folder = folder
        self.plan = small.make_plan(small.make_samples(folder / "data", NUM_SAMPLES))
        self.manifest = small.make_manifest(self.plan, codec=codec)
        self.segments = range(self.manifest.num_segments)
        self.start(folder / "whole")
        small.fill_segments(small.StoreWriter(folder / "whole", self.manifest), self.segments)
        self.expected = small.tree(folder / "whole")

    def start(self, store: Path) -> None:
        """What a launcher does before its writers: completes the layout, cleans up."""
        small.create_store(store, self.manifest, self.plan, self.folder / "data")
        remove_temporaries(store, self.segments)
        left = [str(path) for path in store.rglob("*.tmp.*")]
        assert not left, f"temporaries are left: {left}"

    def fork(self, store: Path, world: int) -> list[int]:
        """Writers of every world-th missing segment; returns their process ids."""
        missing = sorted(set(self.segments) - committed_segments(store))
        writers = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                try:
                    small.fill_segments(small.StoreWriter(store, self.manifest), missing[rank::world])
                except BaseException as error:
                    print(f"writer {rank} of {world}: {type(error).__name__}: {error}", file=sys.stderr)
                    os._exit(1)
                os._exit(0)
            writers.append(child)
        return writers

    def strike(self, store: Path, world: int, draw: random.Random) -> int:
        """One start of `world` writers, each killed at its own moment; how many were still at work then."""
        self.start(store)
        moments = sorted((draw.uniform(0.0, LIFE_S), rank) for rank in range(world))
        writers = self.fork(store, world)
        begin, kills = time.monotonic(), 0
        for moment, rank in moments:
            time.sleep(max(0.0, begin + moment - time.monotonic()))
            os.kill(writers[rank], signal.SIGKILL)
        for writer in writers:
            code = os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1])
            assert code in (0, -signal.SIGKILL), f"a writer ended with {code}"
            kills += code != 0
        return kills

    def check(self, store: Path) -> None:
        """Every sample that the store claims is there once and bit for bit."""
        if not committed_segments(store):
            return
        with StoreReader(store, partial=True) as reader, StoreReader(self.folder / "whole") as whole:
            numbers = {int(sample_id): i for i, sample_id in enumerate(whole.samples.sample_id)}
            ids = reader.samples.sample_id.tolist()
            assert len(set(ids)) == len(ids)
            for i, sample_id in enumerate(ids):
                assert np.array_equal(states(reader, i), states(whole, numbers[sample_id])), f"sample {sample_id}"


def states(reader: StoreReader, i: int) -> np.ndarray:
    out = np.empty((len(small.TAPS), int(reader.samples.n[i]), small.HIDDEN), dtype=np.uint16)
    reader.read(i, out)
    return out


def main(folder: str, kills: str, seed: str, codec: str) -> None:
    lab, draw = Lab(Path(folder), codec), random.Random(int(seed))
    counts: dict[str, Any] = {"kills": 0, "rounds": 0, "stores": 0}
    while counts["kills"] < int(kills):
        store = lab.folder / f"store-{counts['stores']}"
        while counts["kills"] < int(kills) and not (
            store.exists() and len(committed_segments(store)) == len(lab.segments)
        ):
            counts["kills"] += lab.strike(store, draw.randint(4, 6), draw)
            counts["rounds"] += 1
            lab.check(store)
        lab.start(store)
        codes = [os.waitpid(writer, 0)[1] for writer in lab.fork(store, 5)]
        assert codes == [0] * 5
        lab.check(store)
        found = small.tree(store)
        assert found == lab.expected, sorted(
            name for name in {*found, *lab.expected} if found.get(name) != lab.expected.get(name)
        )
        shutil.rmtree(store)
        counts["stores"] += 1
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
