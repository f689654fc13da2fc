"""Every way to read the same samples, whole and in random order, into one buffer made before."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dflash_offline.store import bfloat16
from dflash_offline.store.geometry import segment_path
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.ring import Ring
from safetensors import safe_open
from safetensors.torch import save_file

from .made import HIDDEN, LONGEST, TAPS, Noise
from .rows import Row, Taken

ReadInto = Callable[[int, np.ndarray], None]  # number of a sample, and out [TAPS, n, HIDDEN] u16
FETCHED_SHARE = 0.01  # of one sweep; others on the machine push out a page now and then


class Sweep:
    """One read of all samples of a store, each time in another order; the first is compared with what was written."""

    def __init__(self, reader: StoreReader, noise: Noise, buffer: np.ndarray, read: ReadInto) -> None:
        self.n = reader.samples.n.tolist()
        self.sample_id = reader.samples.sample_id.tolist()
        self.noise, self.buffer, self.read = noise, buffer, read
        self.draw = np.random.default_rng(3)
        self.is_checked = False

    def __call__(self) -> None:
        for i in self.draw.permutation(len(self.n)).tolist():
            n = self.n[i]
            out = self.buffer[: TAPS * n * HIDDEN * 2].view(np.uint16).reshape(TAPS, n, HIDDEN)
            self.read(i, out)
            if not self.is_checked:
                assert np.array_equal(out, self.noise.states(self.sample_id[i], n)), f"sample {i} differs"
                self.buffer[:] = 0
        self.is_checked = True


class BareReads:
    """`preadv` of the bytes that a sample takes in its segment, checksums and padding with them."""

    def __init__(self, reader: StoreReader, buffer: np.ndarray) -> None:
        self.extents: list[tuple[int, int, int]] = []  # file, offset, bytes
        for i in range(len(reader)):
            segment = reader.segment("hidden", int(reader.samples.segment[i]))
            first = int(reader.samples.position[i]) // 64
            entries = segment.index[first : first - int(-reader.samples.n[i] // 64)].reshape(-1, 2).astype(np.int64)
            size = int(entries[:, 1].sum())
            assert entries[-1].sum() == entries[0, 0] + size, "a sample is not one extent"
            fd = os.open(segment.path, os.O_RDONLY)
            self.extents.append((fd, int(entries[0, 0]), size))
        self.view = buffer.data
        self.draw = np.random.default_rng(3)

    def __call__(self) -> None:
        for i in self.draw.permutation(len(self.extents)).tolist():
            fd, offset, size = self.extents[i]
            done = 0
            while done < size:
                done += os.preadv(fd, [self.view[done:size]], offset + done)


def zarr_array(store_dir: Path) -> Any:
    import zarr

    bfloat16.register()
    return zarr.open_array(store_dir / "hidden", mode="r")


def from_zarr_python(store_dir: Path, reader: StoreReader) -> ReadInto:
    """By index, as its manual shows."""
    array, firsts = zarr_array(store_dir), first_positions(reader)

    def read(i: int, out: np.ndarray) -> None:
        values = array[firsts[i] : firsts[i] + out.shape[1]]  # [n, TAPS, HIDDEN]
        out.view(array.dtype)[:] = values.transpose(1, 0, 2)

    return read


def from_zarr_python_out(store_dir: Path, reader: StoreReader) -> ReadInto:
    """Into a buffer object around the memory, which saves it an array and a copy."""
    from zarr.core.buffer import default_buffer_prototype

    array, firsts = zarr_array(store_dir), first_positions(reader)

    def read(i: int, out: np.ndarray) -> None:
        values = out.view(array.dtype).transpose(1, 0, 2)  # [n, TAPS, HIDDEN]
        target = default_buffer_prototype().nd_buffer.from_numpy_array(values)
        array.get_basic_selection(slice(firsts[i], firsts[i] + out.shape[1]), out=target)

    return read


def from_tensorstore(store_dir: Path, reader: StoreReader) -> ReadInto:
    import tensorstore  # pyright: ignore[reportMissingImports]  not ours to require

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{store_dir / 'hidden'}/"}}
    array: Any = tensorstore.open(spec, read=True, open=True).result()
    kind, firsts = array.dtype.numpy_dtype, first_positions(reader)

    def read(i: int, out: np.ndarray) -> None:
        target = tensorstore.array(out.view(kind).transpose(1, 0, 2), copy=False)
        target.write(array[firsts[i] : firsts[i] + out.shape[1]]).result()

    return read


def first_positions(reader: StoreReader) -> list[int]:
    """The first position of each sample in the array."""
    segments = reader.samples.segment.astype(np.int64)
    return (segments * reader.manifest.segment_positions + reader.samples.position).tolist()


def write_per_sample(folder: Path, reader: StoreReader, noise: Noise, *, torch_files: bool = True) -> None:
    """One safetensors file and, with `torch_files`, one torch.save file a sample, as trainers of drafters keep them."""
    folder.mkdir()
    for i in range(len(reader)):
        planes = noise.states(int(reader.samples.sample_id[i]), int(reader.samples.n[i]))
        states = torch.from_numpy(planes.view(np.int16)).view(torch.bfloat16).contiguous()
        save_file({"hidden": states}, folder / f"{i}.safetensors")
        if torch_files:
            torch.save({"hidden": states}, folder / f"{i}.pt")


def from_safetensors(folder: Path) -> ReadInto:
    def read(i: int, out: np.ndarray) -> None:
        with safe_open(folder / f"{i}.safetensors", framework="pt") as file:
            as_torch(out).copy_(file.get_tensor("hidden"))  # a view of the memory map

    return read


def from_torch_save(folder: Path, *, mapped: bool) -> ReadInto:
    def read(i: int, out: np.ndarray) -> None:
        as_torch(out).copy_(torch.load(folder / f"{i}.pt", mmap=mapped)["hidden"])

    return read


def as_torch(out: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)


def bytes_from_disk() -> int:
    """What the system fetched from disks for this process so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def read_rows(store_dir: Path, folder: Path, noise: Noise, rounds: int, left_out: dict[str, str]) -> list[Row]:
    """All ways of reading a raw store and the same samples as files of their own, made in `folder`."""
    torch.set_num_threads(1)  # of several the idle ones spin, which would count against the others
    ring = Ring.create((LONGEST * HIDDEN * 2 + LONGEST // 16) * TAPS, 1)  # as the loader's; room for checksums
    buffer = ring.slot(0)
    buffer[:] = 0
    with StoreReader(store_dir) as reader:
        write_per_sample(folder, reader, noise)
        reads: dict[str, ReadInto] = {
            "read_verified": lambda i, out: reader.read(i, out),
            "read_unverified": lambda i, out: reader.read(i, out, verify=False),
            "zarr_python": from_zarr_python(store_dir, reader),
            "zarr_python_out": from_zarr_python_out(store_dir, reader),
            "safetensors": from_safetensors(folder),
            "torch_save_mapped": from_torch_save(folder, mapped=True),
            "torch_save": from_torch_save(folder, mapped=False),
        }
        if find_spec("tensorstore"):
            reads["tensorstore"] = from_tensorstore(store_dir, reader)
        else:
            left_out["tensorstore_vs_ours_cpu"] = "tensorstore is not installed"
        bare = BareReads(reader, buffer)
        ways: dict[str, Callable[[], None]] = {"preadv": bare}
        ways |= {name: Sweep(reader, noise, buffer, read) for name, read in reads.items()}
        fetched: list[int] = []
        taken = Taken(ways, rounds, lambda: fetched.append(bytes_from_disk()))
        for fd, _, _ in bare.extents:
            os.close(fd)
        gigabytes = int(reader.samples.n.sum()) * TAPS * HIDDEN * 2e-9
        assert segment_path(store_dir, "hidden", 1).exists(), "one segment only"
    from_disk = (fetched[-1] - fetched[len(ways)]) / 1e9  # the first round fetches
    if from_disk > FETCHED_SHARE * gigabytes:
        raise SystemExit(f"{from_disk:.2f} GB came from the disk meanwhile: the page cache is too small for this")
    return ratios(taken) + taken.rows(gigabytes)


def ratios(taken: Taken) -> list[Row]:
    rows = [
        Row("read_verified_vs_preadv_cpu", taken.ratio("read_verified", "preadv"), most=2.2),
        Row("read_unverified_vs_preadv_cpu", taken.ratio("read_unverified", "preadv"), most=1.3),
        Row("zarr_python_vs_ours_cpu", taken.ratio("zarr_python", "read_verified"), least=5),
        Row("zarr_python_out_vs_ours_cpu", taken.ratio("zarr_python_out", "read_verified"), least=5),
        Row("read_verified_vs_safetensors_map_cpu", taken.ratio("read_verified", "safetensors"), most=2.5),
        Row("read_verified_vs_torch_map_cpu", taken.ratio("read_verified", "torch_save_mapped"), most=2.5),
        Row("torch_save_vs_ours_cpu", taken.ratio("torch_save", "read_verified")),
    ]
    if "tensorstore" in taken.cpu_s:
        rows.insert(3, Row("tensorstore_vs_ours_cpu", taken.ratio("tensorstore", "read_verified"), least=5))
    return rows
