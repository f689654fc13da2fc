"""Kills create_store and a segment's commit at every step that changes the disk, and repeats the call.

Run as a program of its own, `killed_at_every_step.py FOLDER`, since it forks: each child counts the
audit events of opening, renaming, linking, removing and locking, and the calls that write, cut and
sync, and ends without any clean-up at the k-th of them. Prints one JSON line: how often it killed each call.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import small_store as small
from dflash_offline.store.files import remove_temporaries
from dflash_offline.store.reader import StoreReader

EVENTS = {"open", "os.mkdir", "os.link", "os.rename", "os.remove", "os.listdir", "os.scandir", "fcntl.flock"}
CALLS = ("write", "writev", "pwrite", "ftruncate", "fdatasync", "fsync")  # Python has no audit event for most
KILLED = 9


def run(call: Callable[[], None], killed_at: int | None) -> bool:
    """Runs the call in a child; True where it was killed before its end."""
    child = os.fork()
    if child == 0:
        count = 0

        def step() -> None:
            nonlocal count
            if count == killed_at:
                os._exit(KILLED)
            count += 1

        for name in CALLS:
            setattr(os, name, after(step, getattr(os, name)))
        sys.addaudithook(lambda event, _: step() if event in EVENTS else None)
        try:
            call()
        except BaseException as error:
            print(f"killed at {killed_at}: {type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, KILLED):
        raise SystemExit(f"child ended with {code}")
    return code == KILLED


def after(step: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    def stepped(*arguments: Any) -> Any:
        step()
        return call(*arguments)

    return stepped


def every_step(call: Callable[[Path], None], start: Path | None, folder: Path, expected: dict[str, bytes]) -> int:
    """Kills `call` at step 0, 1, ... of a copy of `start`; after the same call again all is as expected."""
    for step in range(10_000):
        store = folder / f"step-{step}"
        if start is not None:
            shutil.copytree(start, store)
        was_killed = run(lambda store=store: call(store), step)
        check_readable(store)
        run(lambda store=store: call(store), None)
        found = small.tree(store)
        if found != expected:
            different = [name for name in {*found, *expected} if found.get(name) != expected.get(name)]
            raise SystemExit(f"after a kill at step {step}: {sorted(different)}")
        shutil.rmtree(store)
        if not was_killed:
            return step
    raise SystemExit("the call never ended")


def check_readable(store: Path) -> None:
    """What a reader sees of a half-written store is right, however little it is."""
    if not (store / "commits/00000000.arrow").exists():
        return
    with StoreReader(store, partial=True) as reader:
        for i in range(len(reader)):
            n, sample_id = int(reader.samples.n[i]), int(reader.samples.sample_id[i])
            out = np.empty((len(small.TAPS), n, small.HIDDEN), dtype=np.uint16)
            reader.read(i, out)
            if not np.array_equal(out, small.states(sample_id, n)):
                raise SystemExit(f"{store}: sample {sample_id} is wrong")


def main(folder: Path) -> None:
    data = folder / "data"
    plan = small.make_plan(small.make_samples(data, 6, rows_per_file=4))
    manifest = small.make_manifest(plan)

    def create(store: Path) -> None:
        small.create_store(store, manifest, plan, data)

    def fill(store: Path) -> None:
        writer = small.StoreWriter(store, manifest)
        missing = set(range(manifest.num_segments)) - writer.committed()
        remove_temporaries(store, missing)
        for segment in sorted(missing):
            small.fill_segment(writer, segment)

    create(folder / "empty")
    shutil.copytree(folder / "empty", folder / "full")
    fill(folder / "full")
    steps = {
        "create": every_step(create, None, folder, small.tree(folder / "empty")),
        "fill": every_step(fill, folder / "empty", folder, small.tree(folder / "full")),
    }
    print(json.dumps(steps | {"segments": manifest.num_segments}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
