"""The readable samples of a store as columns: the plan, joined with what is committed and healthy.

Makes no Python object per sample: columns are views of the mapped files, texts stay codes until someone asks.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from .arrow_file import damaged
from .index import STATUS_NAMES, STATUS_OK, Commits, coded, columns, commit_path
from .tokens_file import TEXT_COLUMNS

COMPARED = ("sample_id", "segment", "position", "n")
HASHED = ("crc32c", "last_crc32c", "status")


@dataclass(frozen=True)
class SampleIndex:
    """The readable samples as numpy columns [N], in the order of the plan (segment, position); read only.

    `n` counts recorded positions; `position` is the place of the first one inside the segment, `first` the token
    it belongs to. Text columns are object arrays whose few strings are shared, made when first asked for.
    """

    sample_id: np.ndarray  # i64
    segment: np.ndarray  # i32
    position: np.ndarray  # i32
    n: np.ndarray  # i32
    first: np.ndarray  # i32, 0 in a store without a window
    crc32c: np.ndarray  # u32, over the chunk checksums of `hidden`
    last_crc32c: np.ndarray  # u32, the same of `last`, 0 where the store has none
    source_line: np.ndarray  # i64
    tokens_file: np.ndarray  # i32
    tokens_row: np.ndarray  # i32
    texts: dict[str, tuple[np.ndarray, list[str]]]  # by column: codes [N] i32, and what they stand for

    @cached_property
    def split(self) -> np.ndarray:
        return self.spelled("split")

    @cached_property
    def task(self) -> np.ndarray:
        return self.spelled("task")

    @cached_property
    def source(self) -> np.ndarray:
        return self.spelled("source")

    @cached_property
    def origin(self) -> np.ndarray:
        return self.spelled("origin")

    def spelled(self, name: str) -> np.ndarray:
        codes, texts = self.texts[name]
        return np.array([*texts, None], dtype=object)[codes]

    def numbers(self, name: str, text: str) -> np.ndarray:
        """The numbers [k] of the samples whose text column `name` is `text`."""
        codes, texts = self.texts[name]
        is_wanted = np.array([*(own == text for own in texts), False])  # [texts + 1] bool
        return np.flatnonzero(is_wanted[codes])


def join(store_dir: Path, plan_table: pa.Table, commits: Commits) -> tuple[SampleIndex, dict[str, int]]:
    """The healthy committed samples, and how many have which status.

    Raises UserError where commits and plan speak of different samples.
    """
    plan, committed = columns(plan_table), columns(commits.table)
    rows = None  # of the plan that are committed; None: all
    if not is_same(plan, committed):
        rows = np.flatnonzero(np.isin(plan["segment"], commits.file_bytes[:, 0]))
        planned = {name: plan[name][rows] for name in COMPARED}
        if not is_same(planned, committed):
            segment = first_difference(planned, committed)
            raise damaged(commit_path(store_dir, segment), "its samples are not those of the plan")
    is_ok = committed["status"] == STATUS_OK
    statuses = {name: int(np.count_nonzero(committed["status"] == code)) for code, name in enumerate(STATUS_NAMES)}
    texts = {name: coded(plan_table, name) for name in TEXT_COLUMNS}
    if not is_ok.all():
        rows = np.flatnonzero(is_ok) if rows is None else rows[is_ok]
        committed = {name: column[is_ok] for name, column in committed.items()}
    if rows is not None:
        plan = {name: column[rows] for name, column in plan.items()}
        texts = {name: (codes[rows], spelled) for name, (codes, spelled) in texts.items()}
    index = SampleIndex(**plan, crc32c=committed["crc32c"], last_crc32c=committed["last_crc32c"], texts=texts)
    return index, statuses


def is_same(planned: dict[str, np.ndarray], committed: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(planned[name], committed[name]) for name in COMPARED)


def first_difference(planned: dict[str, np.ndarray], committed: dict[str, np.ndarray]) -> int:
    """The first segment whose committed samples differ from the planned ones."""
    counts = [np.bincount(table["segment"]) for table in (planned, committed)]
    length = max(len(count) for count in counts)
    uneven = np.flatnonzero(np.subtract(*(np.pad(count, (0, length - len(count))) for count in counts)))
    if len(uneven):
        return int(uneven[0])
    wrong = np.any([planned[name] != committed[name] for name in COMPARED], axis=0)
    return int(planned["segment"][np.argmax(wrong)])


def snapshot(commits: Commits, plan_sha256: str, segments: Iterable[int] | None = None) -> str:
    """sha256 of what is committed in these segments (default: all), whoever wrote it and wherever it is listed.

    Over the line `snapshot PLAN_SHA256 NUM_SEGMENTS`, then the segments and the bytes of their files (i64), then
    `crc32c` (u32), `last_crc32c` (u32) and `status` (u8) of their samples in the order of the plan. Raises KeyError
    with a segment that is not committed.
    """
    weights, rows = commits.file_bytes, columns(commits.table)
    if segments is not None:
        wanted = np.unique(np.fromiter(segments, dtype=np.int64))
        missing = np.setdiff1d(wanted, weights[:, 0])
        if len(missing):
            raise KeyError(int(missing[0]))
        weights = weights[np.isin(weights[:, 0], wanted)]
        is_wanted = np.isin(rows["segment"], wanted)
        rows = {name: rows[name][is_wanted] for name in HASHED}
    digest = hashlib.sha256(f"snapshot {plan_sha256} {len(weights)}\n".encode())
    digest.update(np.ascontiguousarray(weights, dtype="<i8").data if weights.size else b"")
    for name in HASHED:
        digest.update(np.ascontiguousarray(rows[name]).data)
    return digest.hexdigest()
