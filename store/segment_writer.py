"""Streams one segment out, sample by sample, and publishes it whole. It knows no sample and no plan."""

import functools
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from .. import UserError
from . import blosc_frame
from .buffers import flat_bytes
from .checksum import crc32c
from .direct import DirectFile
from .geometry import ABSENT, NAN_VALUE, SegmentGeometry, require_planes, require_rows
from .size import CHECKSUM_BYTES


class SegmentWriter:
    """Writes a segment aside, one sample at a time in any order, and publishes it at the end."""

    def __init__(
        self, path: Path, geometry: SegmentGeometry, *, explain: Callable[[OSError, Path], UserError] | None = None
    ) -> None:
        self.geometry = geometry
        self.codec = geometry.codec
        self.chunk_bytes = geometry.chunk * geometry.row_bytes
        self.padding = padding(geometry)
        self.file = DirectFile(path, explain=explain)
        self.index = np.full((geometry.num_chunks, geometry.taps, 2), ABSENT, dtype="<u8")

    def append(self, position: int, planes: np.ndarray, *, encoded: bool = False) -> int:
        """Writes one sample and returns the crc32c over its chunk checksums.

        position: its first position in the segment, a multiple of the chunk. planes [Lt, n, H]
        u16 (bfloat16 bits), or with `encoded` rows [Lt, n, row_bytes] u8 of the store's codec;
        each plane contiguous, n at least 1. Raises ValueError where that is not so or the place
        is taken, and UserError when the disk fails.
        """
        g = self.geometry
        n = planes.shape[1] if planes.ndim == 3 else 0
        first, last = position // g.chunk, -(-(position + n) // g.chunk)
        if encoded:
            require_rows(planes, g.taps, n, g.row_bytes)
        else:
            require_planes(planes, g.taps, n, g.hidden)
        if n < 1 or position % g.chunk or not 0 <= first < last <= g.num_chunks:
            raise ValueError(f"{n} positions from {position} do not fit a segment of {g.positions}")
        if (self.index[first:last] != ABSENT).any():
            raise ValueError(f"positions {position} to {position + n} of {self.file.path.name} are written twice")
        checksums, entries, offset = [], [], self.file.size_bytes
        with self.file.filling() as filling:
            for begin in range(0, n, g.chunk):
                for plane in planes:
                    crc, size = 0, CHECKSUM_BYTES
                    for part in self.stored(plane[begin : begin + g.chunk], encoded):
                        crc = filling.append(part, crc)
                        size += len(part)
                    checksums.append(struct.pack("<I", crc))
                    filling.seal(checksums[-1])
                    entries.append((offset, size))
                    offset += size
        self.index[first:last] = np.array(entries).reshape(last - first, g.taps, 2)
        return crc32c(b"".join(checksums))

    def stored(self, rows: np.ndarray, encoded: bool) -> list[np.ndarray]:
        """The bytes of one chunk as stored, but for its checksum; a sample's last chunk is filled up."""
        body = (rows if encoded else self.codec.encode(rows)).view(np.uint8).reshape(-1)
        parts = [body]
        if len(body) < self.chunk_bytes:
            parts.append(self.padding[: self.chunk_bytes - len(body)])
        return [compress(parts)] if self.codec.is_compressed else parts

    def finish(self) -> int:
        """Writes the index, syncs and publishes; returns the bytes of the file."""
        index = self.index.tobytes()
        self.file.write(index + struct.pack("<I", crc32c(index)))
        return self.file.finish()

    def abort(self) -> None:
        """Removes what was written aside; a published segment stays."""
        self.file.abort()


@functools.lru_cache(maxsize=4)  # shared by all open segments
def padding(geometry: SegmentGeometry) -> np.ndarray:
    """What fills up a sample's last chunk: rows of NaN, loud when read by mistake; int8 has none and takes zeros."""
    if geometry.codec.is_lossless:
        return flat_bytes(np.full((geometry.chunk, geometry.hidden), NAN_VALUE, dtype="<u2"))
    return flat_bytes(np.zeros(geometry.chunk * geometry.row_bytes, dtype=np.uint8))


def compress(parts: list[np.ndarray]) -> np.ndarray:
    """One chunk of bfloat16 bits as a blosc buffer."""
    values = (parts[0] if len(parts) == 1 else np.concatenate(parts)).view("<u2")
    return np.frombuffer(blosc_frame.compress(values), dtype=np.uint8)
