"""What a sweep costs and finds: two runs at a time against one alone, and a ranking of twelve.

    python tests/bench/sweep.py --part concurrent --part smollm2 --out DIR --devices cuda:0,cuda:1
    python tests/bench/sweep.py --merge DIR
`concurrent` needs two devices; `smollm2` is a sweep over three block sizes, two losses and two optimizers, which the
same command goes on with where it was stopped. Each part is kept as DIR/PART.json; the last line is the rows of all
parts there as JSON. Without --store, SmolLM2's is made in DIR/smollm2 by `smollm2_drafter.py`. `--tiny` runs it all on
the CPU, on a store of the packaged tiny target, and says only whether it runs.
"""

import argparse
import shutil
from pathlib import Path

from dflash_offline.train.rank import named_devices
from step_parts.table import Bars, Part, merged, parts_in
from store_parts.rows import show
from sweep_parts import concurrent, grid
from sweep_parts.commands import smollm2_store, tiny_store

PARTS = ("concurrent", "smollm2")
BARS: Bars = {"concurrent_cost": ("most", 0.03), "runs": ("least", 12), "winner_acceptance": None}
TINY = {"rows.row_tokens": 256, "drafter.num_layers": 1, "drafter.block_size": 8, "cpu_threads": 1}


def run_part(name: str, args: argparse.Namespace, store: Path) -> Part:
    """Measures one part on a store."""
    devices = named_devices(args.devices)
    if name == "concurrent":
        folder = args.out / "concurrent"
        shutil.rmtree(folder, ignore_errors=True)  # a pair of runs is measured whole
        if args.tiny:
            return concurrent.measure(folder, store, devices, {"steps": 400, **TINY}, args.rounds, least=1)
        return concurrent.measure(folder, store, devices, {"steps": args.concurrent_steps}, args.rounds)
    if args.tiny:
        own = {"steps": 3, "eval_every": 3, **TINY}
        return grid.measure(args.out / "sweep", store, devices, own, grid.TINY_FIELDS)
    return grid.measure(args.out / "sweep", store, devices, {"steps": args.steps}, grid.FIELDS)


def store_of(args: argparse.Namespace) -> Path:
    """The store that was given, or the one made in DIR."""
    if args.store is not None:
        return args.store
    if not args.tiny:
        return smollm2_store(args.out / "smollm2", named_devices(args.devices)[0], args.prompts)
    made = args.out / "tiny" / "store"
    return made if made.exists() else tiny_store(args.out / "tiny")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, default=[], help="may be given several times")
    parser.add_argument("--out", type=Path, help="folder of stores, runs and the parts' files")
    parser.add_argument("--merge", type=Path, metavar="DIR", help="prints the table of the parts in DIR")
    parser.add_argument("--store", type=Path, help="default: SmolLM2's, made in the folder of --out")
    parser.add_argument("--devices", default="cuda:0,cuda:1", help="one run at a time on each (default cuda:0,cuda:1)")
    parser.add_argument("--steps", type=int, default=1000, help="of each run of part smollm2 (default 1000)")
    parser.add_argument(
        "--concurrent-steps", type=int, default=300, help="of each run of part concurrent (default 300)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of part concurrent, whose medians are taken (default 1)")
    parser.add_argument("--prompts", type=int, default=16_000, help="of SmolLM2's store (default 16000)")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that say only whether the benchmark runs, on the CPU"
    )
    args = parser.parse_args()
    if not args.merge and not (args.part and args.out):
        parser.error("give --part and --out, or --merge")
    if args.tiny:
        args.devices = "cpu,cpu"
    if "concurrent" in args.part and len(named_devices(args.devices)) != 2:
        parser.error(f"--devices {args.devices}: part concurrent compares two")
    return args


def main() -> None:
    args = parse_args()
    if args.part:
        args.out.mkdir(parents=True, exist_ok=True)
        store = store_of(args)
        for name in args.part:
            part = run_part(name, args, store)
            part.save(args.out)
    parts = parts_in(args.merge or args.out, PARTS)
    for part in parts:
        print("\n".join(part.facts.get("table", [])))
    show("sweep", *merged(parts, BARS))


if __name__ == "__main__":
    main()
