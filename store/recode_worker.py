"""One worker of `recode`: writes the segments it is given, a sample in memory at a time.

Runs in a process of its own under `watch`. Where two codecs store the same rows, rows are copied; else they are
decoded and encoded in short slices. The bytes do not depend on who does a segment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import UserError, __version__
from ..watch import Channel
from .codecs import Codec
from .geometry import SegmentGeometry, array_geometries
from .manifest import read_manifest
from .reader import StoreReader
from .state_error import StateErrors, as_metadata
from .writer import SegmentSink, StoreWriter

SLICE_POSITIONS = 64  # decoded at once; numpy takes some forty bytes for each of their values


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a worker is told at its start: folders, and how the sample ids of each store were moved."""

    store_dir: str
    sources: tuple[str, ...]
    first_ids: tuple[int, ...]
    stall_s: float


@dataclass(frozen=True, slots=True)
class WantsSegment:
    """Asked for each segment; the reply is its number, or None when there is no more."""


@dataclass(frozen=True, slots=True)
class Recoded:
    """Told after each sample: positions on their way to the disk, not yet committed."""

    num_positions: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Told when a segment is durable."""

    segment: int


def work(channel: Channel, order: Order) -> None:
    """A worker's life. Raises UserError for a damaged or exchanged store, or a full disk."""
    recoder = Recoder(order, channel)
    while (segment := channel.ask(WantsSegment(), order.stall_s)) is not None:
        assert isinstance(segment, int)
        recoder.write(segment)
        channel.tell(Committed(segment))


class Recoder:
    """Fills segments of the new store from the stores it is made of."""

    def __init__(self, order: Order, channel: Channel) -> None:
        store_dir = Path(order.store_dir)
        self.channel = channel
        self.manifest = read_manifest(store_dir)
        self.writer = StoreWriter(store_dir, self.manifest)
        self.arrays = array_geometries(self.manifest)
        origins = self.manifest.data["recoded"]["sources"].values()
        self.sources = [
            SourceReader(Path(path), origin, first_id, self.manifest.tap_layers)
            for path, origin, first_id in zip(order.sources, origins, order.first_ids)
        ]
        self.first_ids = np.array(order.first_ids)

    def write(self, segment: int) -> None:
        """Writes and commits one segment."""
        sink, errors = self.writer.open(segment), StateErrors()
        try:
            for sample_id, position, n in zip(*(sink.plan[name].tolist() for name in ("sample_id", "position", "n"))):
                self.copy(sink, sample_id, position, n, errors)
                self.channel.tell(Recoded(n))
        except BaseException:
            sink.abort()
            raise
        sink.commit({"written_by": f"dflash-offline {__version__}", **as_metadata(errors)})

    def copy(self, sink: SegmentSink, sample_id: int, position: int, n: int, errors: StateErrors) -> None:
        """Writes one sample."""
        source = self.sources[int(np.searchsorted(self.first_ids, sample_id, side="right")) - 1]
        i = source.find(sample_id)
        rows = {array: self.recoded(source, array, i, n, errors) for array in self.arrays}
        last = rows["last"][0] if "last" in rows else None
        sink.append(sample_id, position, rows["hidden"], last, encoded=True)

    def recoded(self, source: "SourceReader", array: str, i: int, n: int, errors: StateErrors) -> np.ndarray:
        """Rows [Lt, n, row_bytes] u8 of sample i as the new store has them.

        A smaller window leaves out the first ones: the last recorded token is always the last eligible anchor.
        """
        rows, geometry = source.read(array, i), self.arrays[array]
        rows = rows[:, rows.shape[1] - n :]
        old, new = source.reader.geometries[array].codec, geometry.codec
        return rows if has_same_rows(old, new) else transcoded(rows, old, geometry, errors)


class SourceReader:
    """One store that is read, found by the sample ids of the new one.

    `origin` is what the new store's manifest says of it: its plan, segments and snapshot.
    """

    def __init__(self, store_dir: Path, origin: Mapping[str, Any], first_id: int, tap_layers: tuple[int, ...]) -> None:
        self.reader = StoreReader(store_dir, partial=True)
        self.require_same("plan", self.reader.manifest.plan_sha256, origin["plan_sha256"])
        self.require_same("snapshot", self.reader.snapshot_in(origin["segments"]), origin["snapshot"])
        self.taps = [self.reader.manifest.tap_layers.index(layer) for layer in tap_layers]
        ids = self.reader.samples.sample_id + first_id
        self.order = np.argsort(ids)
        self.ids = ids[self.order]

    def require_same(self, name: str, found: str, expected: str) -> None:
        if found != expected:
            raise UserError(
                f"{str(self.reader.store_dir)!r} is another store now: {name} {found}",
                f"{name} {expected}, as when this recode started",
                "bring the store back, then give the same command again",
            )

    def find(self, sample_id: int) -> int:
        """The number of a sample in the reader."""
        place = int(np.searchsorted(self.ids, sample_id))
        if place == len(self.ids) or self.ids[place] != sample_id:
            raise UserError(
                f"{str(self.reader.store_dir)!r} has lost sample {sample_id} of the new store",
                "the samples that were there when it started",
                "run the same extract again to complete that store, then give the same command again",
            )
        return int(self.order[place])

    def read(self, array: str, i: int) -> np.ndarray:
        """Rows [Lt', n, row_bytes] u8 of sample i as stored: the wanted taps, or the last state.

        All taps are read, because only all of them together are compared with the commit.
        """
        geometry, n = self.reader.geometries[array], int(self.reader.samples.n[i])
        rows = np.empty((geometry.taps, n, geometry.row_bytes), dtype=np.uint8)
        self.reader.read_rows(i, rows, array=array)
        is_whole = array == "last" or self.taps == list(range(geometry.taps))
        return rows if is_whole else rows[self.taps]


def has_same_rows(old: Codec, new: Codec) -> bool:
    """True where both store the same bytes of a row, before compression."""
    return old.name == new.name or (old.is_lossless and new.is_lossless)


def transcoded(rows: np.ndarray, old: Codec, geometry: SegmentGeometry, errors: StateErrors) -> np.ndarray:
    """Rows [Lt, n, row_bytes] u8 of codec `old` as rows of the geometry's; what a lossy one changes is measured."""
    new = geometry.codec
    out = np.empty((*rows.shape[:2], geometry.row_bytes), dtype=np.uint8)
    for start in range(0, rows.shape[1], SLICE_POSITIONS):
        part = rows[:, start : start + SLICE_POSITIONS]
        before = np.empty((*part.shape[:2], geometry.hidden), dtype=np.uint16)  # [Lt, <=64, H] bfloat16 bits
        old.decode(part, before)
        encoded = new.encode(before)
        out[:, start : start + SLICE_POSITIONS] = encoded
        if not new.is_lossless:
            after = np.empty_like(before)
            new.decode(encoded, after)
            errors.add(before, after)
    return out
