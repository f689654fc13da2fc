"""The loader beside bare reads into the very same slots, and beside torch's DataLoader over a file a sample.

All of it on one core, from the page cache, the same samples in the same rows. What counts is CPU time (user and
system, of all processes that take part): on one core that is the rate, whatever else the machine does. Wall times
stand beside it. Bare reads come in three forms: `preadv` whose buffers are the very places in the slots where the
loader puts the states; `preadv_crc32c`, the same in pieces of about 2 MiB, each followed by its checksums (computed,
not compared), which is what any verified read must do; and `preadv_in_one_piece`, a sample's bytes one behind another,
which is no row but the quickest read.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dflash_offline.store.checksum import crc32c
from dflash_offline.store.reader import StoreReader
from dflash_offline.train.loader import Loader, LoaderPlan
from dflash_offline.train.order import ALL, Place, RowOrder, samples_of
from dflash_offline.train.slot import RowShape, RowSlot
from safetensors.torch import load_file
from store_parts.made import Noise, empty_store, fill, write_samples
from store_parts.reading import BareReads, write_per_sample
from store_parts.rows import Row

MEDIAN, SPREAD, SHORTEST = 1500, 0.8, 64  # of the samples' lengths, tokens; lognormal, as store_parts/made.py
ROW_TOKENS = 8192
SLOTS, STALL_S = 3, 300.0
CHUNK = 64  # positions of one tap that share a checksum
IOVECS = 1000  # of one call; Linux takes 1,024
CHECKED_IOVECS = 6  # three chunks, which are still in the cache when their checksums are computed
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one pass over the rows."""

    cpu_s: float
    wall_s: float


@contextmanager
def one_core() -> Iterator[None]:
    """This process and all that it starts share one core while the block runs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu_s_of(pid: int) -> float:
    """CPU seconds of another process so far, its threads counted."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class OurRows:
    """The loader, kept a full ring ahead: a pass begins and ends with every slot filled."""

    def __init__(self, loader: Loader, noise: Noise, reader: StoreReader, order: RowOrder) -> None:
        self.loader, self.noise, self.reader, self.order = loader, noise, reader, order
        self.is_checked = False
        self.wait_until_full()

    def wait_until_full(self) -> None:
        while len(self.loader.ready) < SLOTS:
            self.loader.child.listen(self.loader.note, STALL_S)

    def run(self, num_rows: int) -> Spent:
        pid = self.loader.child.process.pid
        cpu_s, started = cpu_s_of(pid) + time.process_time(), time.perf_counter()
        for _ in range(num_rows):
            with self.loader.row() as row:
                if not self.is_checked:
                    self.check(row.place, row.arrays.taps)
        self.wait_until_full()
        self.is_checked = True
        return Spent(cpu_s_of(pid) + time.process_time() - cpu_s, time.perf_counter() - started)

    def check(self, place: Place, taps: np.ndarray) -> None:
        """Raises where a row does not hold what was written."""
        end = 0
        for i in self.order.rows(place.epoch)[place.row].tolist():
            n = int(self.reader.samples.n[i])
            states = self.noise.states(int(self.reader.samples.sample_id[i]), n)
            assert np.array_equal(taps[:, end : end + n].view(np.uint16), states), f"sample {i} differs"
            end += n + 1


Call = tuple[int, list[memoryview], int]  # file, buffers, offset


