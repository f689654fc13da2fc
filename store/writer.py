"""Fills segments of a store and commits them: first the segment's files, then its commit.

A segment without a commit is redone by whoever comes next, so a writer may be killed anywhere.
This file knows the plan and the order of a commit; it knows no target and no device.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from .. import UserError
from .arrow_file import damaged
from .create import create_store
from .files import fsync_folder, storage_error
from .geometry import array_geometries, segment_path, states_bytes
from .index import (
    COMMIT_SCHEMA,
    STATUS_FAILED,
    STATUS_OK,
    columns,
    commit_path,
    committed_segments,
    forget_consolidated,
    read_commits,
    read_plan,
    write_commit,
)
from .manifest import Manifest, read_manifest, require_same
from .segment_writer import SegmentWriter

__all__ = ["SegmentSink", "StoreWriter", "create_store"]

RESERVED_METADATA = ("identity_sha256", "segment", "file_bytes", "format_version", "checksum")


class StoreWriter:
    """Writes segments of an existing store; any number of writers may share one, a segment each."""

    def __init__(self, store_dir: Path, manifest: Manifest) -> None:
        self.store_dir = Path(store_dir)
        stored = read_manifest(self.store_dir)
        require_same(self.store_dir, stored, manifest)
        self.manifest = manifest
        self.identity_sha256 = stored.identity_sha256  # `manifest` may have facts that an older store has not
        self.arrays = array_geometries(manifest)
        plan = columns(read_plan(self.store_dir, manifest.plan_sha256))
        self.plan = {name: plan[name] for name in ("sample_id", "segment", "position", "n")}

    def committed(self) -> set[int]:
        """The segments that need no work: each commit is read and checked, each file's size too.

        Raises UserError for a commit that is damaged or whose segment file is gone or cut.
        """
        commits = read_commits(self.store_dir, self.identity_sha256)
        for segment, sizes in commits.segments.items():
            for array, size_bytes in zip(self.arrays, sizes):
                path = segment_path(self.store_dir, array, segment)
                found = path.stat().st_size if path.exists() else None
                if found != size_bytes:
                    state = "is missing" if found is None else f"has {found} bytes"
                    raise damaged(commit_path(self.store_dir, segment), f"{path.name} {state}, not {size_bytes} bytes")
        return set(commits.segments)

    def open(self, segment: int) -> "SegmentSink":
        """Starts segment `segment` anew, beside anything written of it before."""
        if not 0 <= segment < self.manifest.num_segments:
            raise ValueError(f"segment {segment} is outside 0..{self.manifest.num_segments - 1}")
        return SegmentSink(self, segment)

    def segment_rows(self, segment: int) -> slice:
        """The rows of the plan that lie in a segment."""
        first, last = np.searchsorted(self.plan["segment"], [segment, segment + 1])
        return slice(int(first), int(last))

    def explain(self, error: OSError, path: Path) -> UserError:
        """The message for a disk that fails: what is still to write, and what is safe."""
        try:
            done, unread = committed_segments(self.store_dir), None
        except (OSError, UserError) as unread_error:  # the folder is gone, or the disk reads no more either
            done, unread = set[int](), unread_error
        is_done = np.isin(self.plan["segment"], np.fromiter(done, dtype=np.int64, count=len(done)))
        needed_bytes = states_bytes(self.manifest, self.plan["n"][~is_done], self.manifest.num_segments - len(done))
        kept = f"{int(is_done.sum())} of {len(is_done)} samples in {len(done)} committed segments are safe"
        if unread is not None:
            kept = f"what was committed cannot be told now: {unread}".splitlines()[0]
        is_most = next(iter(self.arrays.values())).codec.is_compressed
        return storage_error(error, path, needed_bytes=needed_bytes, is_most=is_most, safe=kept)


class SegmentSink:
    """One segment while it is filled: samples in any order, then `commit`, or `abort`.

    Holds no sample back: what `append` took is written. The same calls in the same order write
    the same bytes.
    """

    def __init__(self, writer: StoreWriter, segment: int) -> None:
        self.writer = writer
        self.segment = segment
        self.store_dir = writer.store_dir
        rows = writer.segment_rows(segment)
        self.plan = {name: column[rows] for name, column in writer.plan.items()}
        self.row_of = {int(sample_id): row for row, sample_id in enumerate(self.plan["sample_id"])}
        count = len(self.row_of)
        self.status = np.zeros(count, dtype=np.uint8)
        self.crc32c = {array: np.zeros(count, dtype=np.uint32) for array in ("hidden", "last")}
        self.is_written = np.zeros(count, dtype=bool)
        self.files: dict[str, SegmentWriter] = {}
        for array, geometry in writer.arrays.items():
            path = segment_path(self.store_dir, array, segment)
            self.files[array] = SegmentWriter(path, geometry, explain=self.explain)

    def explain(self, error: OSError, path: Path) -> UserError:
        """Frees what this segment wrote so far, then explains; the segment will be redone."""
        explanation = self.writer.explain(error, path)
        self.abort()
        return explanation

    def append(
        self,
        sample_id: int,
        position: int,
        planes: np.ndarray | None,
        last: np.ndarray | None = None,
        *,
        status: int = STATUS_OK,
        encoded: bool = False,
    ) -> None:
        """Writes one sample: planes [Lt, n, H] u16, last [n, H] u16 where the store has it.

        With `encoded` both are rows of the store's codec instead: [Lt, n, row_bytes] and
        [n, row_bytes] u8. A sample that could not be recorded comes with status failed and no
        planes. Raises ValueError for a sample, place, length or status that the plan does not foresee.
        """
        row = self.row_of.get(int(sample_id))
        if row is None or self.plan["position"][row] != position or self.is_written[row]:
            raise ValueError(f"sample {sample_id} at position {position} is not awaited in segment {self.segment}")
        if (planes is None) != (status == STATUS_FAILED) or not STATUS_OK <= status <= STATUS_FAILED:
            raise ValueError(f"sample {sample_id}: status {status} {'without' if planes is None else 'with'} states")
        if (last is None) != (planes is None or "last" not in self.files):
            raise ValueError(f"sample {sample_id}: last hidden state {'missing' if last is None else 'not awaited'}")
        given = {"hidden": planes, "last": None if last is None else last[None]}
        for array, states in given.items():
            if states is not None:
                if states.shape[1] != self.plan["n"][row]:
                    raise ValueError(f"sample {sample_id} has {states.shape[1]} positions, not {self.plan['n'][row]}")
                self.crc32c[array][row] = self.files[array].append(position, states, encoded=encoded)
        self.status[row] = status
        self.is_written[row] = True

    def commit(self, metadata: Mapping[str, str]) -> None:
        """Makes the segment durable, then says so in `commits/`.

        `metadata` is provenance (host, time, versions) and the only part of the file that may
        differ between two runs. Raises ValueError while samples of the segment are missing.
        """
        missing = self.plan["sample_id"][~self.is_written]
        if len(missing):
            total = len(self.is_written)
            raise ValueError(f"segment {self.segment}: {len(missing)} of {total} samples missing, first {missing[0]}")
        if set(metadata) & set(RESERVED_METADATA):
            raise ValueError(f"metadata uses a reserved name: {sorted(set(metadata) & set(RESERVED_METADATA))}")
        self.withdraw()
        file_bytes = [file.finish() for file in self.files.values()]
        own = {
            "format_version": str(self.writer.manifest.version),
            "identity_sha256": self.writer.identity_sha256,
            "file_bytes": json.dumps(file_bytes),
        }
        write_commit(self.store_dir, self.segment, self.commit_table(), {**metadata, **own}, explain=self.explain)

    def withdraw(self) -> None:
        """Makes sure that nothing durable speaks of what these files are about to replace.

        The folder is synced even where no commit is seen: whoever removed it may not have.
        """
        path = commit_path(self.store_dir, self.segment)
        try:
            forget_consolidated(self.store_dir)
            path.unlink(missing_ok=True)
            fsync_folder(path.parent)
        except OSError as error:
            raise self.explain(error, path) from error

    def commit_table(self) -> pa.Table:
        """The rows of the commit, in the order of the plan."""
        values = {
            **self.plan,
            "crc32c": self.crc32c["hidden"],
            "last_crc32c": self.crc32c["last"],
            "status": self.status,
        }
        return pa.table([pa.array(values[field.name]) for field in COMMIT_SCHEMA], schema=COMMIT_SCHEMA)

    def abort(self) -> None:
        """Removes what was written aside; an earlier committed segment stays. Raises no OSError."""
        for file in self.files.values():
            file.abort()
