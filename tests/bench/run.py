"""What a training run costs beside its arithmetic, part by part; each bar with its verdict.

    python tests/bench/run.py --part loader --dir DIR --out OUT
    python tests/bench/run.py --part training --dir DIR --out OUT --devices cuda:0,cuda:1
    python tests/bench/run.py --merge OUT
`loader` needs no GPU: the loader process against bare reads and against torch's DataLoader, and planning an epoch of a
million samples; 9 GB. `training` trains a drafter of an 8B target's widths from a store of --store-gb on the disk of
DIR, page cache bypassed, on the first device and on both. DIR should be on a real disk and is left as it was. Each part
is kept as OUT/PART.json; the last line is the rows of all parts there as JSON. `--tiny` runs it on the CPU, in sizes
that say only whether it runs.
"""

import argparse
import tempfile
from pathlib import Path

from run_parts import training
from run_parts.loading import loading_rows
from run_parts.planning import planning_rows
from step_parts.cases import CASES, tiny
from step_parts.table import Bars, Part, merged, parts_in
from store_parts.rows import show

PARTS = ("training", "loader")
BARS: Bars = {
    "data_wait_share": ("most", 0.02),
    "two_gpus_vs_one": ("least", 1.9),
    "ddp_overhead": ("most", 0.05),
    "step_p99_over_p50": ("most", 1.05),
    "loader_vs_preadv": ("least", 0.7),
    "loader_vs_dataloader": ("least", 3),
    "packing_fill": ("least", 0.97),
    "plan_epoch_s": ("most", 10),
}


def run_part(name: str, args: argparse.Namespace, folder: Path) -> Part:
    part = Part(name)
    if name == "loader":
        for row in loading_rows(folder, args.gigabytes, args.rounds) + planning_rows(min(args.rounds, 3)):
            part.put(row.name, row.value, row.unit)
        return part
    case = tiny(CASES["8b"]) if args.tiny else CASES["8b"]
    store = training.make_store(folder, case, args.store_gb, args.codec, args.sample_tokens)
    job = training.Job(store=store, case=case, codec=args.codec, steps=args.steps, rows=args.rows)
    part.facts = {"codec": args.codec, "steps": args.steps, "rows of a device": args.rows, "devices": args.devices}
    part.facts["tokens of a sample"] = args.sample_tokens or "as of conversations"
    training.measure(part, folder, job, args.devices.split(","), lambda: part.save(args.out))
    return part


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, default=[], help="may be given several times")
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--out", type=Path, help="folder of the parts' files")
    parser.add_argument("--merge", type=Path, metavar="OUT", help="prints the table of the parts in OUT")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="states that part loader loads (default 4)")
    parser.add_argument("--rounds", type=int, default=5, help="of part loader; a median is of them (default 5)")
    parser.add_argument("--store-gb", type=float, default=44.0, help="states of part training, 1e9 bytes (default 44)")
    parser.add_argument("--codec", default="raw", help="of the store of part training (default raw)")
    parser.add_argument("--devices", default="cuda:0,cuda:1", help="of part training, one or two")
    parser.add_argument("--steps", type=int, default=100, help="of a run that count (default 100)")
    parser.add_argument("--rows", type=int, default=2, help="of 16,384 tokens, that a device has in a step (default 2)")
    parser.add_argument(
        "--sample-tokens", type=int, help="samples of part training have so many each; default: as of conversations"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that say only whether part training runs, on the CPU"
    )
    args = parser.parse_args()
    if not args.merge and not (args.part and args.out and args.dir):
        parser.error("give --part, --dir and --out, or --merge")
    if args.tiny:
        args.devices, args.steps, args.store_gb = "cpu,cpu", 6, 0.01
    return args


def main() -> None:
    args = parse_args()
    for name in args.part:
        args.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="run-bench-", dir=args.dir) as folder:
            run_part(name, args, Path(folder)).save(args.out)
    show("run", *merged(parts_in(args.merge or args.out, PARTS), BARS))


if __name__ == "__main__":
    main()
