"""Where every sample lies (the plan) and which of it is there (the commits), as Arrow tables.

The plan is written once, before anything runs. A commit is written when its segment is durable;
`index.arrow` holds all commits in one file. This file knows no states, only where they are.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from .. import UserError
from .arrow_file import damaged, read_table, write_table
from .files import FolderLock, fsync_folder, remove
from .size import CHUNK_POSITIONS

PLAN_PATH = "plan/index.arrow"
COMMITS_FOLDER = "commits"
CONSOLIDATED_NAME = "index.arrow"
LAYOUT_LOCK = ".layout.lock"  # held while files that belong to no segment are written
LAYOUT_WAIT_S = 600.0
COMMIT_NAME = re.compile(r"(\d{8,})\.arrow")
STATUS_OK, STATUS_NON_FINITE, STATUS_FAILED = 0, 1, 2
STATUS_NAMES = ("ok", "non-finite", "failed")
DICTIONARY = pa.dictionary(pa.int32(), pa.string())
NO_TEXTS = pa.array([], type=DICTIONARY)
NO_BRACKETS = str.maketrans("", "", "[] ")

PLAN_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.int64(), nullable=False),
        pa.field("segment", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("n", pa.int32(), nullable=False),
        pa.field("first", pa.int32(), nullable=False),
        pa.field("split", DICTIONARY, nullable=False),
        pa.field("task", DICTIONARY, nullable=False),
        pa.field("source", DICTIONARY, nullable=False),
        pa.field("origin", DICTIONARY, nullable=False),
        pa.field("source_line", pa.int64(), nullable=False),
        pa.field("tokens_file", pa.int32(), nullable=False),
        pa.field("tokens_row", pa.int32(), nullable=False),
    ]
)

COMMIT_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.int64(), nullable=False),
        pa.field("segment", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("n", pa.int32(), nullable=False),
        pa.field("crc32c", pa.uint32(), nullable=False),
        pa.field("last_crc32c", pa.uint32(), nullable=False),
        pa.field("status", pa.uint8(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Commits:
    """All committed samples (COMMIT_SCHEMA, by segment and position) and what each segment weighs.

    `weights` is JSON, `[segment, bytes in hidden, bytes in last where the store has it]` for each segment in order:
    a store of 1.1 M samples has some 90,000, which only those pay for who look at them.
    """

    table: pa.Table
    weights: str

    def __len__(self) -> int:
        """Committed segments."""
        return self.weights.count("[") - 1

    @cached_property
    def file_bytes(self) -> np.ndarray:
        """Segments and the bytes of their files [K, 1 + arrays] i64, by segment."""
        numbers = np.fromstring(self.weights.translate(NO_BRACKETS), dtype=np.int64, sep=",")
        return numbers.reshape(len(self), -1 if len(self) else 2)

    @cached_property
    def segments(self) -> dict[int, tuple[int, ...]]:
        """The bytes of each segment's files: one number for `hidden`, one more for `last` where the store has it."""
        return {segment: tuple(sizes) for segment, *sizes in self.file_bytes.tolist()}


def columns(table: pa.Table) -> dict[str, np.ndarray]:
    """The numeric columns of a table as numpy arrays [samples]; text columns are left out."""
    numeric = [field.name for field in table.schema if not pa.types.is_dictionary(field.type)]
    return {name: table.column(name).to_numpy() for name in numeric}


def coded(table: pa.Table, name: str) -> tuple[np.ndarray, list[str]]:
    """A text column as codes [samples] i32 into texts, as it is stored: texts may be unused or repeated."""
    column = table.column(name).unify_dictionaries()
    chunk = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays([*column.chunks, NO_TEXTS])
    return chunk.indices.to_numpy(zero_copy_only=False), chunk.dictionary.to_pylist()


