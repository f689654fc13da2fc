"""Writing a store whole, with checksums, syncs and commits, against bare O_DIRECT writing of the same samples."""

import mmap
import os
import shutil
from pathlib import Path

import numpy as np
from dflash_offline.store.samples import SampleTable

from .made import HIDDEN, TAPS, Noise, empty_store, fill
from .rows import Row, Taken

BLOCK_BYTES = 8 << 20
HUGE_PAGE_BYTES = 2 << 20
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT


class OurWrites:
    def __init__(self, store_dir: Path, samples: SampleTable, noise: Noise) -> None:
        self.noise = noise
        self.writer = empty_store(store_dir, samples)
        manifest, plan = self.writer.manifest, self.writer.plan
        self.gigabytes = manifest.num_positions * TAPS * HIDDEN * 2e-9
        rows = [self.writer.segment_rows(segment) for segment in range(manifest.num_segments)]
        self.segments = [list(zip(plan["sample_id"][r].tolist(), plan["n"][r].tolist())) for r in rows]

    def __call__(self) -> None:
        fill(self.writer, self.noise.states)


class BareWrites:
    """The planes of the same samples into as many files, 8 MiB at a time, with one fdatasync a file.

    They lie anywhere in memory, but O_DIRECT takes whole blocks of memory only: so they are copied, in the quickest
    way known here (store/direct.py says why) and on huge pages. No checksum, no index, nothing that says what it is.
    """

    def __init__(self, folder: Path, ours: OurWrites) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.ours = folder, ours
        self.block = on_huge_pages()

    def __call__(self) -> None:
        for number, samples in enumerate(self.ours.segments):
            fd = os.open(self.folder / f"{number}", FLAGS, 0o666)
            self.at = self.filled = 0
            for sample_id, n in samples:
                for plane in self.ours.noise.states(sample_id, n):
                    self.add(fd, plane.reshape(-1).view(np.uint8))
            size = self.at + self.filled
            self.put(fd, -(-self.filled // mmap.PAGESIZE) * mmap.PAGESIZE)
            os.ftruncate(fd, size)
            os.fdatasync(fd)
            os.close(fd)

    def add(self, fd: int, data: np.ndarray) -> None:
        while len(data):
            count = min(len(data), BLOCK_BYTES - self.filled)
            np.positive(data[:count], out=self.block[self.filled : self.filled + count])
            data, self.filled = data[count:], self.filled + count
            if self.filled == BLOCK_BYTES:
                self.put(fd, BLOCK_BYTES)

    def put(self, fd: int, count: int) -> None:
        done = 0
        while done < count:
            done += os.pwrite(fd, self.block[done:count].data, self.at + done)
        self.at, self.filled = self.at + count, 0


class AlignedWrites:
    """As many bytes of memory that happens to lie in whole blocks, and so is written where it is."""

    def __init__(self, folder: Path, ours: OurWrites) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.ours, source = folder, ours, ours.noise.bytes
        self.blocks = [source[at : at + BLOCK_BYTES] for at in range(0, len(source) - BLOCK_BYTES + 1, BLOCK_BYTES)]

    def __call__(self) -> None:
        for number, samples in enumerate(self.ours.segments):
            fd = os.open(self.folder / f"{number}", FLAGS, 0o666)
            size, done = sum(n for _, n in samples) * TAPS * HIDDEN * 2, 0
            while done < size:
                block = self.blocks[done // BLOCK_BYTES % len(self.blocks)]
                count = min(BLOCK_BYTES, -(-(size - done) // mmap.PAGESIZE) * mmap.PAGESIZE)
                done += os.pwrite(fd, block[done % BLOCK_BYTES : count].data, done)
            os.ftruncate(fd, size)
            os.fdatasync(fd)
            os.close(fd)


def on_huge_pages() -> np.ndarray:
    """BLOCK_BYTES of memory, written once."""
    memory = mmap.mmap(-1, BLOCK_BYTES + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    whole[:] = 1
    return whole[-whole.ctypes.data % HUGE_PAGE_BYTES :][:BLOCK_BYTES]


def clear(folder: Path) -> None:
    """Removes what was written, so that freeing it is in nobody's time."""
    for pattern in ("raw/hidden/c.*", "raw/commits/*", "bare/*"):
        for path in folder.glob(pattern):
            path.unlink()


def write_rows(folder: Path, samples: SampleTable, noise: Noise, rounds: int, left_out: dict[str, str]) -> list[Row]:
    """Leaves the store that was written last in `folder / "raw"`."""
    ours = OurWrites(folder / "raw", samples, noise)
    ways = {"odirect": BareWrites(folder / "bare", ours), "odirect_aligned": AlignedWrites(folder / "bare", ours)}
    try:
        ways["odirect"]()
    except OSError as error:
        ours()
        left_out["write_vs_odirect_cpu"] = f"{str(folder.parent)!r} refuses O_DIRECT ({error.strerror})"
        return []
    taken = Taken({**ways, "write": ours}, rounds, lambda: clear(folder))  # ours last: its store is read next
    shutil.rmtree(folder / "bare")
    return [
        Row("write_vs_odirect_cpu", taken.ratio("write", "odirect"), most=2.3),
        Row("write_vs_odirect_aligned_cpu", taken.ratio("write", "odirect_aligned")),
        *taken.rows(ours.gigabytes),
    ]
