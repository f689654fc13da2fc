"""The stores that `recode` reads: what each of them holds, and whether they may become one. Writes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import UserError
from .config import RecodeConfig
from .index import STATUS_NAMES, STATUS_OK, columns
from .manifest import MANIFEST_NAME, Manifest, collect, differences, read_manifest, show
from .ranges import ALL, as_ranges, parse_ranges
from .reader import StoreReader

OWN_FIELDS = ("data", "segment_positions", "num_segments", "num_samples", "num_positions", "plan_sha256")
SAME_FACTS = ("target", "tokenizer_sha256", "template_sha256", "template_options")  # of data.facts
REMEDIES = {"tap_layers": "--taps", "has_last": "--no-last", "codec": "--codec", "window": "--window"}
NOT_COMMITTED = "not committed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One store, opened, and the samples of it that are sound."""

    store_dir: Path
    reader: StoreReader
    segments: str  # 'all', or those that were committed at the first start, like 0-3,7
    snapshot: str  # sha256 of what is committed in them
    rows: np.ndarray  # [N] numbers of the sound samples in `reader`
    content: np.ndarray  # [N] u64
    num_tokens: np.ndarray  # [N]
    left_out: dict[str, int]  # planned samples that are not sound, by reason
    size_bytes: int  # of the segment files

    @property
    def manifest(self) -> Manifest:
        return self.reader.manifest

    @property
    def facts(self) -> dict[str, Any]:
        """What the samples were prepared with."""
        return self.manifest.data.get("facts", {})

    def tokens(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids [S] and loss mask [S] of sound sample `number`."""
        return self.reader.tokens(int(self.rows[number]))

    def column(self, name: str) -> np.ndarray:
        """A column of the plan [N]."""
        return getattr(self.reader.samples, name)[self.rows]


def open_sources(stores: Sequence[Path], config: RecodeConfig) -> tuple[Source, ...]:
    """All stores to read, found to be of one identity. Raises UserError where they are not."""
    require_apart(stores, Path(config.out))
    earlier = earlier_segments(Path(config.out))
    sources = tuple(open_source(place, config.partial, earlier.get(k)) for k, place in enumerate(stores, 1))
    for other in sources[1:]:
        require_same_identity(sources[0], other, config)
    for source in sources:
        require_taps(source, config)
        require_recorded(source, config.window)
    return sources


def require_apart(stores: Sequence[Path], out: Path) -> None:
    """Refuses a store given twice, one that would be written over, and one that would be written into."""
    seen: list[Path] = []
    for store_dir in [*stores, out]:
        if store_dir.resolve() in seen:
            raise UserError(
                f"{str(store_dir)!r} is given twice",
                "stores to read, each once, and another folder for --out",
                "name each folder once",
            )
        seen.append(store_dir.resolve())
    for store_dir in stores:
        if store_dir.resolve() in out.resolve().parents:
            raise UserError(
                f"--out {str(out)!r} lies inside {str(store_dir)!r}, a store to read",
                "a folder outside the stores to read: nothing is written into them",
                "choose another folder with --out",
            )


def earlier_segments(out: Path) -> dict[int, tuple[str, str]]:
    """The plan of each store that an earlier start read, and which segments it took, by the store's place from 1 on.

    Not by the plan: several stores to read may be parts of one plan.
    """
    if not (out / MANIFEST_NAME).exists():
        return {}
    sources = read_manifest(out).data.get("recoded", {}).get("sources", {})
    return {int(place): (source["plan_sha256"], source["segments"]) for place, source in sources.items()}


def open_source(store_dir: Path, partial: bool, earlier: tuple[str, str] | None) -> Source:
    """A store to read; `earlier` are plan and segments of the store that an earlier start read in its place."""
    reader = StoreReader(store_dir, partial=partial)
    committed, manifest = set(reader.file_bytes), reader.manifest
    segments = ALL if len(committed) == manifest.num_segments else as_ranges(np.array(sorted(committed)))
    if earlier is not None and earlier[0] == manifest.plan_sha256:
        segments = chosen_segments(store_dir, partial, earlier[1], segments)
    wanted = set(range(manifest.num_segments)) if segments == ALL else set(parse_ranges(segments))
    missing = sorted(wanted - committed)
    if missing:
        raise UserError(
            f"segment {missing[0]} of {str(store_dir)!r} is not committed; the new store was started with segments "
            f"{segments} of the store in this place",
            "the stores of the first start in the same order, with at least the segments of then",
            "give them in that order, or complete this one with the same extract, or choose another folder with --out",
        )
    rows = np.flatnonzero(np.isin(reader.samples.segment, sorted(wanted)))
    table, samples = reader.table, reader.samples
    places = table.file_first_rows[samples.tokens_file[rows]] + samples.tokens_row[rows]
    return Source(
        store_dir=store_dir,
        reader=reader,
        segments=segments,
        snapshot=reader.snapshot_in(segments),
        rows=rows,
        content=table.column("content")[places],
        num_tokens=table.column("num_tokens")[places].astype(np.int64),
        left_out=unsound(reader, wanted),
        size_bytes=sum(sum(reader.file_bytes[segment]) for segment in wanted),
    )


def chosen_segments(store_dir: Path, partial: bool, earlier: str, now: str) -> str:
    """The segments that the first start took. Raises UserError where --partial is left out and there are more now."""
    if not partial and earlier != now:
        raise UserError(
            f"{str(store_dir)!r} has all its segments now; the new store was started from segments {earlier} of it",
            "the same choice at every start of one new store",
            "give --partial again, which reads what the first start read, or choose another folder with --out",
        )
    return earlier


def unsound(reader: StoreReader, wanted: set[int]) -> dict[str, int]:
    """Samples of the plan that cannot be taken, by reason."""
    rows = columns(reader.commits.table)
    status = rows["status"][np.isin(rows["segment"], sorted(wanted))]
    counts = dict(zip(STATUS_NAMES, np.bincount(status, minlength=len(STATUS_NAMES)).tolist()))
    reasons = {NOT_COMMITTED: reader.manifest.num_samples - sum(counts.values())}
    return reasons | {name: count for name, count in counts.items() if name != STATUS_NAMES[STATUS_OK]}


def require_same_identity(first: Source, other: Source, config: RecodeConfig) -> None:
    """Refuses stores whose states or tokens mean different things, with names and both values."""
    chosen = {"codec": config.codec, "tap_layers": config.taps, "has_last": not config.last, "window": config.window}
    free = [*OWN_FIELDS, *(name for name, given in chosen.items() if given)]
    found = differences(first.manifest, replace(other.manifest, **{n: getattr(first.manifest, n) for n in free}))
    for name in SAME_FACTS:
        collect(first.facts.get(name), other.facts.get(name), f"data.facts.{name}", found)
    if not found:
        return
    shown = "; ".join(f"{name} = {show(was)} in the first, {show(now)} in the second" for name, was, now in found[:3])
    options = [REMEDIES.get(name) for name, _, _ in found]
    advice = "recode them one by one"
    if all(options):
        advice = f"give {' and '.join(map(str, options))}, so that they become alike, or {advice}"
    raise UserError(
        f"{str(first.store_dir)!r} and {str(other.store_dir)!r} cannot become one store: {shown}",
        "stores of the same target, tokenizer, template, taps and number format",
        advice,
    )


def require_taps(source: Source, config: RecodeConfig) -> None:
    stored = source.manifest.tap_layers
    missing = [layer for layer in config.taps or () if layer not in stored]
    if missing:
        raise UserError(
            f"tap {missing[0]} is not in {str(source.store_dir)!r}",
            f"some of its taps {', '.join(map(str, stored))}",
            "give other --taps, or extract again with that layer",
        )


def require_recorded(source: Source, window: int | None) -> None:
    """Refuses a window that reaches back to tokens which the store does not hold."""
    own = source.manifest.window
    if window is not None and own is not None and window > own:
        raise UserError(
            f"--window {window} is more than the window {own} of {str(source.store_dir)!r}",
            f"at most {own}: tokens further before a sample's first eligible anchor are not in that store",
            f"give --window {own} or less, or extract again with --window {window}",
        )


def differing_facts(sources: Sequence[Source]) -> list[str]:
    """The names of what the samples were prepared with differently, in the order of the first store."""
    names = dict.fromkeys(name for source in sources for name in source.facts)
    return [n for n in names if any(source.facts.get(n) != sources[0].facts.get(n) for source in sources)]
