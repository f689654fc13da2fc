"""Reads slices of positions out of one segment into the caller's memory, each chunk against its checksum.

A slice is read in pieces, runs of chunks that lie next to each other in the file, small enough to be still in the
processor's cache when their checksum is computed. Pieces know nothing of each other, so threads may share them.
Knows no sample and no plan.
"""

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .buffers import read_all
from .checksum import crc32c
from .geometry import ABSENT, SegmentGeometry, require_planes, require_rows
from .size import CHECKSUM_BYTES
from .slices import BLOSC_HEADER_BYTES, DirectSlice, ScratchSlice, SegmentDamage, Slice


class SegmentReader:
    """One open segment with its checked index."""

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
        self.data_bytes = size - g.index_bytes
        buffer = bytearray(g.index_bytes)
        if self.data_bytes < 0 or not read_all(self.fd, [memoryview(buffer)], self.data_bytes):
            raise SegmentDamage(self.path, f"it has {size} bytes, too few for an index of {g.index_bytes}")
        data = bytes(buffer)
        if struct.pack("<I", crc32c(data[:-CHECKSUM_BYTES])) != data[-CHECKSUM_BYTES:]:
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
        """Fills `out` with the values at positions [position + start, position + start + n) of the wanted taps.

        out [Lt', n, H] u16 (bfloat16 bits), each plane contiguous, owned by the caller; taps: numbers into the
        store's list, in the order of `out`. Returns the stored checksums [chunks, Lt'] u32 of the
        touched chunks. Raises SegmentDamage for a chunk that is absent, cut off or changed. Without `verify`
        checksums are not compared, but those of compressed chunks always are: damaged ones must not be unpacked.
        """
        return self.slice(position, n, out, taps, start, verify=verify, encoded=False).read()

    def read_rows(
        self,
        position: int,
        n: int,
        out: np.ndarray,
        *,
        taps: Sequence[int] | None = None,
        start: int = 0,
        verify: bool = True,
    ) -> np.ndarray:
        """As `read`, but fills out [Lt', n, row_bytes] u8 with rows as the codec encodes them."""
        return self.slice(position, n, out, taps, start, verify=verify, encoded=True).read()

    def slice(
        self,
        position: int,
        n: int,
        out: np.ndarray,
        taps: Sequence[int] | None,
        start: int,
        *,
        verify: bool,
        encoded: bool,
    ) -> Slice:
        """The slice, checked against the index, before any of it is read; see `read`."""
        g = self.geometry
        wanted = list(range(g.taps)) if taps is None else [int(tap) for tap in taps]
        if len(set(wanted)) != len(wanted) or not all(0 <= tap < g.taps for tap in wanted):
            raise ValueError(f"taps {wanted} are not distinct numbers in 0..{g.taps - 1}")
        if encoded:
            require_rows(out, len(wanted), n, g.row_bytes)
        else:
            require_planes(out, len(wanted), n, g.hidden)
        begin, end = position + start, position + start + n
        if n < 1 or start < 0 or not 0 <= begin < end <= g.positions:
            raise ValueError(f"positions {begin} to {end} are outside a segment of {g.positions}")
        is_direct = not g.codec.is_compressed and (encoded or g.codec.is_lossless)
        kind = DirectSlice if is_direct else ScratchSlice
        entries = self.index[begin // g.chunk : -(-end // g.chunk)]
        if taps is not None:
            entries = entries[:, wanted]  # [chunks, Lt', 2]
        made = kind(self, begin, end, wanted, entries, out, verify=verify, encoded=encoded)
        self.require_present(made, entries)
        return made

    def require_present(self, wanted: Slice, entries: np.ndarray) -> None:
        """Raises SegmentDamage for the first chunk that was not written, or whose entry cannot be."""
        offsets, sizes, slot_bytes = entries[..., 0], entries[..., 1], self.geometry.slot_bytes
        if self.geometry.codec.is_compressed:
            is_length = (sizes > BLOSC_HEADER_BYTES + CHECKSUM_BYTES) & (sizes <= slot_bytes + BLOSC_HEADER_BYTES)
        else:
            is_length = sizes == slot_bytes
        is_inside = (offsets <= self.data_bytes) & (sizes <= self.data_bytes) & (offsets + sizes <= self.data_bytes)
        if is_length.all() and is_inside.all():
            return
        number, column = (int(i) for i in np.argwhere(~(is_length & is_inside))[0])
        reason = "the file ends inside a chunk" if is_length[number, column] else "a chunk has the wrong length"
        if int(sizes[number, column]) == ABSENT:
            reason = "a chunk was never written"
        raise wanted.damage(reason, number * entries.shape[1] + column)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
