"""What a training run costs beside its arithmetic, part by part; each bar with its verdict.

    python tests/bench/run.py --part loader --dir DIR

`loader` needs no GPU: the loader process against bare reads and against torch's DataLoader, and planning an epoch of a
million samples. DIR should be on a real disk, with 9 GB free, and is left as it was. The last line is the rows as JSON.
"""

import argparse
import tempfile
from pathlib import Path

from run_parts.loading import loading_rows
from run_parts.planning import planning_rows
from store_parts.rows import Row, show

PARTS = ("loader",)


def measure_loader(folder: Path, gigabytes: float, rounds: int) -> list[Row]:
    return loading_rows(folder, gigabytes, rounds) + planning_rows(min(rounds, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--dir", type=Path, required=True, help="a folder on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="states that are loaded (default 4)")
    parser.add_argument("--rounds", type=int, default=5, help="passes that a median is of (default 5)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="run-bench-", dir=args.dir) as name:
        rows = measure_loader(Path(name), args.gigabytes, args.rounds)
    show("run", rows, {})


if __name__ == "__main__":
    main()
