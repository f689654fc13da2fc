"""Planning an epoch: how long packing over a million lengths takes, and how full its rows are."""

import statistics
import time

import numpy as np
from dflash_offline.train.packing import pack_rows
from store_parts.rows import Row

NUM_SAMPLES = 1_095_082  # of the data set that the store was designed for
MEDIANS = (3296, 1500)  # tokens; the first is that data set's
SHORTEST, LONGEST, SPREAD = 50, 8192, 0.8
SEGMENT_POSITIONS = 32_768  # 1.68 GB at 51.2 KB a token
ROW_TOKENS = 16_384
MIXED_SEGMENTS = 32


def lengths_of(count: int, median: float) -> np.ndarray:
    """Lognormal lengths [count], tokens."""
    drawn = np.random.default_rng(0).lognormal(np.log(median), SPREAD, count)
    return np.clip(drawn, SHORTEST, LONGEST).astype(np.int64)


def planning_rows(rounds: int, count: int = NUM_SAMPLES) -> list[Row]:
    """The slowest plan and the emptiest rows over both medians; of the times of one median the median.

    The bar is on CPU time: it is one thread's work, so that is the time it takes on a free core.
    """
    fills: list[float] = []
    cpu_s, wall_s = [], []
    for median in MEDIANS:
        lengths = lengths_of(count, median)
        segments = np.cumsum(lengths) // SEGMENT_POSITIONS
        own_cpu_s, own_wall_s = [], []
        for epoch in range(rounds):
            started, cpu_started = time.perf_counter(), time.process_time()
            rows = pack_rows(lengths, segments, ROW_TOKENS, seed=0, epoch=epoch, shuffle_segments=MIXED_SEGMENTS)
            own_cpu_s.append(time.process_time() - cpu_started)
            own_wall_s.append(time.perf_counter() - started)
            assert sum(map(len, rows)) == count, "every sample is in one row"
            fills.append(int(lengths.sum()) / (len(rows) * ROW_TOKENS))
        cpu_s.append(statistics.median(own_cpu_s))
        wall_s.append(statistics.median(own_wall_s))
    return [
        Row("packing_fill", min(fills), least=0.97),
        Row("plan_epoch_s", max(cpu_s), "CPU-s", most=10),
        Row("plan_epoch_wall_s", max(wall_s), "s"),
        Row("packed_samples", count, "count"),
    ]
