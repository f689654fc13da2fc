"""One segment: a Zarr v3 shard object, streamed out sample by sample and read back by position.

The file holds chunks of 64 positions x 1 tap x H values, each followed by its crc32c, and ends
with the index of all chunks and the index's crc32c. zarr-python reads the same bytes; this code is
11-14 times cheaper per byte (2-core Zen 4, zarr 3.1.6). It knows no sample and no plan.
"""

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from .. import UserError
from .codecs import get_codec
from .files import NewFile, flat_bytes, read_all
from .manifest import Manifest
from .size import CHECKSUM_BYTES, CHUNK_POSITIONS, INDEX_ENTRY_BYTES

ARRAY_POSITIONS = 2**40
ABSENT = 2**64 - 1  # offset and length of a chunk that was never written (Zarr v3 sharding)
VALUE_BYTES = 2
NAN_VALUE = 0x7FC0  # fills a sample's last chunk, so that padding read by mistake is loud


@dataclass(frozen=True, slots=True)
class SegmentGeometry:
    """Shape of one segment: positions [positions, taps, hidden] in chunks [chunk, 1, hidden]."""

    positions: int
    taps: int
    hidden: int
    chunk: int = CHUNK_POSITIONS
    codec: str = "raw"

    @property
    def num_chunks(self) -> int:
        """Chunks along the positions."""
        return self.positions // self.chunk

    @property
    def position_bytes(self) -> int:
        return self.hidden * VALUE_BYTES

    @property
    def slot_bytes(self) -> int:
        """A stored chunk and its checksum."""
        return self.chunk * self.position_bytes + CHECKSUM_BYTES

    @property
    def index_bytes(self) -> int:
        """The index and its checksum, the last bytes of a segment."""
        return self.num_chunks * self.taps * INDEX_ENTRY_BYTES + CHECKSUM_BYTES

    def array_json(self) -> dict[str, Any]:
        """The content of the array's `zarr.json`; written once, never changed."""
        codec = get_codec(self.codec)
        index_codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        sharding = {
            "chunk_shape": [self.chunk, 1, self.hidden],
            "codecs": list(codec.inner),
            "index_codecs": index_codecs,
            "index_location": "end",
        }
        shape = [self.positions, self.taps, self.hidden]
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [ARRAY_POSITIONS, self.taps, self.hidden],
            "data_type": codec.zarr_dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": codec.fill_value,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": {},
            "dimension_names": ["position", "tap", "channel"],
        }


def array_geometries(manifest: Manifest) -> dict[str, SegmentGeometry]:
    """The arrays of a store by name: `hidden`, and `last` where the store has it."""
    hidden, positions, codec = manifest.hidden_size, manifest.segment_positions, manifest.codec
    arrays = {"hidden": SegmentGeometry(positions, len(manifest.tap_layers), hidden, codec=codec)}
    if manifest.has_last:
        arrays["last"] = SegmentGeometry(positions, 1, hidden, codec=codec)
    return arrays


def segment_path(store_dir: Path, array: str, segment: int) -> Path:
    return Path(store_dir) / array / f"c.{segment}.0.0"