def text_column(table: pa.Table, name: str) -> tuple[np.ndarray, list[str]]:
    """A text column as codes [samples] i32 into its distinct texts, in order of first appearance."""
    codes, texts = coded(table, name)
    used, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(first)  # distinct texts by first appearance
    rank = np.empty(len(order), dtype=np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    return rank[inverse], [texts[used[i]] for i in order]


def plan_sha256(table: pa.Table, segment_positions: int) -> str:
    """sha256 of what a plan says, however its table is chunked and its texts are coded.

    Over the segment length and, column by column in schema order, the little-endian values; a text
    column counts as its codes (i32, by first appearance) and the JSON list of its texts.
    """
    digest = hashlib.sha256(f"plan {segment_positions} {table.num_rows}\n".encode())
    numeric = columns(table)
    for field in PLAN_SCHEMA:
        if field.name in numeric:
            digest.update(np.ascontiguousarray(numeric[field.name]).data)
        else:
            codes, texts = text_column(table, field.name)
            digest.update(np.ascontiguousarray(codes).data)
            digest.update(json.dumps(texts).encode())
    return digest.hexdigest()


def check_plan(table: pa.Table, segment_positions: int, num_segments: int) -> None:
    """Raises ValueError where a plan breaks the format: order, alignment, overlap, bounds, ids."""
    if not table.schema.remove_metadata().equals(PLAN_SCHEMA):
        raise ValueError(f"plan columns are {table.schema}, expected {PLAN_SCHEMA}")
    plan = columns(table)
    segment, position, n = plan["segment"].astype(np.int64), plan["position"].astype(np.int64), plan["n"]
    start = segment * segment_positions + position
    end = start + -(-n.astype(np.int64) // CHUNK_POSITIONS) * CHUNK_POSITIONS
    rules = {
        "every n is at least 1": bool((n >= 1).all()),
        "every first is at least 0": bool((plan["first"] >= 0).all()),
        f"positions are multiples of {CHUNK_POSITIONS} from 0": bool(((position >= 0) & (position % 64 == 0)).all()),
        f"segments lie in 0..{num_segments - 1}": bool(((segment >= 0) & (segment < num_segments)).all()),
        "no sample straddles segments": bool((end <= (segment + 1) * segment_positions).all()),
        "rows are sorted by segment and position, without overlap": bool((start[1:] >= end[:-1]).all()),
        "sample ids differ": len(np.unique(plan["sample_id"])) == table.num_rows,
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise ValueError(f"the plan breaks: {'; '.join(broken)}")


def write_plan(store_dir: Path, table: pa.Table, segment_positions: int, links: Mapping[str, str] | None = None) -> str:
    """Writes `plan/index.arrow` with `links` as metadata (see `links`) and returns the plan's sha256."""
    sha256 = plan_sha256(table, segment_positions)
    write_table(Path(store_dir) / PLAN_PATH, table.unify_dictionaries(), {**(links or {}), "plan_sha256": sha256})
    return sha256


def read_plan(store_dir: Path, plan_sha256: str | None = None) -> pa.Table:
    """The plan of a store (PLAN_SCHEMA), checked bit for bit, and that it is the one of the manifest.

    The table's schema metadata are the file's.
    """
    path = Path(store_dir) / PLAN_PATH
    table, metadata = read_table(path, PLAN_SCHEMA)
    if plan_sha256 is not None:
        require_plan(path, metadata, plan_sha256)
    return table.replace_schema_metadata(metadata)


def commit_path(store_dir: Path, segment: int) -> Path:
    return Path(store_dir) / COMMITS_FOLDER / f"{segment:08d}.arrow"


def write_commit(
    store_dir: Path,
    segment: int,
    table: pa.Table,
    metadata: Mapping[str, str],
    *,
    explain: Callable[[OSError, Path], UserError] | None = None,
) -> None:
    """Publishes `commits/K.arrow`: segment K is durable and complete.

    `metadata` holds `identity_sha256` (of the manifest), `file_bytes` (JSON list) and any provenance.
    """
    write_table(commit_path(store_dir, segment), table, {**metadata, "segment": str(segment)}, explain=explain)


def committed_segments(store_dir: Path) -> set[int]:
    """The segments that have a commit file, by name alone: a cheap look, not a check."""
    folder = Path(store_dir) / COMMITS_FOLDER
    if not folder.is_dir():
        raise UserError(f"{str(folder)!r} does not exist", "a folder of commits", "run the same extract again")
    matches = (COMMIT_NAME.fullmatch(name) for name in os.listdir(folder))
    return {int(match[1]) for match in matches if match}


def read_commits(store_dir: Path, identity_sha256: str) -> Commits:
    """Every commit file, checked: bits, segment number, and that it belongs to the store of this identity."""
    tables, weights = [COMMIT_SCHEMA.empty_table()], []
    for segment in sorted(committed_segments(store_dir)):
        table, sizes = read_commit(store_dir, segment, identity_sha256)
        tables.append(table)
        weights.append([segment, *sizes])
    return Commits(pa.concat_tables(tables), json.dumps(weights))


def read_commit(store_dir: Path, segment: int, identity_sha256: str) -> tuple[pa.Table, tuple[int, ...]]:
    """One commit (COMMIT_SCHEMA) and the bytes of its segment's files; UserError where it is damaged or foreign."""
    path = commit_path(store_dir, segment)
    table, metadata = read_table(path, COMMIT_SCHEMA)
    require_own(path, metadata, identity_sha256)
    if metadata.get("segment") != str(segment) or (columns(table)["segment"] != segment).any():
        raise damaged(path, f"it speaks of segment {metadata.get('segment')}, not {segment}")
    return table, tuple(json.loads(metadata["file_bytes"]))


def require_plan(path: Path, metadata: Mapping[str, str], plan_sha256: str) -> None:
    if metadata.get("plan_sha256") != plan_sha256:
        was = metadata.get("plan_sha256")
        raise damaged(path, f"it was made for plan {was}, the store's manifest names plan {plan_sha256}")


def require_own(path: Path, metadata: Mapping[str, str], identity_sha256: str) -> None:
    """Raises UserError for a commit or an `index.arrow` of another store: equal plans do not make states equal."""
    named = metadata.get("identity_sha256")
    if named != identity_sha256:
        raise UserError(
            f"{str(path)!r} belongs to another store, one with identity {named}",
            f"identity {identity_sha256}, that of this store's manifest (its target, data, taps, codec, window, plan)",
            "bring back the file that was here; `dflash verify STORE --repair` says what the same extract can redo",
        )


def write_consolidated(store_dir: Path, identity_sha256: str, num_segments: int) -> bool:
    """Writes `index.arrow` from all commits: the first `num_segments` segments, all that were asked for, are there.

    Writes nothing and says False while one of them is missing.
    """
    if not committed_segments(store_dir).issuperset(range(num_segments)):
        return False
    commits = read_commits(store_dir, identity_sha256)
    metadata = {"identity_sha256": identity_sha256, "segments": commits.weights}
    with FolderLock(Path(store_dir), name=LAYOUT_LOCK, wait_s=LAYOUT_WAIT_S):
        for left_over in Path(store_dir).glob(f"{CONSOLIDATED_NAME}.tmp.*"):
            remove(left_over)
        write_table(Path(store_dir) / CONSOLIDATED_NAME, commits.table, metadata)
    return True


def forget_consolidated(store_dir: Path) -> None:
    """Removes `index.arrow` before a segment is written again: it would speak of the old one."""
    path = Path(store_dir) / CONSOLIDATED_NAME
    if path.exists():
        path.unlink(missing_ok=True)
        fsync_folder(path.parent)


def read_consolidated(store_dir: Path, identity_sha256: str) -> Commits | None:
    """The content of `index.arrow`, checked as the commits are; None where there is no such file."""
    path = Path(store_dir) / CONSOLIDATED_NAME
    try:
        table, metadata = read_table(path, COMMIT_SCHEMA)
    except UserError:
        if path.exists():
            raise
        return None  # a writer that starts a segment again may remove it at any moment
    require_own(path, metadata, identity_sha256)
    return Commits(table, metadata["segments"])
