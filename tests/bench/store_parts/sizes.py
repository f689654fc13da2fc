"""Bytes on the disk a token: every file of a written store, against two bytes a value or against another store."""

import shutil
from pathlib import Path

from dflash_offline.store.reader import StoreReader
from dflash_offline.store.samples import SampleTable

from .made import Noise, drawn_lengths, empty_store, fill, folder_bytes, write_samples
from .memory import extra_mib
from .rows import Row

# as in the measurements that the bars come from: 22 samples, 80,301 tokens, median parameter 3,296, clip 50 to 8,192
LONG_TOKENS, LONG_MEDIAN, LONG_SHORTEST = 80_000, 3296, 50
THREADS = 4


def plain_bytes(store_dir: Path) -> int:
    """Two bytes for every value of every recorded position."""
    with StoreReader(store_dir) as reader:
        geometry = reader.geometries["hidden"]
        return reader.manifest.num_positions * geometry.taps * geometry.hidden * 2


def ratio_row(name: str, store_dir: Path, most: float | None = None) -> Row:
    return Row(name, folder_bytes(store_dir) / plain_bytes(store_dir), most=most)


def size_rows(folder: Path, noise: Noise) -> list[Row]:
    samples = write_samples(folder / "long-data", drawn_lengths(LONG_TOKENS, LONG_MEDIAN, LONG_SHORTEST))
    sizes: dict[str, int] = {}
    rows: list[Row] = []
    for codec in ("raw", "int8:16"):
        store_dir = folder / "long"
        fill(empty_store(store_dir, samples, codec=codec), noise.states)
        sizes[codec] = folder_bytes(store_dir)
        if codec == "raw":
            rows.append(ratio_row("bytes_ratio_raw", store_dir, most=1.01))
        shutil.rmtree(store_dir)
    return [*rows, Row("bytes_ratio_int8", sizes["int8:16"] / sizes["raw"], most=0.52)]


def memory_rows(folder: Path, samples: SampleTable) -> list[Row]:
    """The worst of raw and int8, which decodes; readers with one thread and with four."""
    read_mib, written_mib = [], []
    for codec in ("raw", "int8:16"):
        store_dir = folder / "memory"
        empty_store(store_dir, samples, codec=codec)
        written_mib.append(extra_mib("write", store_dir))
        read_mib += [extra_mib("read", store_dir, threads) for threads in (1, THREADS)]
        shutil.rmtree(store_dir)
    return [
        Row("reader_extra_mib", max(read_mib), "MiB", most=64),
        Row("writer_extra_mib", max(written_mib), "MiB", most=64),
    ]
