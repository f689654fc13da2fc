"""Checks a whole store and names every fault, where reading stops at the first one.

Every committed chunk is read and compared with its checksum, every commit with the plan, every
sample's tokens with theirs; the values of some samples are looked at for what no target puts out.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import google_crc32c
import numpy as np

from .. import UserError
from .files import flat_bytes
from .frozen import read_frozen
from .index import (
    CONSOLIDATED_NAME,
    STATUS_FAILED,
    STATUS_OK,
    check_plan,
    columns,
    committed_segments,
    plan_sha256,
    read_commit,
    read_consolidated,
    read_plan,
)
from .manifest import MANIFEST_NAME, Manifest, read_manifest
from .reader import COMPARED, open_tokens
from .segment import ABSENT, SegmentDamage, SegmentReader, array_geometries, segment_path

SLICE_POSITIONS = 1024  # positions read at once, so that memory stays small for long samples
MAX_INSPECTED = 256  # samples whose values are looked at
SIGN, EXPONENT = np.uint16(0x8000), np.uint16(0x7F80)  # of a bfloat16

Columns = dict[str, np.ndarray]


@dataclass(slots=True)
class VerifyReport:
    """What was checked and everything that is wrong; a store is sound when `faults` is empty."""

    checked: int = 0  # committed samples
    bytes: int = 0  # bytes of states read
    segments: int = 0  # committed segments
    num_segments: int = 0  # segments of the plan
    faults: list[str] = field(default_factory=list)


def verify(store_dir: Path, progress: Callable[[int], object] | None = None) -> VerifyReport:
    """Checks everything that is committed; `progress` is told the bytes of each slice read."""
    report = VerifyReport()
    with noting(report):
        manifest = read_manifest(Path(store_dir))
        Verification(Path(store_dir), manifest, report, progress or (lambda size_bytes: None)).run()
    return report


@contextmanager
def noting(report: VerifyReport) -> Iterator[None]:
    """Notes an error of its body as one fault of the store and goes on after the body."""
    try:
        yield
    except UserError as error:
        report.faults.append(error.happened)
    except (SegmentDamage, OSError) as error:
        report.faults.append(str(error))


class Verification:
    """One pass over a store."""

    def __init__(
        self, store_dir: Path, manifest: Manifest, report: VerifyReport, progress: Callable[[int], object]
    ) -> None:
        self.store_dir = store_dir
        self.manifest = manifest
        self.report = report
        self.progress = progress
        self.arrays = array_geometries(manifest)
        self.inspect_every = max(1, manifest.num_samples // MAX_INSPECTED)

    def run(self) -> None:
        """Manifest and plan first: without them nothing else can be judged."""
        self.report.num_segments = self.manifest.num_segments
        self.check_array_metadata()
        plan = self.read_plan()
        commits = self.read_commits(plan)
        with noting(self.report):
            self.check_consolidated(commits)
        for segment, (rows, sizes) in commits.items():
            for array, size_bytes in zip(self.arrays, sizes):
                with noting(self.report):
                    self.check_segment(array, segment, rows, size_bytes)
            self.report.segments += 1
            self.report.checked += len(rows["sample_id"])
        with noting(self.report):
            self.check_tokens(plan)
        with noting(self.report):
            read_frozen(self.store_dir)

    def check_array_metadata(self) -> None:
        for array, geometry in self.arrays.items():
            path = self.store_dir / array / MANIFEST_NAME
            try:
                is_same = json.loads(path.read_bytes()) == geometry.array_json()
            except (OSError, ValueError):
                is_same = False
            if not is_same:
                self.report.faults.append(f"{path}: missing, or not the array that the manifest describes")

    def read_plan(self) -> Columns:
        """The plan's numeric columns, checked for the format and against the manifest."""
        table = read_plan(self.store_dir, self.manifest.plan_sha256)
        with noting(self.report):
            if plan_sha256(table, self.manifest.segment_positions) != self.manifest.plan_sha256:
                self.report.faults.append("plan/index.arrow: its content is not the plan that the manifest names")
            try:
                check_plan(table, self.manifest.segment_positions, self.manifest.num_segments)
            except ValueError as error:
                self.report.faults.append(f"plan/index.arrow: {error}")
        return columns(table)

    def read_commits(self, plan: Columns) -> dict[int, tuple[Columns, tuple[int, ...]]]:
        """The sound commits by segment: their rows, and the bytes of the segment's files."""
        sound: dict[int, tuple[Columns, tuple[int, ...]]] = {}
        for segment in sorted(committed_segments(self.store_dir)):
            with noting(self.report):
                table, sizes = read_commit(self.store_dir, segment, self.manifest.plan_sha256)
                rows, is_here = columns(table), plan["segment"] == segment
                if all(np.array_equal(rows[name], plan[name][is_here]) for name in COMPARED):
                    sound[segment] = (rows, sizes)
                else:
                    self.report.faults.append(f"commits: segment {segment} holds other samples than the plan")
        return sound

    def check_consolidated(self, commits: dict[int, tuple[Columns, tuple[int, ...]]]) -> None:
        """`index.arrow`, where it is there, says what the commits say."""
        consolidated = read_consolidated(self.store_dir, self.manifest.plan_sha256)
        if consolidated is None:
            return
        rows = columns(consolidated.table)
        for segment, (expected, sizes) in commits.items():
            is_here = rows["segment"] == segment
            is_same = all(np.array_equal(rows[name][is_here], column) for name, column in expected.items())
            if not is_same or consolidated.segments.get(segment) != sizes:
                self.report.faults.append(f"{CONSOLIDATED_NAME}: segment {segment} differs from its commit")
        for segment in sorted(set(consolidated.segments) - set(commits)):
            self.report.faults.append(f"{CONSOLIDATED_NAME}: segment {segment} has no sound commit")

    def check_segment(self, array: str, segment: int, rows: Columns, size_bytes: int) -> None:
        """Every chunk of every sample of one segment file, and that failed samples hold none."""
        path = segment_path(self.store_dir, array, segment)
        reader = SegmentReader(path, self.arrays[array], file_bytes=size_bytes)
        committed = rows["crc32c" if array == "hidden" else "last_crc32c"]
        for row, sample_id in enumerate(rows["sample_id"]):
            position, n, status = (int(rows[name][row]) for name in ("position", "n", "status"))
            where = f"{path}: segment {segment}, sample {sample_id}"
            if status == STATUS_FAILED:
                chunk = reader.geometry.chunk
                if (reader.index[position // chunk : -(-(position + n) // chunk)] != ABSENT).any():
                    self.report.faults.append(f"{where}: committed as failed, but holds states")
                continue
            inspected = status == STATUS_OK and int(sample_id) % self.inspect_every == 0
            try:
                crc32c = self.read_sample(reader, position, n, where if inspected else None)
            except SegmentDamage as error:
                tap = "" if error.tap is None else f", tap {self.tap_name(array, error.tap)}"
                self.report.faults.append(f"{where}{tap}: {error.reason}")
                continue
            if crc32c != committed[row]:
                self.report.faults.append(f"{where}: its states are not those of the commit")
        reader.close()

    def read_sample(self, reader: SegmentReader, position: int, n: int, where: str | None) -> int:
        """Reads one sample slice by slice; returns the crc32c over its chunk checksums."""
        crc32c = 0
        for start in range(0, n, SLICE_POSITIONS):
            count = min(SLICE_POSITIONS, n - start)
            planes = np.empty((reader.geometry.taps, count, reader.geometry.hidden), dtype=np.uint16)
            stored = reader.read(position, count, planes, start=start)
            crc32c = google_crc32c.extend(crc32c, flat_bytes(stored))
            self.report.bytes += planes.nbytes
            self.progress(planes.nbytes)
            if where is not None and start == 0:
                array = reader.path.parent.name
                names = [self.tap_name(array, tap) for tap in range(reader.geometry.taps)]
                self.report.faults += [f"{where}: {fault}" for fault in value_faults(planes, names)]
        return crc32c

    def tap_name(self, array: str, tap: int) -> str:
        return "last" if array == "last" else str(self.manifest.tap_layers[tap])

    def check_tokens(self, plan: Columns) -> None:
        """Every sample's tokens, against their checksum and the recorded length."""
        table = open_tokens(self.store_dir, plan)
        for sample_id, n, file, row in zip(
            *(plan[name].tolist() for name in ("sample_id", "n", "tokens_file", "tokens_row"))
        ):
            with noting(self.report):
                ids, _ = table.tokens_at(file, row)
                if len(ids) <= n:
                    self.report.faults.append(f"plan: sample {sample_id} has {len(ids)} tokens and {n} recorded ones")


def value_faults(planes: np.ndarray, names: list[str]) -> list[str]:
    """What no target puts out: zero, constant or non-finite positions, taps that are copies.

    planes [Lt, n, H] u16, bits of bfloat16; names [Lt].
    """
    magnitude = planes & ~SIGN
    looks = {
        "zero": (magnitude == 0).all(axis=2),
        "constant": (planes == planes[..., :1]).all(axis=2) & (planes.shape[2] > 1),
        "non-finite": ((magnitude & EXPONENT) == EXPONENT).any(axis=2),
    }  # each [Lt, n] bool
    faults = []
    for look, found in looks.items():
        for tap, position in np.argwhere(found)[:1]:
            faults.append(f"{int(found.sum())} states are {look}, first tap {names[tap]}, position {position}")
    copies = [
        (names[a], names[b]) for b in range(len(planes)) for a in range(b) if np.array_equal(planes[a], planes[b])
    ]
    return faults + [f"taps {a} and {b} are identical" for a, b in copies[:1]]
