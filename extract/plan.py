"""Where every sample will lie in the store, decided before anything runs.

A pure function of the samples, the bytes of a position and the asked segment size; it knows
nothing of shards, devices, disks or of what is done already.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ..store.index import PLAN_SCHEMA, plan_sha256
from ..store.placing import aligned, lay_out
from ..store.samples import SampleTable
from ..store.tokens_file import TEXT_COLUMNS

MAX_GROUP_SEGMENTS = 32  # over 32 segments of 2 GiB batches pad 2-4 %, inside one 18-37 % (design, section 4)
GROUPS_WANTED = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One row per sample in store order, with the facts that follow from the rows."""

    table: pa.Table
    segment_positions: int
    num_segments: int
    num_without_anchor: int
    """Samples that are not in the table, because no drafter could train on them."""
    sha256: str

    @property
    def num_samples(self) -> int:
        return self.table.num_rows

    @property
    def num_positions(self) -> int:
        """Recorded positions of all samples, padding not counted."""
        return int(self.column("n").sum(dtype=np.int64))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample that the target is run on [num_samples] i64: all up to the last recorded one."""
        return self.column("first").astype(np.int64) + self.column("n")

    def column(self, name: str) -> np.ndarray:
        """A number column [num_samples]."""
        return self.table.column(name).to_numpy()


def make_plan(
    samples: SampleTable, *, bytes_per_position: float, segment_positions: int | None = None, window: int | None = None
) -> Plan:
    """The plan of all samples that hold an anchor, in the order of their content.

    With `window` tokens more than that many before a sample's first anchor are not recorded. Raises UserError
    when an asked `segment_positions` cannot hold the longest sample.
    """
    ends = samples.column("num_recorded").astype(np.int64)  # [N]
    rows = np.flatnonzero(ends > 0)
    # The content decides, and where two samples are the same, the row: no other order is hidden in the store.
    rows = rows[np.lexsort((rows, samples.column("content")[rows]))]
    first = np.zeros(len(rows), dtype=np.int64)
    if window is not None:
        first = np.maximum(0, samples.first_anchors()[rows] - window)
    n = ends[rows] - first
    segment_positions, segments, positions = lay_out(aligned(n), bytes_per_position, segment_positions)
    places = {"segment": segments, "position": positions, "n": n, "first": first}
    table = plan_table(samples, rows, places)
    return Plan(
        table=table,
        segment_positions=segment_positions,
        num_segments=int(segments[-1]) + 1 if len(segments) else 0,
        num_without_anchor=len(samples) - len(rows),
        sha256=plan_sha256(table, segment_positions),
    )


def plan_table(samples: SampleTable, rows: np.ndarray, places: dict[str, np.ndarray]) -> pa.Table:
    """The plan as `plan/index.arrow` holds it; `places` are its columns about what is recorded and where."""
    files, rows_in_file = samples.places()
    columns: dict[str, pa.Array] = {
        "sample_id": pa.array(rows.astype(np.int64)),
        **{name: pa.array(column.astype(np.int32)) for name, column in places.items()},
        "source_line": pa.array(samples.column("source_line")[rows]),
        "tokens_file": pa.array(files[rows]),
        "tokens_row": pa.array(rows_in_file[rows]),
    }
    for name in TEXT_COLUMNS:
        codes, names = samples.codes(name)
        columns[name] = pa.DictionaryArray.from_arrays(pa.array(codes[rows]), pa.array(names, pa.string()))
    return pa.table([columns[name] for name in PLAN_SCHEMA.names], schema=PLAN_SCHEMA)


def make_groups(num_segments: int) -> list[range]:
    """The units of work: up to 32 segments each, fewer in a small store so that every worker has some.

    About 16 groups or more where there are 16 segments; knows nothing of shards, because
    batches are formed inside a group and decide the last bits of a state.
    """
    size = min(MAX_GROUP_SEGMENTS, max(1, num_segments // GROUPS_WANTED))
    return [range(start, min(start + size, num_segments)) for start in range(0, num_segments, size)]
