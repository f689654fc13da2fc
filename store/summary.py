"""A store in words: what `dflash inspect` and `dflash verify` print. Reads facts, checks no state."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from .. import UserError
from ..settings_text import as_lines
from .codecs import get_codec
from .geometry import array_geometries, states_bytes
from .index import (
    COMMITS_FOLDER,
    CONSOLIDATED_NAME,
    STATUS_FAILED,
    STATUS_NAMES,
    columns,
    read_plan,
    text_column,
)
from .integrity import VerifyReport
from .lengths import plot_lengths, text_bars
from .manifest import Manifest, read_manifest
from .ranges import as_ranges
from .reader import current_commits, open_tokens
from .size import bytes_per_position, human_bytes
from .state_error import earlier_codecs, error_text, measured_error
from .tokens_file import TEXT_COLUMNS

SHOWN_FAULTS = 20
SHOWN_NAMES = 12
UNMEASURED = (
    "unknown: nothing exact was kept to compare with; to know it, extract some samples with --codec raw "
    "and `dflash recode` them to {codec}"
)


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What there is to say about a store: planned, committed, on the disk."""

    store_dir: Path
    manifest: Manifest
    plan: pa.Table
    committed: dict[str, np.ndarray]  # columns of all commits
    is_finished: bool  # what was asked for is committed: all, or what fits a budget
    segments: Mapping[int, tuple[int, ...]]  # committed ones and the bytes of their files
    lengths: np.ndarray  # [N] i32, tokens of every planned sample

    @property
    def num_committed_positions(self) -> int:
        return int(self.committed["n"].sum(dtype=np.int64))

    @property
    def committed_bytes(self) -> int:
        return sum(sum(sizes) for sizes in self.segments.values())


def read_facts(store_dir: Path) -> StoreFacts:
    """Opens what tells about a store, finished or not. Raises UserError where that is missing or damaged."""
    store_dir = Path(store_dir)
    manifest = read_manifest(store_dir)
    plan_table = read_plan(store_dir, manifest.plan_sha256)
    commits, is_finished = current_commits(store_dir, manifest)
    plan = columns(plan_table)
    table = open_tokens(store_dir, plan)
    rows = table.file_first_rows[plan["tokens_file"]] + plan["tokens_row"]
    lengths = table.column("num_tokens")[rows]
    committed = columns(commits.table)
    return StoreFacts(store_dir, manifest, plan_table, committed, is_finished, commits.segments, lengths)


def describe_store(facts: StoreFacts) -> str:
    """What the store holds, for which target, and how much of it is there."""
    manifest, target = facts.manifest, facts.manifest.target
    weights = str(target.get("weights_sha256"))
    lines = {
        "store": str(facts.store_dir),
        "target": f"{target.get('name')}, {target.get('architecture')}, weights {weights[:12]}",
        "taps": f"{list(manifest.tap_layers)} of {target.get('num_layers')} layers, hidden size {manifest.hidden_size}",
        "last state": "recorded" if manifest.has_last else "not recorded",
        "window": window_text(manifest),
        **codec_lines(facts),
        **progress_lines(facts),
        "segments": f"{manifest.num_segments:,} of {manifest.segment_positions:,} positions",
        "plan": manifest.plan_sha256[:16],
        **{f"{name}s": counted(facts.plan, name) for name in TEXT_COLUMNS},
        "bytes": bytes_text(facts),
        "tokens": tokens_text(facts.lengths),
    }
    text = as_lines({name: value for name, value in lines.items() if value})
    if not len(facts.lengths):
        return text
    return "\n".join([text, "", "samples by their number of tokens", *text_bars(facts.lengths)])


def plot_store(facts: StoreFacts, path: Path) -> Path:
    """Draws the lengths of the samples; UserError where there are none."""
    if not len(facts.lengths):
        raise UserError(f"{str(facts.store_dir)!r} holds no sample", "lengths to draw", "leave out --png")
    name = facts.manifest.target.get("name")
    return plot_lengths(facts.lengths, path, f"{len(facts.lengths):,} samples for {name}")


def window_text(manifest: Manifest) -> str:
    """What a window leaves out, and which drafters can still be trained; empty without one."""
    window = manifest.window
    if window is None:
        return ""
    outside = f"tokens more than {window} before a sample's first eligible anchor are not stored"
    return f"{window}: {outside}; for drafters with drafter.window up to {window}"


def codec_lines(facts: StoreFacts) -> dict[str, str]:
    """How states are stored: the codec's size and bound, and what the real store has."""
    manifest = facts.manifest
    codec = get_codec(manifest.codec)
    stated = codec.row_bytes(manifest.hidden_size) / manifest.hidden_size
    lines = {
        "codec": f"{codec.name}, {manifest.dtype} values of {stated:.3g} bytes"
        + (" before compression" if codec.is_compressed else "")
        + f", {position_bytes(manifest):,.0f} bytes a position"
    }
    is_there = facts.committed["status"] != STATUS_FAILED
    planes = len(manifest.tap_layers) + int(manifest.has_last)
    num_values = int(facts.committed["n"][is_there].sum(dtype=np.int64)) * planes * manifest.hidden_size
    if num_values:
        lines["on disk"] = (
            f"{facts.committed_bytes / num_values:.3f} bytes a value, with padding, checksums and indexes of the files"
        )
    return lines | error_lines(facts.store_dir, manifest)


