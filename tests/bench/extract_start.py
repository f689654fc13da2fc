"""How long `dflash extract` takes from its start to its first batch on a table of token ids, and the memory it takes.

Writes rows of random ids and a loss mask as `datasets` saves them to disk, lengths lognormal, and gives the folder to
`dflash extract` as a user does, without `prepare`. The clock stops when the writer opens the first segment, which it
does with the first batch in its hands; then the run is ended by SIGTERM.
    python tests/bench/extract_start.py --dir DIR [--rows 1100000] [--median 150] [--devices cpu]
The peak of memory is `VmHWM` of each process, the largest of all as `peak_rss_mib`; pages of mapped files count there,
which the system takes back when it needs them. `peak_own_mib` is the memory that is no file's (RssAnon), looked at ten
times a second.
`prepared_s` is when the samples lay beside the store; the CPU time up to then is that of the one process that collects
(`collector_cpu_s`) and of those beside it, which may be as many as there are cores (`processes_cpu_s`).
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from dflash_offline.store.manifest import read_manifest
from dflash_offline.store.samples import SampleTable

ROWS_A_BATCH = 1000  # as datasets writes them
ROWS_A_FILE = 400_000
SIGMA = 0.8
LOOK_S = 0.1
SCHEMA = pa.schema([pa.field("input_ids", pa.list_(pa.int32())), pa.field("loss_mask", pa.list_(pa.int8()))])
Row = tuple[str, float, str]


def write_rows(folder: Path, count: int, median: float, seed: int = 0) -> int:
    """Rows whose first third is a prompt, and the number of their ids; 1 in 100 is the row before it once more."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    draw, names, total = np.random.default_rng(seed), [], 0
    for start in range(0, count, ROWS_A_FILE):
        names.append(f"data-{len(names):05d}.arrow")
        rows = min(ROWS_A_FILE, count - start)
        with pa.OSFile(str(folder / names[-1]), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as writer:
            for first in range(0, rows, ROWS_A_BATCH):
                batch = one_batch(min(ROWS_A_BATCH, rows - first), median, draw)
                total += len(batch["input_ids"].flatten())
                writer.write_batch(batch)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return total


def one_batch(count: int, median: float, draw: np.random.Generator) -> pa.RecordBatch:
    lengths = np.clip(draw.lognormal(np.log(median), SIGMA, count), 50, 8192).astype(np.int64)
    lengths[1::100] = lengths[0:-1:100][: len(lengths[1::100])]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = draw.integers(6, 500, offsets[-1], dtype=np.int32)
    for row in range(1, count, 100):
        ids[offsets[row] : offsets[row + 1]] = ids[offsets[row - 1] : offsets[row]]
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    mask = (place >= np.repeat(lengths // 3, lengths)).astype(np.int8)
    columns = [pa.ListArray.from_arrays(offsets.astype(np.int32), pa.array(values)) for values in (ids, mask)]
    return pa.record_batch(columns, schema=SCHEMA)


def family(pid: int) -> dict[int, str]:
    """A process and all below it, with the last word of their command lines, without those that ended meanwhile."""
    try:
        found = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")[-1].decode()}
        below = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return {}
    for child in below:
        found |= family(child)
    return found


def memory_mib(pid: int, name: str) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), 0.0)


def cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Start:
    """What was seen of a command up to its first batch."""

    first_batch_s: float = 0.0
    prepared_s: float = 0.0
    collector_cpu_s: float = 0.0
    cpu_s: dict[int, float] = field(default_factory=dict)
    peak_mib: dict[str, float] = field(default_factory=dict)
    """By the name of a process."""
    own_mib: dict[str, float] = field(default_factory=dict)


def start_of(command: list[str], store: Path, limit_s: float) -> Start:
    seen, started = Start(), time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        while not any(store.glob("hidden/c.*")):
            if running.poll() is not None or time.perf_counter() - started > limit_s:
                running.kill()
                assert running.stderr is not None
                raise SystemExit(
                    f"no batch after {limit_s:.0f} s, exit code {running.returncode}:\n{running.stderr.read()}"
                )
            if not seen.prepared_s and store.with_name(f"{store.name}-data").exists():
                seen.prepared_s = time.perf_counter() - started
                seen.collector_cpu_s = cpu_s(running.pid)
            for pid, name in family(running.pid).items():
                known = "launcher" if pid == running.pid else name
                for peaks, kind in ((seen.peak_mib, "VmHWM"), (seen.own_mib, "RssAnon")):
                    peaks[known] = max(peaks.get(known, 0.0), memory_mib(pid, kind))
                if known.startswith("prepare"):
                    seen.cpu_s[pid] = max(seen.cpu_s.get(pid, 0.0), cpu_s(pid))
            time.sleep(LOOK_S)
        seen.first_batch_s = time.perf_counter() - started
        running.send_signal(signal.SIGTERM)
        running.communicate()
    return seen


def measure(args: argparse.Namespace) -> list[Row]:
    folder: Path = args.dir
    ids, store = folder / "ids", folder / "store"
    tokens = write_rows(ids, args.rows, args.median)
    for old in (store, folder / "store-data"):
        shutil.rmtree(old, ignore_errors=True)
    line = ["extract", "--data", str(ids), "--target", args.target, "--store", str(store), "--devices", args.devices]
    command = [sys.executable, "-m", "dflash_offline.cli", *line, "--no-space-check"]
    seen = start_of(command, store, args.minutes * 60)
    print(f"samples {SampleTable(folder / 'store-data').fingerprint()}, plan {read_manifest(store).plan_sha256}")
    for name, peak in sorted(seen.peak_mib.items()):
        print(f"  {name:28} {peak:10,.0f} MiB at most, {seen.own_mib[name]:,.0f} of its own")
    return [
        ("time_to_first_batch_s", seen.first_batch_s, "s"),
        ("prepared_s", seen.prepared_s, "s"),
        ("collector_cpu_s", seen.collector_cpu_s, "s"),
        ("processes_cpu_s", sum(seen.cpu_s.values()), "s"),
        ("rows", args.rows, "count"),
        ("tokens_per_row", tokens / args.rows, "tokens"),
        ("cores", len(os.sched_getaffinity(0)), "count"),
        ("peak_own_mib", max(seen.own_mib.values()), "MiB"),
        ("peak_rss_mib", max(seen.peak_mib.values()), "MiB"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="folder for everything")
    parser.add_argument("--rows", type=int, default=1_100_000)
    parser.add_argument("--median", type=float, default=150.0, help="of the rows' lengths, ids")
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--minutes", type=float, default=20.0, help="give up without a batch after so long")
    rows = measure(parser.parse_args())
    for name, value, unit in rows:
        print(f"{name:28} {value:14,.3f} {unit}")
    print(
        json.dumps(
            {"bench": "extract_start", "rows": [{"name": n, "value": round(v, 4), "unit": u} for n, v, u in rows]}
        )
    )


if __name__ == "__main__":
    main()
