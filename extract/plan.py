"""Where every sample will lie in the store, decided before anything runs.

A pure function of the samples, the bytes of a position and the asked segment size; it knows
nothing of shards, devices, disks or of what is done already.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from .. import UserError
from ..store.index import PLAN_SCHEMA, plan_sha256
from ..store.samples import SampleTable
from ..store.size import CHUNK_POSITIONS

MAX_SEGMENT_BYTES = 2 * 2**30
FEWEST_SEGMENTS = 64  # where the data allow it
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

    def column(self, name: str) -> np.ndarray:
        """A number column [num_samples]."""
        return self.table.column(name).to_numpy()


def make_plan(samples: SampleTable, *, bytes_per_position: float, segment_positions: int | None = None) -> Plan:
    """The plan of all samples that hold an anchor, in the order of their content.

    Raises UserError when an asked `segment_positions` cannot hold the longest sample.
    """
    recorded = samples.column("num_recorded").astype(np.int64)  # [N]
    rows = np.flatnonzero(recorded > 0)
    # The content decides, and where two samples are the same, the row: no other order is hidden in the store.
    rows = rows[np.lexsort((rows, samples.column("content")[rows]))]
    sizes = aligned(recorded[rows])
    if segment_positions is None:
        segment_positions = choose_segment_positions(sizes, bytes_per_position)
    if len(sizes) and sizes.max() > segment_positions:
        raise UserError(
            f"segment_positions = {segment_positions} is shorter than the longest sample, {sizes.max()} positions",
            f"at least {power_of_two_from(int(sizes.max()))}",
            "raise segment_positions, or leave it out",
        )
    segments, positions = place(sizes, segment_positions)
    table = plan_table(samples, rows, segments, positions)
    return Plan(
        table=table,
        segment_positions=segment_positions,
        num_segments=int(segments[-1]) + 1 if len(segments) else 0,
        num_without_anchor=len(samples) - len(rows),
        sha256=plan_sha256(table, segment_positions),
    )


def aligned(lengths: np.ndarray) -> np.ndarray:
    """Lengths rounded up to whole chunks of positions."""
    return -(-lengths // CHUNK_POSITIONS) * CHUNK_POSITIONS


def choose_segment_positions(sizes: np.ndarray, bytes_per_position: float) -> int:
    """A power of two: at most 2 GiB, small enough for 64 segments, but never below the longest sample.

    `sizes` [N] are aligned. One rule gives way to the next in that order reversed.
    """
    largest = power_of_two_to(MAX_SEGMENT_BYTES / bytes_per_position)
    enough = power_of_two_to(int(sizes.sum()) / FEWEST_SEGMENTS)
    longest = power_of_two_from(int(sizes.max(initial=CHUNK_POSITIONS)))
    return max(min(largest, enough), longest)


def power_of_two_to(limit: float) -> int:
    """The largest power of two up to `limit`, at least one chunk."""
    return max(CHUNK_POSITIONS, 1 << max(0, int(limit).bit_length() - 1))


def power_of_two_from(limit: int) -> int:
    """The smallest power of two from `limit` on."""
    return 1 << (limit - 1).bit_length()


def place(sizes: np.ndarray, segment_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Next fit: the segment [N] and the position inside it [N] of each sample, none straddling.

    A sample that does not fit what is left of a segment opens the next one.
    """
    segments = np.empty(len(sizes), dtype=np.int32)
    positions = np.empty(len(sizes), dtype=np.int32)
    segment = used = 0
    for i, size in enumerate(sizes.tolist()):
        if used + size > segment_positions:
            segment, used = segment + 1, 0
        segments[i], positions[i] = segment, used
        used += size
    return segments, positions


def plan_table(samples: SampleTable, rows: np.ndarray, segments: np.ndarray, positions: np.ndarray) -> pa.Table:
    """The plan as `plan/index.arrow` holds it."""
    files, rows_in_file = samples.places()
    columns: dict[str, pa.Array] = {
        "sample_id": pa.array(rows.astype(np.int64)),
        "segment": pa.array(segments),
        "position": pa.array(positions),
        "n": pa.array(samples.column("num_recorded")[rows].astype(np.int32)),
        "source_line": pa.array(samples.column("source_line")[rows]),
        "tokens_file": pa.array(files[rows]),
        "tokens_row": pa.array(rows_in_file[rows]),
    }
    for name in ("split", "task", "source"):
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
