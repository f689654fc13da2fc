"""The most memory that reading and writing take beyond the caller's own, in a process of its own.

`memory.py read STORE THREADS` reads every sample; `memory.py write STORE` fills an empty store. Both print MiB: the
highest resident memory meanwhile, less that before the store was opened, when modules were loaded and buffers full.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
from dflash_offline.store.manifest import read_manifest
from dflash_offline.store.reader import StoreReader
from dflash_offline.store.writer import StoreWriter


def extra_mib(what: str, *arguments: object) -> float:
    """Runs this file as a program, with the same modules in reach."""
    code = f"import sys; sys.path[:] = {sys.path}; from store_parts import memory; memory.main(sys.argv[1:])"
    line = [sys.executable, "-c", code, what, *map(str, arguments)]
    return float(subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout)


def resident_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def main(arguments: list[str]) -> None:
    what, store_dir, *rest = arguments
    manifest = read_manifest(Path(store_dir))
    with StoreReader(Path(store_dir), partial=True) as reader:
        longest = 8192 if what == "write" else int(reader.samples.n.max())
    states = np.full((len(manifest.tap_layers), longest, manifest.hidden_size), 0x3F80, dtype=np.uint16)
    if manifest.codec == "zstd":
        import numcodecs.blosc  # noqa: F401  its code is not what is measured
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    before = resident_mib("VmRSS")
    if what == "read":
        read(Path(store_dir), states, int(rest[0]))
    else:
        write(Path(store_dir), states)
    print(resident_mib("VmHWM") - before)


def read(store_dir: Path, states: np.ndarray, threads: int) -> None:
    with StoreReader(store_dir, threads=threads) as reader:
        for i, n in enumerate(reader.samples.n.tolist()):
            reader.read(i, states[:, :n])


def write(store_dir: Path, states: np.ndarray) -> None:
    writer = StoreWriter(store_dir, read_manifest(store_dir))
    for segment in range(writer.manifest.num_segments):
        sink = writer.open(segment)
        for sample_id, position, n in zip(*(sink.plan[name].tolist() for name in ("sample_id", "position", "n"))):
            sink.append(sample_id, position, states[:, :n])
        sink.commit({})
