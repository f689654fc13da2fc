"""One slice of a segment on its way to the caller: which runs of bytes to read, where they land, what they must be.

Two ways: straight into the caller's memory, where rows are stored as they are wanted, or through a scratch buffer of
the thread, where a chunk is unpacked (zstd) or its rows are decoded (int8). Knows a file by its descriptor alone.
"""

import struct
import threading
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .buffers import drop_pages, fetch_pages, read_all
from .checksum import crc32c
from .size import CHECKSUM_BYTES

if TYPE_CHECKING:
    from .segment_reader import SegmentReader

PIECE_BYTES = 512 << 10  # read at once, then checked in a core's own cache: 0.78 of bare reads, 0.69 with 2 MiB
# (2026-12-01, Intel Xeon with 2 MiB of L2 a core, H=5120; a Zen 4 loses 4 % by it)
UNCHECKED_PIECE_BYTES = 16 << 20  # 6 % less CPU time where nothing is checked (2026-11-30, 2 cores Zen 4, H=5120)
DECODED_VALUES = 1 << 17  # of int8 rows at once: numpy takes some 30 bytes a value meanwhile
BLOSC_HEADER_BYTES = 16  # also the most by which a chunk that does not compress grows


class SegmentDamage(Exception):
    """A segment file that cannot be trusted: the file, the reason, and where known position and tap."""

    def __init__(self, path: Path, reason: str, *, position: int | None = None, tap: int | None = None) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason
        self.position = position  # first position of the chunk inside the segment
        self.tap = tap  # number of the tap in the store's list


class Piece(NamedTuple):
    """Chunks that lie next to each other in the file, from `offset` on; a chunk has a number inside its slice."""

    offset: int
    numbers: list[int]


class Scratch(threading.local):
    """Buffers of one thread, kept from read to read: a fresh one costs a page fault every 4 KiB."""

    def __init__(self) -> None:
        self.buffers: dict[str, np.ndarray] = {}

    def bytes(self, name: str, size: int) -> np.ndarray:
        """`size` bytes of the buffer of that name, whatever they hold."""
        if name not in self.buffers or len(self.buffers[name]) < size:
            self.buffers[name] = np.empty(size, dtype=np.uint8)
        return self.buffers[name][:size]


SCRATCH = Scratch()


