"""Reads a store: which samples are there, their tokens, and their states into the caller's memory.

Only what is committed and healthy can be read; every state is checked against its checksum on the
way. Runs in the loader process: numpy and Arrow, no torch. Opening a store makes no Python object
per sample, so a million samples open in well under a second.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa

from .. import UserError
from .arrow_file import damaged
from .files import flat_bytes
from .index import (
    CONSOLIDATED_NAME,
    STATUS_NAMES,
    STATUS_OK,
    Commits,
    columns,
    commit_path,
    read_commits,
    read_consolidated,
    read_plan,
    text_column,
)
from .manifest import Manifest, read_manifest
from .samples import SampleTable
from .segment import SegmentDamage, SegmentReader, array_geometries, segment_path
from .tokens_file import tokens_name

MAX_OPEN_SEGMENTS = 128
COMPARED = ("sample_id", "segment", "position", "n")


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """The readable samples as numpy columns [N], in the order of the plan (segment, position).

    `n` counts recorded positions; `position` is the first one inside the segment. Text columns are
    object arrays whose few strings are shared.
    """

    sample_id: np.ndarray  # i64
    segment: np.ndarray  # i32
    position: np.ndarray  # i32
    n: np.ndarray  # i32
    crc32c: np.ndarray  # u32, over the chunk checksums of `hidden`
    last_crc32c: np.ndarray  # u32, the same of `last`, 0 where the store has none
    split: np.ndarray
    task: np.ndarray
    source: np.ndarray
    source_line: np.ndarray  # i64
    tokens_file: np.ndarray  # i32
    tokens_row: np.ndarray  # i32


class StoreReader:
    """A store opened for reading, as of this moment: what is committed later is not seen.

    Raises UserError where there is no store, where it is damaged, and, without `partial`, where
    segments are still missing.
    """

    def __init__(self, store_dir: Path, *, partial: bool = False) -> None:
        self.store_dir = Path(store_dir)
        self.manifest = read_manifest(self.store_dir)
        self.geometries = array_geometries(self.manifest)
        plan_table = read_plan(self.store_dir, self.manifest.plan_sha256)
        commits = current_commits(self.store_dir, self.manifest)
        if len(commits.segments) < self.manifest.num_segments and not partial:
            raise UserError(
                f"the store {str(self.store_dir)!r} is not complete: "
                f"{len(commits.segments)} of {self.manifest.num_segments} segments are committed",
                "a complete store",
                "run the same extract again to complete it, or read what is there with --partial",
            )
        self.file_bytes = commits.segments
        self.samples, self.num_statuses = join(self.store_dir, plan_table, commits)
        self.table = open_tokens(self.store_dir, columns(plan_table))
        self.segments: OrderedDict[tuple[str, int], SegmentReader] = OrderedDict()

    def __len__(self) -> int:
        return len(self.samples.sample_id)

    def rows(self, split: str) -> np.ndarray:
        """The numbers i [k] of all samples of a split."""
        return np.flatnonzero(self.samples.split == split)

    def tokens(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids [S] u32 (a read-only view) and loss mask [S] bool of sample i; S is at least n + 1."""
        return self.table.tokens_at(int(self.samples.tokens_file[i]), int(self.samples.tokens_row[i]))

    def read(
        self,
        i: int,
        out: np.ndarray,
        *,
        taps: Sequence[int] | None = None,
        start: int = 0,
        stop: int | None = None,
        verify: bool = True,
    ) -> None:
        """Fills `out` with the taps of sample i at its positions start to stop (default: n).

        out [Lt', stop - start, H] u16 (bfloat16 bits), each plane contiguous; taps: numbers into
        `manifest.tap_layers`, in the order of `out`; default: all. Raises UserError, naming file,
        segment, sample and tap, for anything that is not what was committed.
        """
        self.fill("hidden", i, out, taps, start, stop, verify)

    def read_last(
        self, i: int, out: np.ndarray, *, start: int = 0, stop: int | None = None, verify: bool = True
    ) -> None:
        """Fills `out` [stop - start, H] u16 with the last hidden states (before the final norm)."""
        if "last" not in self.geometries:
            raise UserError(
                f"the store {str(self.store_dir)!r} holds no last hidden states",
                "a store made with `dflash extract --last`",
                "extract again with --last, or choose a loss that needs none",
            )
        self.fill("last", i, out[None], None, start, stop, verify)

    def fill(
        self,
        array: str,
        i: int,
        out: np.ndarray,
        taps: Sequence[int] | None,
        start: int,
        stop: int | None,
        verify: bool,
    ) -> None:
        n = int(self.samples.n[i])
        stop = n if stop is None else stop
        if not 0 <= start < stop <= n:
            raise ValueError(f"positions {start} to {stop} of sample {i}, which has {n}")
        position, segment = int(self.samples.position[i]), int(self.samples.segment[i])
        try:
            reader = self.segment(array, segment)
            stored = reader.read(position, stop - start, out, taps=taps, start=start, verify=verify)
            is_whole = stop - start == n and (taps is None or list(taps) == list(range(reader.geometry.taps)))
            committed = self.samples.crc32c if array == "hidden" else self.samples.last_crc32c
            if verify and is_whole and google_crc32c.value(flat_bytes(stored)) != committed[i]:
                raise SegmentDamage(reader.path, "its states are not those of the commit", position=position)
        except (SegmentDamage, OSError) as error:
            raise self.explain(error, array, i) from error

    def segment(self, array: str, segment: int) -> SegmentReader:
        """The open segment; the longest unused one is closed when too many are open."""
        key = (array, segment)
        if key in self.segments:
            self.segments.move_to_end(key)
            return self.segments[key]
        sizes = dict(zip(self.geometries, self.file_bytes[segment]))
        path = segment_path(self.store_dir, array, segment)
        reader = SegmentReader(path, self.geometries[array], file_bytes=sizes[array])
        self.segments[key] = reader
        if len(self.segments) > MAX_OPEN_SEGMENTS:
            self.segments.popitem(last=False)[1].close()
        return reader

    def explain(self, error: SegmentDamage | OSError, array: str, i: int) -> UserError:
        """What is wrong where, in the words of the user: file, segment, sample, tap."""
        segment = int(self.samples.segment[i])
        path = segment_path(self.store_dir, array, segment)
        where = f"segment {segment}, sample {int(self.samples.sample_id[i])}"
        reason = str(error)
        if isinstance(error, SegmentDamage):
            reason = error.reason
            if error.tap is not None:
                layer = "last" if array == "last" else self.manifest.tap_layers[error.tap]
                where += f", tap {layer}"
            if error.position is not None:
                first = error.position - int(self.samples.position[i])
                where += f", from its position {first}"
        commit = commit_path(self.store_dir, segment)
        advice = (
            f"delete {str(commit)!r} and {CONSOLIDATED_NAME}, then run the same extract again: it redoes this segment"
        )
        if isinstance(error, OSError):
            advice = "check the disk and its log, the mount, and the limit of open files"
        return UserError(
            f"{str(path)!r} cannot be trusted: {reason} ({where})", "the states that were committed", advice
        )

    def close(self) -> None:
        """Closes all segment files; reading opens them again."""
        while self.segments:
            self.segments.popitem()[1].close()

    def __enter__(self) -> "StoreReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def current_commits(store_dir: Path, manifest: Manifest) -> Commits:
    """The commits: from `index.arrow` where it is there and complete, else one by one."""
    consolidated = read_consolidated(store_dir, manifest.plan_sha256)
    if consolidated is not None and len(consolidated.segments) == manifest.num_segments:
        return consolidated
    return read_commits(store_dir, manifest.plan_sha256)


