"""A small store for the tests: every byte of it follows from a few numbers.

Loaded by `conftest.py`, and run as a program where a test needs writers that can be killed:
`small_store.py STORE DATA RANK WORLD`.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
from dflash_offline.store.files import remove_temporaries
from dflash_offline.store.index import PLAN_SCHEMA, plan_sha256
from dflash_offline.store.manifest import Manifest
from dflash_offline.store.samples import SampleTable, SampleWriter, recorded_range
from dflash_offline.store.writer import StoreWriter, create_store

HIDDEN = 8
TAPS = (1, 9, 17)
SEGMENT_POSITIONS = 512


def lengths(num_samples: int) -> np.ndarray:
    """Token counts from 2 to 300, chunk edges among them."""
    edges = [65, 66, 2, 129, 64, 63, 128, 3]
    drawn = np.random.default_rng(7).integers(2, 300, size=max(0, num_samples - len(edges)))
    return np.array([*edges, *drawn][:num_samples])


def make_samples(folder: Path, num_samples: int, rows_per_file: int = 7) -> SampleTable:
    with SampleWriter(folder, rows_per_file=rows_per_file) as writer:
        for number, length in enumerate(lengths(num_samples).tolist()):
            ids = np.random.default_rng(number).integers(0, 1000, size=length)
            split = "heldout" if number % 5 == 4 else "train"
            task = ("chat", "code", "mathematics")[number % 3]
            writer.add(ids, np.ones(length), split=split, task=task, source="a.jsonl", source_line=number + 1)
    return SampleTable(folder)


def make_plan(table: SampleTable, segment_positions: int = SEGMENT_POSITIONS, window: int | None = None) -> pa.Table:
    """Next-fit in row order, the obvious way."""
    segment, position, rows = 0, 0, []
    ranges = [recorded_range(table.tokens(row)[1], window) for row in range(len(table))]
    for _, n in ranges:
        padded = -(-n // 64) * 64
        if position + padded > segment_positions:
            segment, position = segment + 1, 0
        rows.append((segment, position))
        position += padded
    files, inside = table.places()
    values = {
        "sample_id": np.arange(len(table)) + 100,
        "segment": [row[0] for row in rows],
        "position": [row[1] for row in rows],
        "n": [n for _, n in ranges],
        "first": [first for first, _ in ranges],
        "source_line": table.column("source_line"),
        "tokens_file": files,
        "tokens_row": inside,
        **{name: table.column(name).tolist() for name in ("split", "task", "source", "origin")},
    }
    arrays = []
    for field in PLAN_SCHEMA:
        if pa.types.is_dictionary(field.type):
            arrays.append(pa.array(values[field.name], type=pa.string()).dictionary_encode())
        else:
            arrays.append(pa.array(values[field.name], type=field.type))
    return pa.table(arrays, schema=PLAN_SCHEMA)


def make_manifest(
    plan: pa.Table, *, has_last: bool = True, segment_positions: int = SEGMENT_POSITIONS, codec: str = "raw"
) -> Manifest:
    return Manifest(
        target={"name": "tiny", "revision": None, "weights_sha256": "ab" * 32, "rope": {"rope_theta": 1e6}},
        data={"facts": {"max_length": 512, "template_sha256": "cd" * 32}, "report": {"lines_in": 3}},
        tap_layers=TAPS,
        hidden_size=HIDDEN,
        has_last=has_last,
        codec=codec,
        segment_positions=segment_positions,
        num_segments=max(plan["segment"].to_pylist(), default=-1) + 1,
        num_samples=plan.num_rows,
        num_positions=sum(plan["n"].to_pylist()),
        plan_sha256=plan_sha256(plan, segment_positions),
    )


def states(sample_id: int, n: int, planes: int = len(TAPS), hidden: int = HIDDEN) -> np.ndarray:
    """The states of a sample [planes, n, hidden] as bits of bfloat16, finite and never zero."""
    values = np.random.default_rng(sample_id).normal(size=(planes, n, hidden)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def fill_segment(writer: StoreWriter, segment: int, status: dict[int, int] | None = None) -> None:
    """Writes and commits one segment, its samples in reverse order."""
    sink = writer.open(segment)
    for row in reversed(range(len(sink.plan["sample_id"]))):
        sample_id, position, n = (int(sink.plan[name][row]) for name in ("sample_id", "position", "n"))
        code = (status or {}).get(sample_id, 0)
        if code == 2:
            sink.append(sample_id, position, None, status=code)
        else:
            last = states(sample_id + 10**6, n, 1)[0] if writer.manifest.has_last else None
            planes = states(sample_id, n)
            if code == 1:
                planes[1, n // 2, 3] = 0x7FC0
            sink.append(sample_id, position, planes, last, status=code)
    sink.commit({"host": "somewhere"})


def fill_segments(writer: StoreWriter, segments: Iterable[int], status: dict[int, int] | None = None) -> None:
    for segment in segments:
        fill_segment(writer, segment, status)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file under a folder by relative path; locks, which name processes, left out."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.endswith("lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def make_store(
    folder: Path,
    num_samples: int = 20,
    *,
    has_last: bool = True,
    fill: bool = True,
    status: dict[int, int] | None = None,
    codec: str = "raw",
) -> tuple[Path, Manifest, pa.Table]:
    """DATA in `folder/data` and a store in `folder/store`, filled unless told otherwise."""
    plan = make_plan(make_samples(folder / "data", num_samples))
    manifest = make_manifest(plan, has_last=has_last, codec=codec)
    create_store(folder / "store", manifest, plan, folder / "data")
    if fill:
        fill_segments(StoreWriter(folder / "store", manifest), range(manifest.num_segments), status)
    return folder / "store", manifest, plan


def main(store: str, data: str, rank: str, world: str) -> None:
    """One of several writers: completes the layout, then fills its share of what is missing."""
    plan = make_plan(SampleTable(Path(data)))
    manifest = make_manifest(plan)
    create_store(Path(store), manifest, plan, Path(data))
    writer = StoreWriter(Path(store), manifest)
    missing = sorted(set(range(manifest.num_segments)) - writer.committed())
    mine = [segment for segment in missing if segment % int(world) == int(rank)]
    remove_temporaries(Path(store), mine)
    for segment in mine:
        fill_segment(writer, segment)
        print(segment, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
