"""A store in words: what `dflash inspect` and `dflash verify` print. Reads facts, checks nothing itself."""

from collections import Counter
from pathlib import Path
from typing import Any

from ..settings import as_lines
from .index import COMMITS_FOLDER
from .integrity import VerifyReport
from .manifest import Manifest
from .reader import StoreReader
from .size import bytes_per_position, human_bytes

SHOWN_FAULTS = 20


def describe_store(store_dir: Path) -> str:
    """What the store holds, for which target, and how much of it is there."""
    reader = StoreReader(store_dir, partial=True)
    manifest = reader.manifest
    target = manifest.target
    weights = str(target.get("weights_sha256"))
    is_committed = f"{len(reader.file_bytes)} of {manifest.num_segments} segments in {COMMITS_FOLDER}/"
    statuses = [f"{count:,} {name}" for name, count in reader.num_statuses.items() if count]
    splits = Counter(str(split) for split in reader.samples.split)
    tasks = Counter(str(task) for task in reader.samples.task if task)
    facts = {
        "store": str(store_dir),
        "target": f"{target.get('name')}, {target.get('architecture')}, weights {weights[:12]}",
        "taps": f"{list(manifest.tap_layers)} of {target.get('num_layers')} layers, hidden size {manifest.hidden_size}",
        "last state": "recorded" if manifest.has_last else "not recorded",
        "format": f"codec {manifest.codec}, {manifest.dtype}, {position_bytes(manifest):,.0f} bytes a position",
        "committed": is_committed,
        "samples": f"{manifest.num_samples:,} planned, {', '.join(statuses) or 'none committed'}",
        "splits": counted(splits),
        "tasks": counted(tasks),
        "positions": f"{manifest.num_positions:,} planned, in segments of {manifest.segment_positions:,}",
        "bytes": human_bytes(sum(sum(sizes) for sizes in reader.file_bytes.values())),
        "plan": manifest.plan_sha256[:16],
    }
    return as_lines({name: value for name, value in facts.items() if value})


def position_bytes(manifest: Manifest) -> float:
    return bytes_per_position(
        len(manifest.tap_layers), manifest.hidden_size, has_last=manifest.has_last, codec=manifest.codec
    )


def counted(counts: "Counter[Any]") -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common())


def verify_text(report: VerifyReport) -> str:
    """The result of a verification: counts, then every fault up to a limit that is named."""
    lines = [
        f"{report.checked:,} samples in {report.segments} of {report.num_segments} segments checked, "
        f"{human_bytes(report.bytes)} read"
    ]
    lines += [f"fault: {fault}" for fault in report.faults[:SHOWN_FAULTS]]
    if len(report.faults) > SHOWN_FAULTS:
        lines.append(f"and {len(report.faults) - SHOWN_FAULTS} faults more")
    lines.append(f"{len(report.faults)} faults" if report.faults else "every checksum and every fact holds")
    return "\n".join(lines)
