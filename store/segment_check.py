"""Checks the files of one committed segment: every chunk, every value, every sample, and names each fault.

A damaged chunk hides nothing after it: where a slice cannot be read it is read again chunk by chunk,
tap by tap. Runs in a thread; what it calls on large arrays (preadv, crc32c, numpy) lets others run.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .. import system_reason
from .checksum import crc32c
from .geometry import ABSENT, array_geometries, segment_path
from .index import STATUS_FAILED, STATUS_NON_FINITE, STATUS_OK, commit_path
from .manifest import Manifest
from .segment_reader import SegmentDamage, SegmentReader
from .values import Looks, odd_rows

SLICE_BYTES = 2**23  # encoded rows read at once; small enough for the caches
SHOWN_PLACES = 6

Columns = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: what and where, the segment that extract would redo, or else what to do."""

    text: str
    segment: int | None = None
    advice: str = ""

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True)
class Seen:
    """What one sample in one array turned out to be."""

    damage: dict[tuple[int, str], list[int]] = field(default_factory=dict)  # (tap, reason) -> first positions
    looks: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # look -> (tap, position) of each state
    checksums: list[np.ndarray] = field(default_factory=list)  # each [chunks, Lt] u32

    def note(self, looks: Looks, start: int, tap: int = 0) -> None:
        """Takes down odd states of a slice that begins at position `start` and at tap `tap`."""
        for look, found in looks.items():
            places = [(tap + int(row), start + int(column)) for row, column in np.argwhere(found)]
            self.looks.setdefault(look, []).extend(places)