def open_tokens(store_dir: Path, plan: dict[str, np.ndarray]) -> SampleTable:
    """The token files of a store; UserError where they hold fewer samples than the plan names."""
    table = SampleTable(store_dir / "plan")
    files = plan["tokens_file"]
    number = int(files.max(initial=0))
    lengths = np.diff(table.file_first_rows)
    if number < len(lengths):
        short = files[plan["tokens_row"] >= lengths[files]]
        number = int(short[0]) if len(short) else -1
    if number >= 0:
        path = store_dir / "plan" / tokens_name(number)
        raise damaged(path, "it is missing or holds fewer samples than the plan names")
    return table


def join(store_dir: Path, plan_table: pa.Table, commits: Commits) -> tuple[SampleIndex, dict[str, int]]:
    """The healthy committed samples, and how many have which status.

    Raises UserError where commits and plan speak of different samples.
    """
    plan, committed = columns(plan_table), columns(commits.table)
    done = np.fromiter(commits.segments, dtype=np.int32, count=len(commits.segments))
    is_done = np.isin(plan["segment"], done)
    planned = {name: plan[name][is_done] for name in COMPARED}
    segment = first_difference(planned, committed)
    if segment is not None:
        raise damaged(commit_path(store_dir, segment), "its samples are not those of the plan")
    statuses = np.bincount(committed["status"], minlength=len(STATUS_NAMES))
    is_ok = committed["status"] == STATUS_OK
    chosen = {name: column[is_done][is_ok] for name, column in plan.items()}
    for name in ("split", "task", "source"):
        codes, texts = text_column(plan_table, name)
        chosen[name] = np.array([*texts, None], dtype=object)[codes[is_done][is_ok]]
    index = SampleIndex(**chosen, crc32c=committed["crc32c"][is_ok], last_crc32c=committed["last_crc32c"][is_ok])
    return index, {name: int(statuses[code]) for code, name in enumerate(STATUS_NAMES)}


def first_difference(planned: dict[str, np.ndarray], committed: dict[str, np.ndarray]) -> int | None:
    """The first segment whose committed samples differ from the planned ones, None without any."""
    counts = [np.bincount(table["segment"]) for table in (planned, committed)]
    length = max(len(count) for count in counts)
    uneven = np.flatnonzero(np.subtract(*(np.pad(count, (0, length - len(count))) for count in counts)))
    if len(uneven):
        return int(uneven[0])
    for name in COMPARED:
        wrong = np.flatnonzero(planned[name] != committed[name])
        if len(wrong):
            return int(planned["segment"][wrong[0]])
    return None
