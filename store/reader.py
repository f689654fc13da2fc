"""Reads a store: which samples are there, their tokens, and their states into the caller's memory.

Only what is committed and healthy can be read; every state is checked against its checksum on the
way. Runs in the loader process: numpy and Arrow, no torch. Opening a store makes no Python object
per sample, so a million samples open in well under a second.
"""

import shlex
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import UserError, system_reason
from .arrow_file import damaged
from .buffers import stop_readahead
from .checksum import crc32c
from .geometry import array_geometries, segment_path
from .index import Commits, columns, read_commits, read_consolidated, read_plan
from .links import require_linked
from .manifest import Manifest, read_manifest
from .ranges import ALL, parse_ranges
from .sample_index import COMPARED, SampleIndex, join, snapshot
from .samples import SampleTable
from .segment_reader import SegmentReader
from .slices import SegmentDamage, Slice
from .slices_together import SlicePool
from .tokens_file import tokens_name

__all__ = ["COMPARED", "Request", "SampleIndex", "StoreReader", "current_commits", "open_tokens"]

MAX_OPEN_SEGMENTS = 128
MAX_THREADS = 4  # with which plain reads took a disk's 1.5 GB/s (virtual disk, 2026-12-01)


class Request(NamedTuple):
    """A slice of one sample and where it goes; see `StoreReader.read`."""

    i: int
    out: np.ndarray
    taps: Sequence[int] | None = None
    start: int = 0
    stop: int | None = None