class BareRows:
    """`preadv` of every sample's states into the places of the loader's slots; checksums and padding go elsewhere.

    Which buffers those are is settled before the clock runs.
    """

    def __init__(self, loader: Loader, reader: StoreReader, order: RowOrder, *, has_checksums: bool = False) -> None:
        self.reader, self.order, self.has_checksums = reader, order, has_checksums
        self.iovecs = CHECKED_IOVECS if has_checksums else IOVECS
        self.fds = {path: os.open(path, os.O_RDONLY) for path in (reader.store_dir / "hidden").glob("c.*")}
        self.taps = [loader.plan.slot.view(loader.ring.slot(number)).taps for number in range(SLOTS)]
        self.elsewhere = memoryview(bytearray(CHUNK * self.taps[0].shape[2] + 4))

    def calls(self, taps: np.ndarray, row: np.ndarray) -> Iterator[Call]:
        end, samples = 0, self.reader.samples
        row_bytes = taps.shape[2]
        for i in row.tolist():
            n, first = int(samples.n[i]), int(samples.position[i]) // CHUNK
            segment = self.reader.segment("hidden", int(samples.segment[i]))
            offsets = segment.index[first : first - int(-n // CHUNK), :, 0]  # [chunks, Lt]
            buffers: list[memoryview] = []
            for chunk in range(len(offsets)):
                rows = min(CHUNK, n - chunk * CHUNK)
                for plane in taps[:, end + chunk * CHUNK : end + chunk * CHUNK + rows]:
                    buffers += [plane.reshape(-1).data, self.elsewhere[: (CHUNK - rows) * row_bytes + 4]]
            offset = int(offsets[0, 0])
            for begin in range(0, len(buffers), self.iovecs):
                own = buffers[begin : begin + self.iovecs]
                yield self.fds[segment.path], own, offset
                offset += sum(map(len, own))
            end += n + 1

    def run(self, epoch: int) -> Spent:
        rows = self.order.rows(epoch)
        calls = [call for number, row in enumerate(rows) for call in self.calls(self.taps[number % SLOTS], row)]
        cpu_s, started = time.process_time(), time.perf_counter()
        for fd, buffers, offset in calls:
            assert os.preadv(fd, buffers, offset) == sum(map(len, buffers)), "a short read"
            for body in buffers[::2] if self.has_checksums else ():
                crc32c(body)
        return Spent(time.process_time() - cpu_s, time.perf_counter() - started)

    def close(self) -> None:
        for fd in self.fds.values():
            os.close(fd)


class WholeReads:
    """`preadv` of every sample's bytes in one piece, into the beginning of a slot."""

    def __init__(self, loader: Loader, reader: StoreReader, order: RowOrder) -> None:
        self.order = order
        self.bare = BareReads(reader, loader.ring.slot(0))

    def run(self, epoch: int) -> Spent:
        numbers = np.concatenate(self.order.rows(epoch)).tolist()
        view = self.bare.view
        cpu_s, started = time.process_time(), time.perf_counter()
        for i in numbers:
            fd, offset, size = self.bare.extents[i]
            done = 0
            while done < size:
                done += os.preadv(fd, [view[done:size]], offset + done)
        return Spent(time.process_time() - cpu_s, time.perf_counter() - started)

    def close(self) -> None:
        for fd, _, _ in self.bare.extents:
            os.close(fd)


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """One safetensors file a sample."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> torch.Tensor:
        return load_file(self.folder / f"{i}.safetensors")["hidden"]  # [Lt, n, H]


class InRows:
    """Puts samples one behind another into a new row [Lt, T, H]; the rest is zeros."""

    def __init__(self, row_tokens: int) -> None:
        self.row_tokens = row_tokens

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        num_taps, _, hidden = samples[0].shape
        row = torch.zeros(num_taps, self.row_tokens, hidden, dtype=samples[0].dtype)
        end = 0
        for sample in samples:
            row[:, end : end + sample.shape[1]] = sample
            end += sample.shape[1] + 1
        return row


class TorchRows:
    """A DataLoader with one worker, the same rows; two of them are prefetched."""

    def __init__(self, folder: Path, reader: StoreReader, order: RowOrder) -> None:
        self.samples, self.order = Samples(folder, len(reader)), order

    def run(self, epoch: int) -> Spent:
        rows = [row.tolist() for row in self.order.rows(epoch)]
        options: dict[str, Any] = {"batch_sampler": rows, "collate_fn": InRows(self.order.shape.row_tokens)}
        cpu_s, started = all_cpu_s(), time.perf_counter()
        for _ in torch.utils.data.DataLoader(self.samples, num_workers=1, prefetch_factor=2, **options):
            pass
        return Spent(all_cpu_s() - cpu_s, time.perf_counter() - started)


def all_cpu_s() -> float:
    """Of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def make_states(folder: Path, noise: Noise, gigabytes: float) -> Path:
    """A raw store of about so many GB of states."""
    total = int(gigabytes * 1e9 / noise.states(0, 1).nbytes)
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SPREAD, total // SHORTEST + 1)
    lengths = np.clip(drawn, SHORTEST, ROW_TOKENS - 1).astype(int)
    samples = write_samples(folder / "data", lengths[: int(np.searchsorted(np.cumsum(lengths), total)) + 1])
    num_taps, _, hidden = noise.planes.shape
    writer = empty_store(folder / "store", samples, hidden=hidden, taps=num_taps)
    fill(writer, noise.states)
    return folder / "store"


def order_of(reader: StoreReader) -> RowOrder:
    shape = RowShape(row_tokens=ROW_TOKENS, anchors=64, block_size=16)
    return RowOrder.of(reader, samples_of(reader, "train", ALL), shape, seed=0, shuffle_segments=32)


def loader_of(reader: StoreReader, noise: Noise, order: RowOrder) -> Loader:
    """A loader without an end, one thread."""
    num_taps, _, hidden = noise.planes.shape
    plan = LoaderPlan(
        store_dir=reader.store_dir,
        segments=ALL,
        snapshot=reader.snapshot,
        taps=tuple(range(num_taps)),
        slot=RowSlot(shape=order.shape, num_taps=num_taps, hidden_size=hidden, codec_name="raw"),
        seed=order.seed,
        shuffle_segments=order.shuffle_segments,
        start=Place(0, 0),
        num_rows=10**9,
    )
    return Loader(plan, slots=SLOTS, stall_s=STALL_S, beat=lambda: None)


def loading_rows(folder: Path, gigabytes: float, rounds: int) -> list[Row]:
    """All of them in turns; one round comes first and is not counted."""
    noise = Noise()
    with StoreReader(make_states(folder, noise, gigabytes)) as reader, one_core():
        write_per_sample(folder / "samples", reader, noise, torch_files=False)
        order = order_of(reader)
        with loader_of(reader, noise, order) as loader:
            ours = OurRows(loader, noise, reader, order)
            bare, whole = BareRows(loader, reader, order), WholeReads(loader, reader, order)
            checked = BareRows(loader, reader, order, has_checksums=True)
            theirs = TorchRows(folder / "samples", reader, order)
            ways: dict[str, Callable[[int], Spent]] = {
                "loader": lambda epoch: ours.run(len(order.rows(epoch))),
                "preadv": bare.run,
                "preadv_crc32c": checked.run,
                "preadv_in_one_piece": whole.run,
                "dataloader": theirs.run,
            }
            spent = rounds_of(ways, rounds)
            for reads in (bare, checked, whole):
                reads.close()
        num_taps, _, hidden = noise.planes.shape
        return compared(spent, int(reader.samples.n.sum()) * num_taps * hidden * 2e-9)


def rounds_of(ways: dict[str, Callable[[int], Spent]], rounds: int) -> dict[str, list[Spent]]:
    spent: dict[str, list[Spent]] = {name: [] for name in ways}
    for epoch in range(rounds + 1):
        for name, run in ways.items():
            taken = run(epoch)
            if epoch:
                spent[name].append(taken)
    return spent


def compared(spent: dict[str, list[Spent]], gigabytes: float) -> list[Row]:
    """Rates against each other, medians of the rounds' ratios, and the times themselves."""

    def ratio(other: str, kind: str) -> float:
        pairs = zip(spent["loader"], spent[other])
        return statistics.median(getattr(theirs, kind) / getattr(own, kind) for own, theirs in pairs)

    rows = [
        Row("loader_vs_preadv", ratio("preadv", "cpu_s"), least=0.7),
        Row("loader_vs_dataloader", ratio("dataloader", "cpu_s"), least=3),
        Row("loader_vs_preadv_crc32c", ratio("preadv_crc32c", "cpu_s")),
        Row("loader_vs_preadv_in_one_piece", ratio("preadv_in_one_piece", "cpu_s")),
        Row("loader_vs_preadv_wall", ratio("preadv", "wall_s")),
        Row("loader_vs_dataloader_wall", ratio("dataloader", "wall_s")),
    ]
    for name, taken in spent.items():
        rows.append(Row(f"{name}_cpu", statistics.median(one.cpu_s for one in taken) / gigabytes, "CPU-s/GB"))
        rows.append(Row(f"{name}_gb_s", gigabytes / statistics.median(one.wall_s for one in taken), "GB/s"))
    return rows