class SegmentCheck:
    """One pass over the files of a segment; `run` gives its faults and tells `progress` the stored bytes it read.

    `rows` are the segment's rows of its commit, `sizes` the bytes of its files as the commit has them.
    """

    def __init__(
        self,
        store_dir: Path,
        manifest: Manifest,
        segment: int,
        rows: Columns,
        sizes: tuple[int, ...],
        progress: Callable[[int], object],
    ) -> None:
        self.store_dir = store_dir
        self.manifest = manifest
        self.arrays = array_geometries(manifest)
        self.segment = segment
        self.rows = rows
        self.sizes = dict(zip(self.arrays, sizes))
        self.progress = progress
        self.readers: dict[str, SegmentReader] = {}
        self.buffers: dict[str, np.ndarray] = {}
        self.faults: list[Fault] = []

    def run(self) -> list[Fault]:
        try:
            for array in self.arrays:
                self.open(array)
            for row in range(len(self.rows["sample_id"])):
                self.check_sample(row)
        finally:
            for reader in self.readers.values():
                reader.close()
        return self.faults

    def fault(self, array: str, where: str, text: str) -> None:
        path = segment_path(self.store_dir, array, self.segment)
        self.faults.append(Fault(f"{path}: segment {self.segment}{where}: {text}", self.segment))

    def open(self, array: str) -> None:
        """Opens one file and checks its index against the samples; without a sound index no chunk can be read."""
        path, geometry = segment_path(self.store_dir, array, self.segment), self.arrays[array]
        samples = f", all its {len(self.rows['sample_id'])} samples"
        try:
            reader = SegmentReader(path, geometry, file_bytes=self.sizes.get(array, -1))
        except SegmentDamage as error:
            self.fault(array, samples, error.reason)
            self.progress(self.sizes.get(array, 0))
            return
        except OSError as error:
            self.fault(array, samples, f"it cannot be read: {system_reason(error)}")
            self.progress(self.sizes.get(array, 0))
            return
        self.readers[array] = reader
        slice_positions = max(geometry.chunk, SLICE_BYTES // (geometry.taps * geometry.row_bytes) // 64 * 64)
        self.buffers[array] = np.empty(geometry.taps * slice_positions * geometry.row_bytes, dtype=np.uint8)
        self.check_index(array, reader)
        self.progress(geometry.index_bytes)

    def check_index(self, array: str, reader: SegmentReader) -> None:
        """Chunks lie where samples are, nowhere else, and together they fill the file up to its index."""
        chunk = reader.geometry.chunk
        is_sample = np.zeros(reader.geometry.num_chunks, dtype=bool)
        for position, n, status in zip(*(self.rows[name].tolist() for name in ("position", "n", "status"))):
            is_sample[position // chunk : -(-(position + n) // chunk)] = status != STATUS_FAILED
        is_there = reader.index[..., 1] != ABSENT  # [chunks, Lt]
        foreign = np.argwhere(is_there & ~is_sample[:, None])
        if len(foreign):
            position = int(foreign[0, 0]) * chunk
            self.fault(array, "", f"{len(foreign)} chunks belong to no recorded sample, first at position {position}")
        entries = reader.index[is_there]  # [K, 2]
        entries = entries[np.argsort(entries[:, 0])]
        ends = np.cumsum(entries[:, 1])
        starts = np.concatenate([[0], ends]).astype(np.uint64)
        is_gapless = np.array_equal(entries[:, 0], starts[:-1])
        if not is_gapless or int(starts[-1]) + reader.geometry.index_bytes != self.sizes[array]:
            self.fault(array, "", "its chunks overlap, or leave bytes that belong to none")

    def check_sample(self, row: int) -> None:
        position, n, status = (int(self.rows[name][row]) for name in ("position", "n", "status"))
        where = f", sample {int(self.rows['sample_id'][row])}"
        seen: dict[str, Seen] = {}
        for array, reader in self.readers.items():
            chunk = reader.geometry.chunk
            chunks = reader.index[position // chunk : -(-(position + n) // chunk)]
            if status == STATUS_FAILED:
                if (chunks != ABSENT).any():
                    self.fault(array, where, "committed as failed, but holds states")
                continue
            seen[array] = self.read(array, position, n)
            self.report(array, row, where, seen[array])
            self.progress(int(chunks[..., 1][chunks[..., 1] != ABSENT].sum()))
        is_whole = len(seen) == len(self.arrays) and not any(found.damage for found in seen.values())
        if status == STATUS_NON_FINITE and is_whole and not any("non-finite" in found.looks for found in seen.values()):
            self.fault("hidden", where, "committed as non-finite, but every value is finite")

    def read(self, array: str, position: int, n: int) -> Seen:
        """Reads one sample slice by slice; a slice that cannot be read whole, chunk by chunk."""
        reader, buffer, seen = self.readers[array], self.buffers[array], Seen()
        geometry = reader.geometry
        step = len(buffer) // (geometry.taps * geometry.row_bytes)
        for start in range(0, n, step):
            count = min(step, n - start)
            out = buffer[: geometry.taps * count * geometry.row_bytes].reshape(geometry.taps, count, -1)
            try:
                stored = reader.read_rows(position, count, out, start=start)
            except (SegmentDamage, OSError):
                self.read_chunks(reader, position, start, count, seen)
                continue
            seen.checksums.append(stored)
            seen.note(odd_rows(out, geometry.codec, geometry.hidden), start)
        return seen

    def read_chunks(self, reader: SegmentReader, position: int, start: int, count: int, seen: Seen) -> None:
        geometry = reader.geometry
        for first in range(start, start + count, geometry.chunk):
            for tap in range(geometry.taps):
                n = min(geometry.chunk, start + count - first)
                out = np.empty((1, n, geometry.row_bytes), dtype=np.uint8)
                try:
                    reader.read_rows(position, n, out, taps=[tap], start=first)
                except SegmentDamage as error:
                    seen.damage.setdefault((tap, error.reason), []).append(first)
                except OSError as error:
                    reason = f"it cannot be read: {system_reason(error)}"
                    seen.damage.setdefault((tap, reason), []).append(first)
                else:
                    seen.note(odd_rows(out, geometry.codec, geometry.hidden), first, tap)

    def report(self, array: str, row: int, where: str, seen: Seen) -> None:
        """Turns what was seen of one sample into faults: damage by tap, the commit's checksum, odd states."""
        for (tap, reason), places in sorted(seen.damage.items()):
            self.fault(
                array, f"{where}, tap {self.tap_name(array, tap)}", f"{reason}, from its positions {shown(places)}"
            )
        is_ok = int(self.rows["status"][row]) == STATUS_OK
        for look, places in seen.looks.items():
            if look == "malformed" or is_ok:
                taps = ", ".join(self.tap_name(array, tap) for tap in sorted({tap for tap, _ in places}))
                positions = shown(sorted({position for _, position in places}))
                self.fault(
                    array, f"{where}, tap {taps}", f"{len(places)} states are {look}, at its positions {positions}"
                )
        if seen.damage:
            return
        checksums = np.concatenate(seen.checksums)  # [chunks, Lt]
        committed = self.rows["crc32c" if array == "hidden" else "last_crc32c"][row]
        if crc32c(checksums) != committed:
            commit = commit_path(self.store_dir, self.segment)
            self.fault(array, where, f"its states are not those of its commit {commit}")
        copies = [(a, b) for b in range(checksums.shape[1]) for a in range(b) if is_copy(checksums, a, b)]
        for a, b in copies if is_ok else []:
            names = f"{self.tap_name(array, a)} and {self.tap_name(array, b)}"
            self.fault(array, where, f"taps {names} are identical")

    def tap_name(self, array: str, tap: int) -> str:
        return "last" if array == "last" else str(self.manifest.tap_layers[tap])


def is_copy(checksums: np.ndarray, a: int, b: int) -> bool:
    return np.array_equal(checksums[:, a], checksums[:, b])


def shown(places: list[int]) -> str:
    """The first few places, and how many there are."""
    text = ", ".join(map(str, places[:SHOWN_PLACES]))
    return text if len(places) <= SHOWN_PLACES else f"{text} and {len(places) - SHOWN_PLACES} more"