class StoreReader:
    """A store opened for reading, as of this moment: what is committed later is not seen.

    Raises UserError where there is no store, where it is damaged, and, without `partial`, where
    segments that were asked for are still missing. `threads` (1 to 4) read together, inside this process; with
    `uncached` the states that were read are not kept in the page cache, for stores larger than memory.
    """

    def __init__(self, store_dir: Path, *, partial: bool = False, threads: int = 1, uncached: bool = False) -> None:
        if not 1 <= threads <= MAX_THREADS:
            raise ValueError(f"threads is {threads}, expected 1 to {MAX_THREADS}")
        self.store_dir = Path(store_dir)
        self.manifest = read_manifest(self.store_dir)
        self.geometries = array_geometries(self.manifest)
        plan_table = read_plan(self.store_dir, self.manifest.plan_sha256)
        require_linked(self.store_dir, self.manifest, plan_table)
        self.commits, is_finished = current_commits(self.store_dir, self.manifest)
        if not is_finished and not partial:
            raise UserError(
                f"the store {str(self.store_dir)!r} is not complete: "
                f"{len(self.commits)} of {self.manifest.num_segments} segments are committed",
                "a complete store",
                "run the same extract again to complete it, or read what is there with --partial",
            )
        self.samples, self.num_statuses = join(self.store_dir, plan_table, self.commits)
        self.table = SampleTable(self.store_dir / "plan", lazily=True)
        require_files(self.table, columns(plan_table)["tokens_file"])
        self.segments: OrderedDict[tuple[str, int], SegmentReader] = OrderedDict()
        self.is_uncached = uncached
        self.pool = SlicePool(threads)

    def __len__(self) -> int:
        return len(self.samples.sample_id)

    @property
    def file_bytes(self) -> dict[int, tuple[int, ...]]:
        """The bytes of the files of each committed segment."""
        return self.commits.segments

    @property
    def snapshot(self) -> str:
        """What was committed at opening, as a sha256: equal for two readers that see the same states."""
        return snapshot(self.commits, self.manifest.plan_sha256)

    def snapshot_of(self, segments: Iterable[int]) -> str:
        """The snapshot that a reader had when only these segments were committed.

        Raises UserError where one of them is not committed any more.
        """
        try:
            return snapshot(self.commits, self.manifest.plan_sha256, segments)
        except KeyError as error:
            raise UserError(
                f"segment {error} of the store {str(self.store_dir)!r} is not committed any more",
                "every segment of the snapshot",
                "run the same extract again: it redoes what is missing",
            ) from error

    def snapshot_in(self, segments: str) -> str:
        """The snapshot of segments as a run or a manifest names them: 'all', or like 0-3,7."""
        return self.snapshot if segments == ALL else self.snapshot_of(parse_ranges(segments))

    def rows(self, split: str) -> np.ndarray:
        """The numbers i [k] of all samples of a split."""
        return self.samples.numbers("split", split)

    def tokens(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids [S] u32 (a read-only view) and loss mask [S] bool of sample i, recorded or not; first + n < S."""
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
        """Fills `out` with the taps of sample i at its recorded positions start to stop (default: n).

        Position 0 is that of token `samples.first[i]`.
        out [Lt', stop - start, H] u16 (bfloat16 bits), each plane contiguous; taps: numbers into
        `manifest.tap_layers`, in the order of `out`; default: all. Raises UserError, naming file,
        segment, sample and tap, for anything that is not what was committed.
        """
        self.read_many([Request(i, out, taps, start, stop)], verify=verify)

    def read_rows(
        self,
        i: int,
        out: np.ndarray,
        *,
        taps: Sequence[int] | None = None,
        start: int = 0,
        stop: int | None = None,
        verify: bool = True,
        array: str = "hidden",
    ) -> None:
        """As `read`, but fills out [Lt', stop - start, row_bytes] u8 with rows as the store's codec encodes them.

        Those of raw and zstd are the bfloat16 bits themselves.
        """
        self.read_many([Request(i, out, taps, start, stop)], verify=verify, encoded=True, array=array)

    def read_last(
        self, i: int, out: np.ndarray, *, start: int = 0, stop: int | None = None, verify: bool = True
    ) -> None:
        """Fills `out` [stop - start, H] u16 with the last hidden states (before the final norm)."""
        self.read_many([Request(i, out[None], None, start, stop)], verify=verify, array="last")

    def read_many(
        self,
        requests: Sequence[Request],
        *,
        verify: bool = True,
        encoded: bool = False,
        array: str = "hidden",
    ) -> None:
        """Fills the `out` of every request, as `read` does or, `encoded`, as `read_rows` does.

        With several threads the chunks of all requests are shared out among them. The error is that of the first
        request that fails, however many threads there are; nothing is written into any `out` after it is raised.
        """
        if array not in self.geometries:
            raise UserError(
                f"the store {str(self.store_dir)!r} holds no last hidden states",
                "a store made with `dflash extract --last`",
                "extract again with --last, or choose a loss that needs none",
            )
        for first in range(0, len(requests), MAX_OPEN_SEGMENTS):  # a group's segments all stay open
            group = requests[first : first + MAX_OPEN_SEGMENTS]
            slices = [self.slice(array, request, verify, encoded) for request in group]
            for wanted in slices if self.is_uncached else ():
                wanted.fetch()
            errors = self.pool.read(slices)
            for wanted in slices if self.is_uncached else ():
                wanted.drop()
            for request, wanted, error in zip(group, slices, errors):
                if error is None and verify:
                    error = self.difference(array, request, wanted)
                if error is not None:
                    raise self.explain(error, array, request.i) from error

    def slice(self, array: str, request: Request, verify: bool, encoded: bool) -> Slice:
        """What is to be read of the open segment, checked against its index."""
        i, out, taps, start, stop = request
        n = int(self.samples.n[i])
        stop = n if stop is None else stop
        if not 0 <= start < stop <= n:
            raise ValueError(f"positions {start} to {stop} of sample {i}, which has {n}")
        try:
            reader = self.segment(array, int(self.samples.segment[i]))
            position = int(self.samples.position[i])
            return reader.slice(position, stop - start, out, taps, start, verify=verify, encoded=encoded)
        except (SegmentDamage, OSError) as error:
            raise self.explain(error, array, i) from error

    def difference(self, array: str, request: Request, wanted: Slice) -> SegmentDamage | None:
        """What is wrong where all states of a sample were read, each is sound, and they are not the committed ones."""
        i = request.i
        geometry = self.geometries[array]
        if wanted.n < self.samples.n[i] or wanted.taps != list(range(geometry.taps)):
            return None
        committed = self.samples.crc32c if array == "hidden" else self.samples.last_crc32c
        if crc32c(wanted.checksums) == committed[i]:
            return None
        path = segment_path(self.store_dir, array, int(self.samples.segment[i]))
        return SegmentDamage(path, "its states are not those of the commit", position=int(self.samples.position[i]))

    def segment(self, array: str, segment: int) -> SegmentReader:
        """The open segment; the longest unused one is closed when too many are open."""
        key = (array, segment)
        if key in self.segments:
            self.segments.move_to_end(key)
            return self.segments[key]
        row = np.searchsorted(self.commits.file_bytes[:, 0], segment)
        sizes = dict(zip(self.geometries, self.commits.file_bytes[row, 1:].tolist()))
        path = segment_path(self.store_dir, array, segment)
        reader = SegmentReader(path, self.geometries[array], file_bytes=sizes[array])
        if self.is_uncached:
            stop_readahead(reader.fd)
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
        command = f"dflash verify {shlex.quote(str(self.store_dir))} --repair"
        advice = f"`{command}` takes such segments back, the same extract redoes them"
        if isinstance(error, OSError):
            reason = system_reason(error)
            advice = "check the disk and its log, the mount, and the limit of open files"
        return UserError(
            f"{str(path)!r} cannot be trusted: {reason} ({where})", "the states that were committed", advice
        )

    def close(self) -> None:
        """Closes all segment files and ends the threads; reading opens and starts them again."""
        self.pool.close()
        while self.segments:
            self.segments.popitem()[1].close()

    def __enter__(self) -> "StoreReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def current_commits(store_dir: Path, manifest: Manifest) -> tuple[Commits, bool]:
    """The commits, and whether all that was asked for is there: every segment, or those that fit a budget.

    `index.arrow` says so by being there, and holds the commits; else they are read one by one.
    """
    consolidated = read_consolidated(store_dir, manifest.identity_sha256)
    if consolidated is not None:
        return consolidated, True
    commits = read_commits(store_dir, manifest.identity_sha256)
    return commits, len(commits) == manifest.num_segments


def open_tokens(store_dir: Path, plan: dict[str, np.ndarray]) -> SampleTable:
    """The token files of a store, all opened; UserError where they hold fewer samples than the plan names."""
    table = SampleTable(store_dir / "plan")
    require_files(table, plan["tokens_file"])
    short = plan["tokens_file"][plan["tokens_row"] >= np.diff(table.file_first_rows)[plan["tokens_file"]]]
    if len(short):
        raise damaged(table.paths[int(short[0])], "it holds fewer samples than the plan names")
    return table


def require_files(table: SampleTable, tokens_file: np.ndarray) -> None:
    """Refuses a store without the last of the token files that its plan names; one in between was missed before."""
    number = int(tokens_file.max(initial=0))
    if number >= len(table.paths):
        raise damaged(table.folder / tokens_name(number), "it is missing")
