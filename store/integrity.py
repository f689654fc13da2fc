"""Checks a whole store and names every fault, where reading stops at the first one.

All of it: manifest, plan, array metadata, commits, consolidated index, tokens, frozen parts, and through
`segment_check` every committed chunk and every value. Threads share the work, a segment each.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .. import UserError
from ..progress import bar
from .create import require_fitting
from .frozen import CONFIG_PATH, check_frozen
from .geometry import array_geometries
from .index import (
    CONSOLIDATED_NAME,
    PLAN_PATH,
    columns,
    commit_path,
    committed_segments,
    read_commit,
    read_consolidated,
    read_plan,
)
from .links import require_array_metadata, require_own_manifest
from .manifest import MANIFEST_NAME, Manifest, read_manifest
from .sample_index import COMPARED
from .segment_check import Columns, Fault, SegmentCheck
from .state_error import measured_error
from .tokens_check import FROM_DATA, TokensCheck

MAX_WORKERS = 8
ANEW = "delete it and run the same extract again, which writes it anew"
BACKUP = "copy the file from a backup, or bring back the older one if two stores were mixed up"
FROM_COMMITS = f"delete {CONSOLIDATED_NAME}; the same extract makes it again from the commits"

Job = Callable[[], list[Fault]]
Commit = tuple[Columns, tuple[int, ...]]  # its rows, and the bytes of its segment's files


@dataclass(slots=True)
class VerifyReport:
    """What was checked and everything that is wrong; a store is sound when `faults` is empty."""

    checked: int = 0  # committed samples
    bytes: int = 0  # bytes of segment files read
    segments: int = 0  # committed segments
    num_segments: int = 0  # segments of the plan
    faults: list[Fault] = field(default_factory=list)
    uncommitted: list[int] = field(default_factory=list)  # segments without a commit, no fault by itself
    is_finished: bool = False  # there is an `index.arrow`: all that was asked for is committed

    @property
    def damaged_segments(self) -> list[int]:
        """The segments that extract would have to write again."""
        return sorted({fault.segment for fault in self.faults if fault.segment is not None})

    @property
    def index_faults(self) -> list[Fault]:
        """Those of `index.arrow`: it repeats the commits, so they speak of no segment."""
        return [fault for fault in self.faults if fault.advice == FROM_COMMITS]


def verify(store_dir: Path, *, workers: int | None = None) -> VerifyReport:
    """Checks everything that is committed, with a bar in bytes; `workers` threads, default one per core, at most 8.

    Raises UserError where there is no store.
    """
    report = VerifyReport()
    require_store(store_dir)
    is_there = (Path(store_dir) / MANIFEST_NAME).exists()
    with noting(report.faults, advice=None if is_there else BACKUP):
        manifest = read_manifest(Path(store_dir))
        workers = workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
        Verification(Path(store_dir), manifest, report, workers).run()
    return report


def require_store(store_dir: Path) -> None:
    """Raises UserError where there is no store; a folder with a plan is one, whatever it lacks."""
    if not (Path(store_dir) / PLAN_PATH).exists():
        read_manifest(store_dir)


@contextmanager
def noting(faults: list[Fault], segment: int | None = None, advice: str | None = None) -> Iterator[None]:
    """Notes an error of its body as one fault of the store and goes on after the body."""
    try:
        yield
    except UserError as error:
        faults.append(Fault(error.happened, segment, advice or error.advice))
    except OSError as error:
        faults.append(Fault(str(error), segment, advice or "check the disk and its log, and the mount"))


class Verification:
    """One pass over a store."""

    def __init__(self, store_dir: Path, manifest: Manifest, report: VerifyReport, workers: int) -> None:
        self.store_dir = store_dir
        self.manifest = manifest
        self.identity_sha256 = manifest.identity_sha256
        self.report = report
        self.faults = report.faults
        self.workers = workers
        self.lock = threading.Lock()
        self.bar: Any = None

    def run(self) -> None:
        """The small files first, here; then segments, tokens and frozen parts, a thread each."""
        self.report.num_segments = self.manifest.num_segments
        self.check_array_metadata()
        plan = self.read_plan()
        commits = self.read_commits(None if plan is None else columns(plan))
        with noting(self.faults, advice=FROM_COMMITS):
            self.check_consolidated(commits)
        with noting(self.faults):
            measured_error(self.store_dir)
        jobs: list[Job] = [self.segment_job(segment, *commit) for segment, commit in commits.items()]
        if plan is not None:
            with noting(self.faults, advice=FROM_DATA):
                tokens = TokensCheck(self.store_dir, self.manifest, plan)
                self.faults += tokens.column_faults()
                jobs += tokens.jobs()
        is_finished = self.report.is_finished or len(commits) == self.manifest.num_segments
        if is_finished or (self.store_dir / CONFIG_PATH).exists():
            jobs.append(self.frozen_job)
        total = sum(sum(sizes) for _, sizes in commits.values())
        with bar("verify", "B", total=total, unit_scale=True) as self.bar, ThreadPoolExecutor(self.workers) as pool:
            futures = [pool.submit(job) for job in jobs]
            try:
                for future in futures:
                    self.faults += future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        self.report.segments = len(commits)
        self.report.checked = sum(len(rows["sample_id"]) for rows, _ in commits.values())

    def progress(self, size_bytes: int) -> None:
        with self.lock:
            self.report.bytes += size_bytes
            self.bar.update(size_bytes)

    def check_array_metadata(self) -> None:
        for array in array_geometries(self.manifest):
            with noting(self.faults, advice=ANEW):
                require_array_metadata(self.store_dir, self.manifest, array)

    def read_plan(self) -> pa.Table | None:
        """The plan, checked for the format and against the manifest; None where it cannot be trusted."""
        with noting(self.faults, advice=ANEW):
            table = read_plan(self.store_dir, self.manifest.plan_sha256)
            with noting(self.faults, advice=BACKUP):
                require_own_manifest(self.store_dir, self.manifest, table)
            try:
                require_fitting(self.manifest, table)
                return table
            except ValueError as error:
                self.faults.append(Fault(f"{PLAN_PATH}: {error}", advice=ANEW))
        return None

    def read_commits(self, plan: Columns | None) -> dict[int, Commit]:
        """The sound commits by segment; without a plan they are taken as they are."""
        sound: dict[int, Commit] = {}
        num_files = len(array_geometries(self.manifest))
        with noting(self.faults):
            committed = committed_segments(self.store_dir)
            self.report.uncommitted = sorted(set(range(self.manifest.num_segments)) - committed)
            for segment in sorted(committed):
                with noting(self.faults, segment):
                    table, sizes = read_commit(self.store_dir, segment, self.identity_sha256)
                    rows = columns(table)
                    if plan is not None and not is_planned(rows, plan, segment):
                        text = f"{commit_path(self.store_dir, segment)}: it holds other samples than the plan"
                        self.faults.append(Fault(text, segment))
                    elif len(sizes) != num_files:
                        text = f"{commit_path(self.store_dir, segment)}: it names {len(sizes)} files, not {num_files}"
                        self.faults.append(Fault(text, segment))
                    else:
                        sound[segment] = (rows, sizes)
        return sound

    def check_consolidated(self, commits: dict[int, Commit]) -> None:
        """`index.arrow`, where it is there, says what the commits say, of all of them.

        Where the two differ either may be the wrong one, so the segment is damaged: what is recorded anew is right.
        """
        consolidated = read_consolidated(self.store_dir, self.identity_sha256)
        if consolidated is None:
            return
        self.report.is_finished = True
        rows = columns(consolidated.table)
        order = np.argsort(rows["segment"], kind="stable")
        segments = rows["segment"][order]
        path = self.store_dir / CONSOLIDATED_NAME
        for segment, (expected, sizes) in commits.items():
            here = order[slice(*np.searchsorted(segments, [segment, segment + 1]))]
            is_same = all(np.array_equal(rows[name][here], column) for name, column in expected.items())
            if not is_same or consolidated.segments.get(segment) != sizes:
                text = f"{path}: segment {segment} differs from its commit; one of the two is from elsewhere"
                self.faults.append(Fault(text, segment))
        for segment in sorted(set(consolidated.segments) - set(commits)):
            self.faults.append(Fault(f"{path}: segment {segment} has no sound commit", advice=FROM_COMMITS))

    def segment_job(self, segment: int, rows: Columns, sizes: tuple[int, ...]) -> Job:
        return SegmentCheck(self.store_dir, self.manifest, segment, rows, sizes, self.progress).run

    def frozen_job(self) -> list[Fault]:
        faults: list[Fault] = []
        with noting(faults):
            check_frozen(self.store_dir, self.manifest)
        return faults


def is_planned(rows: Columns, plan: Columns, segment: int) -> bool:
    """True where a commit holds the samples that the plan has in its segment."""
    here = slice(*np.searchsorted(plan["segment"], [segment, segment + 1]))
    return all(np.array_equal(rows[name], plan[name][here]) for name in COMPARED)