def error_lines(store_dir: Path, manifest: Manifest) -> dict[str, str]:
    """What the states may have lost to this codec and to those they went through before, and what was measured."""
    codec, earlier, measured = get_codec(manifest.codec), earlier_codecs(manifest), measured_error(store_dir)
    lines = {"error": codec.error}
    if earlier:
        lines["error"] += f"; states were {', '.join(earlier)} before; that error stays"
    if measured is not None:
        lines["measured"] = error_text(measured)
        if measured["before"]:
            lines["before"] = "; ".join(map(error_text, measured["before"]))
    known = [name for part in ([measured, *measured["before"]] if measured else []) for name in part["codecs"]]
    unknown = [name for name in [*([] if codec.is_lossless else [codec.name]), *earlier] if name not in known]
    if unknown:
        lines["not measured" if measured else "measured"] = UNMEASURED.format(codec=" and ".join(unknown))
    return lines


def progress_lines(facts: StoreFacts) -> dict[str, str]:
    """How much of the plan is committed, in segments, samples and positions."""
    manifest = facts.manifest
    done, planned = facts.num_committed_positions, manifest.num_positions
    statuses = np.bincount(facts.committed["status"], minlength=len(STATUS_NAMES))
    named = ", ".join(f"{count:,} {name}" for name, count in zip(STATUS_NAMES, statuses.tolist()) if count)
    share = f"{done / max(1, planned):.1%} of the positions"
    if len(facts.segments) == manifest.num_segments:
        share = "complete"
    else:
        share = f"complete for its budget, {share}" if facts.is_finished else f"unfinished, {share}"
    return {
        "committed": f"{len(facts.segments):,} of {manifest.num_segments:,} segments in {COMMITS_FOLDER}/: {share}",
        "samples": f"{manifest.num_samples:,} planned, {named or 'none committed'}",
        "positions": f"{planned:,} planned, {done:,} committed",
    }


def bytes_text(facts: StoreFacts) -> str:
    """Bytes on the disk by folder, as the files have them, and what the plan foresees for the states."""
    manifest = facts.manifest
    planned = states_bytes(manifest, columns(facts.plan)["n"], manifest.num_segments)
    folders = {name: folder_bytes(facts.store_dir / name) for name in (*array_geometries(manifest), "plan", "frozen")}
    folders[COMMITS_FOLDER] = folder_bytes(facts.store_dir / COMMITS_FOLDER)
    index = facts.store_dir / CONSOLIDATED_NAME
    folders[CONSOLIDATED_NAME] = index.stat().st_size if index.exists() else 0
    shown = ", ".join(f"{name} {human_bytes(size)}" for name, size in folders.items() if size)
    most = " at most" if get_codec(manifest.codec).is_compressed else ""
    total = human_bytes(sum(folders.values()))
    return f"{total} on the disk ({shown}); planned for the states:{most} {human_bytes(planned)}"


def folder_bytes(folder: Path) -> int:
    """Bytes of the files of a folder, unfinished ones included."""
    if not folder.is_dir():
        return 0
    return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())


def tokens_text(lengths: np.ndarray) -> str:
    if not len(lengths):
        return "0"
    low, median, high = int(lengths.min()), float(np.median(lengths)), int(lengths.max())
    total, mean = int(lengths.sum(dtype=np.int64)), float(lengths.mean())
    return f"{total:,} in the planned samples; {low:,} to {high:,} a sample, median {median:,.0f}, mean {mean:,.0f}"


def position_bytes(manifest: Manifest) -> float:
    return bytes_per_position(
        len(manifest.tap_layers), manifest.hidden_size, has_last=manifest.has_last, codec=manifest.codec
    )


def counted(plan: pa.Table, name: str) -> str:
    """The planned samples by one text column, the most frequent first."""
    codes, texts = text_column(plan, name)
    counts = np.bincount(codes, minlength=len(texts))
    order = np.argsort(-counts, kind="stable")
    shown = [f"{int(counts[i]):,} {texts[i]}" for i in order.tolist() if texts[i]]
    more = [f"and {len(shown) - SHOWN_NAMES} more"] if len(shown) > SHOWN_NAMES else []
    return ", ".join([*shown[:SHOWN_NAMES], *more])


def verify_text(report: VerifyReport) -> str:
    """The result of a verification: counts, then every fault up to a limit that is named."""
    lines = [
        f"{report.checked:,} samples in {report.segments} of {report.num_segments} segments checked, "
        f"{human_bytes(report.bytes)} read"
    ]
    if report.uncommitted:
        segments = as_ranges(np.array(report.uncommitted))
        how = "`dflash extract` with a larger --budget" if report.is_finished else "the same `dflash extract`"
        lines.append(f"not committed: segments {segments}; {how} records them")
    lines += [f"fault: {fault}" for fault in report.faults[:SHOWN_FAULTS]]
    if len(report.faults) > SHOWN_FAULTS:
        lines.append(f"and {len(report.faults) - SHOWN_FAULTS} faults more")
    lines.append(faults_text(len(report.faults)) if report.faults else "every checksum and every fact holds")
    return "\n".join(lines)


def faults_text(count: int) -> str:
    return "1 fault" if count == 1 else f"{count:,} faults"