class SegmentWriter:
    """Writes a segment aside, one sample at a time in any order, and publishes it at the end."""

    def __init__(
        self, path: Path, geometry: SegmentGeometry, *, explain: Callable[[OSError, Path], UserError] | None = None
    ) -> None:
        self.geometry = geometry
        self.file = NewFile(path, explain=explain)
        self.index = np.full((geometry.num_chunks, geometry.taps, 2), ABSENT, dtype="<u8")
        self.padding = np.full((geometry.chunk, geometry.hidden), NAN_VALUE, dtype="<u2")

    def append(self, position: int, planes: np.ndarray) -> int:
        """Writes one sample and returns the crc32c over its chunk checksums.

        position: its first position in the segment, a multiple of the chunk. planes [Lt, n, H]
        u16 (bfloat16 bits); each plane contiguous, n at least 1. Raises ValueError where that is
        not so or the place is taken, and UserError when the disk fails.
        """
        g = self.geometry
        n = planes.shape[1] if planes.ndim == 3 else 0
        first, last = position // g.chunk, -(-(position + n) // g.chunk)
        require_planes(planes, g.taps, n, g.hidden)
        if n < 1 or position % g.chunk or not 0 <= first < last <= g.num_chunks:
            raise ValueError(f"{n} positions from {position} do not fit a segment of {g.positions}")
        if (self.index[first:last] != ABSENT).any():
            raise ValueError(f"positions {position} to {position + n} of {self.file.path.name} are written twice")
        flat = [flat_bytes(plane) for plane in planes]
        pad = flat_bytes(self.padding)[: (last * g.chunk - position - n) * g.position_bytes]
        buffers, checksums, offset = [], [], self.file.size_bytes
        for number in range(first, last):
            begin = (number * g.chunk - position) * g.position_bytes
            for tap, plane in enumerate(flat):
                body = plane[begin : begin + g.chunk * g.position_bytes]
                crc = google_crc32c.value(body)
                buffers.append(body.data)
                if number == last - 1:
                    crc = google_crc32c.extend(crc, pad)
                    buffers.append(pad.data)
                checksums.append(struct.pack("<I", crc))
                buffers.append(memoryview(checksums[-1]))
                self.index[number, tap] = (offset, g.slot_bytes)
                offset += g.slot_bytes
        self.file.write_buffers(buffers)
        return google_crc32c.value(b"".join(checksums))

    def finish(self) -> int:
        """Writes the index, syncs and publishes; returns the bytes of the file."""
        index = self.index.tobytes()
        self.file.write(index + struct.pack("<I", google_crc32c.value(index)))
        return self.file.finish()

    def abort(self) -> None:
        """Removes what was written aside; a published segment stays."""
        self.file.abort()


class SegmentDamage(Exception):
    """A segment file that cannot be trusted: the file, the reason, and where known position and tap."""

    def __init__(self, path: Path, reason: str, *, position: int | None = None, tap: int | None = None) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason
        self.position = position  # first position of the chunk inside the segment
        self.tap = tap  # number of the tap in the store's list


