"""Stores to measure: lengths as of conversations, and states that follow from a few numbers.

The states of sample i are a window of one block of noise, so that they cost nothing to make while something is
measured, and two samples never hold the same.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from dflash_offline.extract.plan import Plan, make_plan
from dflash_offline.store.codecs import get_codec
from dflash_offline.store.create import create_store
from dflash_offline.store.manifest import Manifest
from dflash_offline.store.ring import Ring
from dflash_offline.store.samples import SampleTable, SampleWriter
from dflash_offline.store.size import bytes_per_position
from dflash_offline.store.writer import StoreWriter

HIDDEN, TAPS = 5120, 5
LONGEST = 8192
SHIFTS = 1021  # windows of the noise begin at this many places
FINITE = 0xBFFF  # without the highest bit of its exponent every bfloat16 is finite


def drawn_lengths(total: int, median: float, shortest: int) -> np.ndarray:
    """Lognormal lengths, sigma 0.8, up to LONGEST, until they sum to `total` tokens."""
    drawn = np.random.default_rng(0).lognormal(np.log(median), 0.8, size=10_000)
    lengths = np.clip(drawn, shortest, LONGEST).astype(int)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), total)) + 1]


class Noise:
    """States of any sample, out of one block in the memory that extraction has them in: a ring."""

    def __init__(self, *, hidden: int | None = None, taps: int | None = None) -> None:
        shape = (taps or TAPS, LONGEST + SHIFTS, hidden or HIDDEN)
        self.ring = Ring.create(int(np.prod(shape)) * 2, 1)
        self.bytes = self.ring.slot(0)
        self.planes = self.bytes.view(np.uint16).reshape(shape)
        draw = np.random.default_rng(1)
        for plane in self.planes:
            plane[:] = draw.integers(0, 2**16, size=plane.shape, dtype=np.uint16) & FINITE

    def states(self, sample_id: int, n: int) -> np.ndarray:
        """[taps, n, hidden] u16, a view."""
        first = sample_id * 389 % SHIFTS
        return self.planes[:, first : first + n]

    def encoder(self, codec: str) -> Callable[[int, int], np.ndarray]:
        """Like `states`, but rows [taps, n, row_bytes] u8 of a codec; all are encoded now, and once."""
        rows = np.stack([get_codec(codec).encode(plane[None])[0] for plane in self.planes])

        def encoded(sample_id: int, n: int) -> np.ndarray:
            first = sample_id * 389 % SHIFTS
            return rows[:, first : first + n]

        return encoded


def write_samples(folder: Path, lengths: np.ndarray, *, vocabulary: int = 150_000) -> SampleTable:
    """Samples of random ids with that many recorded positions."""
    draw = np.random.default_rng(2)
    with SampleWriter(folder) as writer:
        for line, n in enumerate(lengths.tolist()):
            ids = draw.integers(0, vocabulary, n + 1)  # the last token is no anchor
            writer.add(ids, np.ones(n + 1), split="train", task="", source="", source_line=line)
    return SampleTable(folder)


def manifest_of(
    plan: Plan, hidden: int, taps: tuple[int, ...], codec: str, target: dict[str, Any] | None = None
) -> Manifest:
    return Manifest(
        target=target or {"name": "bench"},
        data={},
        tap_layers=taps,
        hidden_size=hidden,
        codec=codec,
        segment_positions=plan.segment_positions,
        num_segments=plan.num_segments,
        num_samples=plan.num_samples,
        num_positions=plan.num_positions,
        plan_sha256=plan.sha256,
    )


def empty_store(
    store_dir: Path,
    samples: SampleTable,
    *,
    hidden: int = HIDDEN,
    taps: int = TAPS,
    codec: str = "raw",
    target: dict[str, Any] | None = None,
) -> StoreWriter:
    """A store of these samples, nothing of it written."""
    plan = make_plan(samples, bytes_per_position=bytes_per_position(taps, hidden, codec=codec))
    manifest = manifest_of(plan, hidden, tuple(range(taps)), codec, target)
    create_store(store_dir, manifest, plan.table, samples.folder)
    return StoreWriter(store_dir, manifest)


def fill(writer: StoreWriter, states: Callable[[int, int], np.ndarray], *, encoded: bool = False) -> None:
    """Writes and commits every segment; states(sample_id, n) gives the planes of a sample, or its `encoded` rows."""
    for segment in range(writer.manifest.num_segments):
        sink = writer.open(segment)
        for sample_id, position, n in zip(*(sink.plan[name].tolist() for name in ("sample_id", "position", "n"))):
            sink.append(sample_id, position, states(sample_id, n), encoded=encoded)
        sink.commit({})


def folder_bytes(folder: Path) -> int:
    """Bytes of every file under a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
