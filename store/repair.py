"""Marks damaged segments, so that the next extract records them again. Nothing is deleted.

A segment is committed while `commits/K.arrow` is there; renaming that file takes the commit back and keeps it.
`index.arrow` repeats the commits, and is renamed too: where commits are lost it may be all that speaks of them, and
where it differs from a commit either may be the wrong one.
The states stay under their own name, unread, until extract replaces them by new ones, so no second copy needs room.
"""

import os
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from .files import FolderLock, fsync_folder, storage_error
from .geometry import array_geometries, segment_path, states_bytes
from .index import COMMITS_FOLDER, CONSOLIDATED_NAME, columns, commit_path, read_plan
from .integrity import Fault, VerifyReport, require_store
from .manifest import Manifest, read_manifest
from .ranges import ALL
from .size import human_bytes


@dataclass(frozen=True, slots=True)
class Marked:
    """What `repair` did and what is left to do."""

    segments: dict[int, Path | None]  # marked segment -> where its commit lies now, None where it had none
    size_bytes: int  # of their segment files
    index_path: Path | None  # where `index.arrow` lies now, None where it was not moved
    command: str  # records them again, and writes index.arrow
    others: tuple[Fault, ...]  # faults that are not repaired here

    def text(self) -> str:
        lines = []
        for segment, path in self.segments.items():
            lines.append(f"marked: segment {segment}, " + (f"commit kept as {path}" if path else "it had no commit"))
        if self.segments:
            count = "1 segment is" if len(self.segments) == 1 else f"{len(self.segments)} segments are"
            lines.append(
                f"{count} to be recorded again ({human_bytes(self.size_bytes)} of states); "
                "to take a mark back, rename the commit"
            )
        if self.index_path:
            lines.append(
                f"removed: {CONSOLIDATED_NAME}, kept as {self.index_path}; "
                "the store is read without it, and the next run makes it again from the commits"
            )
        if self.command:
            lines.append(f"next, with the settings that the store was made with: {self.command}")
        lines += [f"not repaired here: {fault}; to do: {fault.advice}" for fault in self.others]
        return "\n".join(lines)


def advice_for(store_dir: Path, report: VerifyReport) -> str:
    """What to do about the faults of a store: `repair`, where it has something to mark, else what each of them says."""
    if report.damaged_segments or report.index_faults:
        command = f"dflash verify {shlex.quote(str(store_dir))} --repair"
        return f"see the faults above; `{command}` marks damaged segments for extract"
    return "; ".join(dict.fromkeys(fault.advice for fault in report.faults))


def lock_for_repair(store_dir: Path) -> FolderLock:
    """What is held from before `verify` to after `repair`, so that nobody writes between the two.

    Raises UserError where there is no store; taking it raises one while another process writes into the store.
    """
    require_store(store_dir)
    return FolderLock(store_dir)


def repair(store_dir: Path, report: VerifyReport) -> Marked:
    """Takes back the commits of the segments that `report` found damaged; every step is durable before the next.

    `index.arrow` is renamed too, as it is wrong or speaks of them. The caller holds `lock_for_repair` since before the
    report was made.
    """
    store_dir = Path(store_dir)
    others = tuple(fault for fault in report.faults if fault.segment is None and fault not in report.index_faults)
    if not report.damaged_segments and not report.index_faults:
        return Marked({}, 0, None, "", others)
    manifest = read_manifest(store_dir)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    marked: dict[int, Path | None] = {}
    try:
        index_path = set_aside(store_dir / CONSOLIDATED_NAME, stamp)
        fsync_folder(store_dir)
        for segment in report.damaged_segments:
            marked[segment] = set_aside(commit_path(store_dir, segment), stamp)
        if marked:
            fsync_folder(store_dir / COMMITS_FOLDER)
    except OSError as error:
        raise storage_error(error, store_dir) from error
    paths = [segment_path(store_dir, array, segment) for array in array_geometries(manifest) for segment in marked]
    size_bytes = sum(path.stat().st_size for path in paths if path.exists())
    budget = None if others else budget_of(store_dir, manifest, report)
    return Marked(marked, size_bytes, index_path, next_command(store_dir, manifest, budget), others)


def budget_of(store_dir: Path, manifest: Manifest, report: VerifyReport) -> int | None:
    """The budget in bytes that asks for what an extraction with a budget had recorded; None for any other store."""
    committed = set(range(manifest.num_segments)) - set(report.uncommitted)
    if not report.is_finished or not report.uncommitted or not committed:
        return None
    asked = max(committed) + 1
    plan = columns(read_plan(store_dir, manifest.plan_sha256))
    return states_bytes(manifest, plan["n"][plan["segment"] < asked], asked)


def set_aside(path: Path, stamp: str) -> Path | None:
    """Renames a file so that no reader takes it for what it was; None where there is none."""
    if not path.exists():
        return None
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    os.rename(path, aside)
    return aside


def next_command(store_dir: Path, manifest: Manifest, budget: int | None = None) -> str:
    """The command that fills the store, with every setting that the manifest knows; paths that it reads are not."""
    recoded = manifest.data.get("recoded")
    if recoded is None:
        words = ["dflash", "extract", "--data", "DATA", "--store", str(store_dir)]
        settings = {"--last": manifest.has_last}
    else:
        words = ["dflash", "recode", "STORES", "--out", str(store_dir)]
        is_partial = any(source["segments"] != ALL for source in recoded["sources"].values())
        settings = {"--no-last": not manifest.has_last, "--partial": is_partial}
    words += ["--taps", ",".join(map(str, manifest.tap_layers)), "--codec", manifest.codec]
    words += [option for option, is_given in settings.items() if is_given]
    words += given("--window", manifest.window)
    if recoded is None:
        dtype = manifest.target.get("dtype")
        words += given("--set", None if dtype is None else f"dtype={dtype}") + given("--budget", budget)
    else:
        words += given("--split", recoded["split"]) + given("--limit", recoded["limit"])
        words += given("--budget", recoded["budget_bytes"])
    return shlex.join([*words, "--set", f"segment_positions={manifest.segment_positions}"])


def given(option: str, value: object) -> list[str]:
    return [] if value is None else [option, str(value)]