class SegmentReader:
    """One open segment with its checked index; reads slices of positions into the caller's planes."""

    def __init__(self, path: Path, geometry: SegmentGeometry, *, file_bytes: int | None = None) -> None:
        self.path = path
        self.geometry = geometry
        try:
            self.fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise SegmentDamage(path, "the file is missing") from error
        try:
            self.index = self.read_index(file_bytes)  # [chunks, Lt, 2] u64: offset, bytes
        except BaseException:
            self.close()
            raise

    def read_index(self, file_bytes: int | None) -> np.ndarray:
        size, g = os.fstat(self.fd).st_size, self.geometry
        if file_bytes is not None and size != file_bytes:
            raise SegmentDamage(self.path, f"it has {size} bytes, its commit says {file_bytes}")
        data = os.pread(self.fd, g.index_bytes, size - g.index_bytes) if size >= g.index_bytes else b""
        if len(data) != g.index_bytes:
            raise SegmentDamage(self.path, f"it has {size} bytes, too few for an index of {g.index_bytes}")
        if struct.pack("<I", google_crc32c.value(data[:-CHECKSUM_BYTES])) != data[-CHECKSUM_BYTES:]:
            raise SegmentDamage(self.path, "its index does not match its checksum")
        return np.frombuffer(data, dtype="<u8", count=g.num_chunks * g.taps * 2).reshape(g.num_chunks, g.taps, 2)

    def read(
        self,
        position: int,
        n: int,
        out: np.ndarray,
        *,
        taps: Sequence[int] | None = None,
        start: int = 0,
        verify: bool = True,
    ) -> np.ndarray:
        """Fills `out` with positions [position + start, position + start + n) of the wanted taps.

        out [Lt', n, H] u16, each plane contiguous, owned by the caller; taps: numbers into the
        store's list, in the order of `out`. Returns the stored checksums [chunks, Lt'] u32 of the
        touched chunks. Raises SegmentDamage for a chunk that is absent, cut off or changed.
        """
        g = self.geometry
        wanted = list(range(g.taps)) if taps is None else [int(tap) for tap in taps]
        require_planes(out, len(wanted), n, g.hidden)
        if len(set(wanted)) != len(wanted) or not all(0 <= tap < g.taps for tap in wanted):
            raise ValueError(f"taps {wanted} are not distinct numbers in 0..{g.taps - 1}")
        begin, end = position + start, position + start + n
        if n < 1 or start < 0 or not 0 <= begin < end <= g.positions:
            raise ValueError(f"positions {begin} to {end} are outside a segment of {g.positions}")
        cut = Cut(g, begin, end, out)
        entries = self.index[cut.first : cut.last][:, wanted]  # [chunks, Lt', 2]
        self.require_present(entries, cut, wanted)
        order = np.argsort(entries[..., 0], axis=None, kind="stable")
        offsets = entries[..., 0].reshape(-1)[order].astype(np.int64)
        breaks = np.flatnonzero(np.diff(offsets) != g.slot_bytes) + 1
        for run, offset in zip(np.split(order, breaks), offsets[np.concatenate([[0], breaks])]):
            buffers = [buffer for number in run for buffer in cut.buffers(*divmod(int(number), len(wanted)))]
            if not read_all(self.fd, buffers, int(offset)):
                number, column = divmod(int(run[0]), len(wanted))
                raise self.damage("the file ends inside a chunk", cut, number, wanted[column])
        if verify:
            for number, column in np.ndindex(cut.checksums.shape):
                if cut.crc32c(number, column) != cut.checksums[number, column]:
                    raise self.damage("a chunk does not match its checksum", cut, number, wanted[column])
        return cut.checksums

    def require_present(self, entries: np.ndarray, cut: "Cut", wanted: list[int]) -> None:
        wrong = np.argwhere(entries[..., 1] != self.geometry.slot_bytes)
        if len(wrong):
            number, column = (int(i) for i in wrong[0])
            is_absent = int(entries[number, column, 1]) == ABSENT
            reason = "a chunk was never written" if is_absent else "a chunk has the wrong length"
            raise self.damage(reason, cut, number, wanted[column])

    def damage(self, reason: str, cut: "Cut", number: int, tap: int) -> SegmentDamage:
        return SegmentDamage(self.path, reason, position=(cut.first + number) * self.geometry.chunk, tap=tap)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Cut:
    """Where the chunks of a slice land: in the caller's planes, and around them in a discard buffer.

    A chunk is always read whole, since its checksum covers it whole. Each tap has a discard buffer
    of its own for the positions before and after the slice.
    """

    def __init__(self, geometry: SegmentGeometry, begin: int, end: int, out: np.ndarray) -> None:
        self.geometry = geometry
        self.first, self.last = begin // geometry.chunk, -(-end // geometry.chunk)
        row = geometry.position_bytes
        self.head = (begin - self.first * geometry.chunk) * row  # bytes before the slice
        self.tail = (self.last * geometry.chunk - end) * row  # bytes after it
        self.planes = [plane.view(np.uint8).reshape(-1) for plane in out]
        self.discard = np.empty((len(out), self.head + self.tail), dtype=np.uint8)
        self.checksums = np.empty((self.last - self.first, len(out)), dtype="<u4")
        self.checksum_bytes = self.checksums.view(np.uint8).reshape(-1)

    def parts(self, number: int, column: int) -> list[np.ndarray]:
        """The byte views [head], body, [tail] that one chunk fills."""
        step = self.geometry.chunk * self.geometry.position_bytes
        body = self.planes[column][max(0, number * step - self.head) : (number + 1) * step - self.head]
        parts = [body]
        if number == 0 and self.head:
            parts.insert(0, self.discard[column, : self.head])
        if number == self.last - self.first - 1 and self.tail:
            parts.append(self.discard[column, self.head :])
        return parts

    def buffers(self, number: int, column: int) -> list[memoryview]:
        """Buffers of one stored chunk: its parts, then its checksum."""
        place = (number * len(self.planes) + column) * CHECKSUM_BYTES
        return [
            *(part.data for part in self.parts(number, column)),
            self.checksum_bytes[place : place + CHECKSUM_BYTES].data,
        ]

    def crc32c(self, number: int, column: int) -> int:
        crc = 0
        for part in self.parts(number, column):
            crc = google_crc32c.extend(crc, flat_bytes(part))
        return crc


def require_planes(planes: np.ndarray, taps: int, n: int, hidden: int) -> None:
    """Raises ValueError unless planes are [taps, n, hidden] u16, each of them contiguous."""
    if planes.shape != (taps, n, hidden) or planes.dtype != np.uint16:
        raise ValueError(f"planes are {planes.dtype} {planes.shape}, expected uint16 {(taps, n, hidden)}")
    if not all(plane.flags.c_contiguous for plane in planes):
        raise ValueError("every plane [n, H] must be contiguous")