class Slice:
    """What both ways have in common: the chunks, their pieces, their stored checksums.

    Chunk `number` holds positions of chunk `number // Lt'` of the slice and tap `number % Lt'` of those wanted.
    """

    def __init__(
        self,
        segment: "SegmentReader",
        begin: int,
        end: int,
        taps: list[int],
        entries: np.ndarray,
        out: np.ndarray,
        *,
        verify: bool,
        encoded: bool,
    ) -> None:
        g = segment.geometry
        self.segment, self.geometry, self.taps, self.width = segment, g, taps, len(taps)
        self.verify, self.encoded, self.out = verify, encoded, out
        self.first = begin // g.chunk
        self.head = begin - self.first * g.chunk  # positions of the first chunk before the slice
        self.n = end - begin
        self.step = g.chunk * g.row_bytes
        flat = entries.reshape(-1, 2)
        self.offsets, self.sizes = flat[:, 0], flat[:, 1]
        self.checksums = np.empty((len(entries), self.width), dtype="<u4")
        self.checksum_bytes = self.checksums.view(np.uint8).reshape(-1)

    @property
    def piece_bytes(self) -> int:
        return PIECE_BYTES

    @cached_property
    def pieces(self) -> list[Piece]:
        """All chunks in the order of the file, cut where a gap is and after about `piece_bytes`."""
        order = np.argsort(self.offsets, kind="stable")
        offsets, sizes = self.offsets[order].astype(np.int64), self.sizes[order].astype(np.int64)
        before = np.cumsum(sizes) - sizes
        is_cut = offsets[1:] != offsets[:-1] + sizes[:-1]
        is_cut |= np.diff(before // self.piece_bytes) != 0
        cuts = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(order)]
        numbers, places = order.tolist(), offsets.tolist()
        return [Piece(places[a], numbers[a:b]) for a, b in pairwise(cuts)]

    def read(self) -> np.ndarray:
        """Reads all of it; returns the stored checksums [chunks, Lt'] u32."""
        for piece in self.pieces:
            self.read_piece(piece)
        return self.checksums

    def fetch(self) -> None:
        """Has the system read all of it, before it is asked for piece by piece."""
        for piece in self.pieces:
            fetch_pages(self.segment.fd, piece.offset, int(self.sizes[piece.numbers].sum()))

    def drop(self) -> None:
        """Gives up the pages of the page cache that it came through, and those between them."""
        begin = int(self.offsets.min())
        drop_pages(self.segment.fd, begin, int((self.offsets + self.sizes).max()) - begin)

    def read_piece(self, piece: Piece) -> None:
        """Reads and checks some chunks; raises SegmentDamage for the first that is cut off or changed."""
        raise NotImplementedError

    def damage(self, reason: str, number: int) -> SegmentDamage:
        position = (self.first + number // self.width) * self.geometry.chunk
        return SegmentDamage(self.segment.path, reason, position=position, tap=self.taps[number % self.width])


class DirectSlice(Slice):
    """Stored rows are the wanted ones: they land where the caller wants them.

    A chunk is always read whole, since its checksum covers it whole; what lies before and after the slice goes
    into scratch, for each tap its own.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        row_bytes = self.geometry.row_bytes
        self.plane_bytes = self.n * row_bytes
        self.head_bytes = self.head * row_bytes
        self.tail_bytes = len(self.checksums) * self.step - self.head_bytes - self.plane_bytes
        self.targets = [plane.view(np.uint8).reshape(-1).data for plane in self.out]

    @property
    def piece_bytes(self) -> int:
        return PIECE_BYTES if self.verify else UNCHECKED_PIECE_BYTES

    def read_piece(self, piece: Piece) -> None:
        bodies = [self.body(number) for number in piece.numbers]
        buffers, stored = [], self.checksum_bytes.data
        for number, body in zip(piece.numbers, bodies):
            buffers += body
            buffers.append(stored[number * CHECKSUM_BYTES : (number + 1) * CHECKSUM_BYTES])
        if not read_all(self.segment.fd, buffers, piece.offset):
            raise self.damage("the file ends inside a chunk", piece.numbers[0])
        if self.verify:
            self.check(piece, bodies)

    def check(self, piece: Piece, bodies: list[list[memoryview]]) -> None:
        for number, body in zip(piece.numbers, bodies):
            found = 0
            for part in body:
                found = crc32c(part, found)
            if found != self.checksums.item(number):
                raise self.damage("a chunk does not match its checksum", number)

    def body(self, number: int) -> list[memoryview]:
        """Where a chunk's bytes go: into its plane, and what lies before and after the slice into scratch."""
        row, column = divmod(number, self.width)
        begin = row * self.step - self.head_bytes
        end = begin + self.step
        if begin >= 0 and end <= self.plane_bytes:
            return [self.targets[column][begin:end]]
        size = self.head_bytes + self.tail_bytes
        around = SCRATCH.bytes("around", self.width * size).data[column * size : (column + 1) * size]
        parts = [self.targets[column][max(0, begin) : end]]
        if begin < 0:
            parts.insert(0, around[: self.head_bytes])
        if end > self.plane_bytes:
            parts.append(around[self.head_bytes :])
        return parts


class ScratchSlice(Slice):
    """Stored chunks are unpacked or decoded on their way: they are read into scratch first."""

    def read_piece(self, piece: Piece) -> None:
        sizes = self.sizes[piece.numbers].tolist()
        data = SCRATCH.bytes("stored", sum(sizes))
        if not read_all(self.segment.fd, [data.data], piece.offset):
            raise self.damage("the file ends inside a chunk", piece.numbers[0])
        must_match, end = self.verify or self.geometry.codec.is_compressed, 0
        for number, size in zip(piece.numbers, sizes):
            begin, end = end, end + size
            body, stored = data[begin : end - CHECKSUM_BYTES], data[end - CHECKSUM_BYTES : end]
            self.checksum_bytes[number * CHECKSUM_BYTES : (number + 1) * CHECKSUM_BYTES] = stored
            if must_match and crc32c(body) != int(self.checksums[divmod(number, self.width)]):
                raise self.damage("a chunk does not match its checksum", number)
            self.land(number, body)

    def land(self, number: int, body: np.ndarray) -> None:
        """Brings the rows of a chunk that the slice wants into the caller's memory; body: its stored bytes u8."""
        row, column = divmod(number, self.width)
        g = self.geometry
        begin = row * g.chunk - self.head  # of the chunk in the slice
        first, last = max(0, -begin), min(g.chunk, self.n - begin)  # of the slice in the chunk
        target = self.out[column, begin + first : begin + last]
        if g.codec.is_compressed and last - first == g.chunk and g.codec.is_lossless:
            self.unpack(number, body, target.view(np.uint8).reshape(-1))
            return
        if g.codec.is_compressed:
            packed, body = body, SCRATCH.bytes("rows", self.step)
            self.unpack(number, packed, body)
        rows = body.reshape(g.chunk, g.row_bytes)[first:last]
        if self.encoded:
            target[...] = rows
        else:
            self.decode(number, rows, target)

    def decode(self, number: int, rows: np.ndarray, target: np.ndarray) -> None:
        step = max(1, DECODED_VALUES // self.geometry.hidden)
        try:
            for first in range(0, len(rows), step):
                self.geometry.codec.decode(rows[first : first + step], target[first : first + step])
        except IndexError as error:
            raise self.damage(f"a row names a channel that is not there: {error}", number) from error

    def unpack(self, number: int, body: np.ndarray, target: np.ndarray) -> None:
        """Decompresses one chunk into target [step] u8; its checksum was right, so a fault here is the writer's."""
        if header_sizes(body) != (len(target), len(body)):
            raise self.damage("a chunk does not unpack to its length", number)
        try:
            blosc().decompress(body, target)
        except (RuntimeError, ValueError) as error:
            raise self.damage(f"a chunk cannot be unpacked: {error}", number) from error


def header_sizes(body: np.ndarray) -> tuple[int, int]:
    """Bytes unpacked and packed, as the header of a blosc buffer says."""
    unpacked, packed = struct.unpack("<I4xI", body[4:16].tobytes())
    return unpacked, packed


def blosc() -> Any:
    """numcodecs' blosc, imported where a compressed store is read, and with one thread: ours are threads enough."""
    from numcodecs import blosc as module  # pyright: ignore[reportAttributeAccessIssue]  compiled, without stubs

    module.use_threads = False
    return module
