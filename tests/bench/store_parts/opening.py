"""A store as large as the largest in mind, without its states: 1.1 M samples, some 100,000 segments."""

import json
import shutil
import statistics
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from dflash_offline.extract.plan import make_plan
from dflash_offline.store.arrow_file import write_table
from dflash_offline.store.create import create_store
from dflash_offline.store.index import COMMIT_SCHEMA, CONSOLIDATED_NAME
from dflash_offline.store.reader import StoreReader

from .made import manifest_of, write_samples
from .rows import Row

NUM_SAMPLES = 1_100_000
LOOK_UPS = 20_000
SEGMENT_POSITIONS = 1024  # short, as the samples are, so that there are as many segments as of long ones


def opening_rows(folder: Path, rounds: int) -> list[Row]:
    store_dir = folder / "million"
    num_segments = make_store(store_dir, folder / "million-data")
    opened: list[float] = []
    for number in range(rounds + 1):
        started = time.perf_counter()
        reader = StoreReader(store_dir)
        if number:
            opened.append((time.perf_counter() - started) * 1e3)
        assert len(reader) == NUM_SAMPLES
        reader.close()
    with StoreReader(store_dir) as reader:
        found = [look_up_us(reader) for _ in range(rounds + 1)][1:]
    shutil.rmtree(store_dir)
    shutil.rmtree(folder / "million-data")
    return [
        Row("open_1m_ms", statistics.median(opened), "ms", most=50),
        Row("lookup_us", statistics.median(found), "us", most=20),
        Row("open_1m_segments", num_segments, "count"),
    ]


def look_up_us(reader: StoreReader) -> float:
    """Ids, mask, segment, position and length of a random sample."""
    numbers = np.random.default_rng(4).integers(0, len(reader), size=LOOK_UPS).tolist()
    samples = reader.samples
    started = time.perf_counter()
    for i in numbers:
        ids, mask = reader.tokens(i)
        _, _, n = int(samples.segment[i]), int(samples.position[i]), int(samples.n[i])
        assert len(ids) == len(mask) > n
    return (time.perf_counter() - started) * 1e6 / LOOK_UPS


def make_store(store_dir: Path, data_dir: Path) -> int:
    """A store that says it is complete; returns its segments, of which no file exists."""
    samples = write_samples(data_dir, np.random.default_rng(5).integers(40, 120, size=NUM_SAMPLES))
    plan = make_plan(samples, bytes_per_position=1.0, segment_positions=SEGMENT_POSITIONS)
    manifest = manifest_of(plan, 8, (1, 2), "raw")
    create_store(store_dir, manifest, plan.table, data_dir)
    values = {name: plan.column(name) for name in ("sample_id", "segment", "position", "n")}
    zeros = np.zeros(NUM_SAMPLES, dtype=np.uint8)
    values |= {"crc32c": zeros.astype(np.uint32), "last_crc32c": zeros.astype(np.uint32), "status": zeros}
    table = pa.table([pa.array(values[name]) for name in COMMIT_SCHEMA.names], schema=COMMIT_SCHEMA)
    weights = json.dumps([[number, 1_680_000_000] for number in range(plan.num_segments)])
    write_table(
        store_dir / CONSOLIDATED_NAME, table, {"identity_sha256": manifest.identity_sha256, "segments": weights}
    )
    return plan.num_segments
