"""What the new store of `recode` will be, decided before anything is written.

A pure function of the stores read and the config, so that the same command finds the same plan and goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .. import UserError
from .codecs import get_codec
from .config import RecodeConfig
from .index import PLAN_SCHEMA, plan_sha256
from .manifest import Manifest
from .placing import aligned, lay_out
from .recode_choice import Taken, choose, rows_per_file
from .recode_sources import Source, differing_facts, open_sources
from .size import bytes_per_position, parse_size


@dataclass(frozen=True, kw_only=True, slots=True)
class RecodePlan:
    """Everything known before the first segment is written."""

    config: RecodeConfig
    sources: tuple[Source, ...]
    taken: Taken
    table: pa.Table
    manifest: Manifest
    is_linked: bool
    """The token files are those of the only store, which gives all its samples."""
    left_out: dict[str, int]
    notes: tuple[str, ...]

    @property
    def store_dir(self) -> Path:
        return Path(self.config.out)

    @property
    def first_ids(self) -> tuple[int, ...]:
        return first_sample_ids(self.sources)


def plan_recode(config: RecodeConfig, stores: Sequence[Path]) -> RecodePlan:
    """The plan; raises UserError for stores that do not belong together and for an empty choice."""
    sources = open_sources(stores, config)
    first = sources[0].manifest
    codec = get_codec(config.codec or first.codec)
    codec.require_fits(first.hidden_size)
    shape = {
        "tap_layers": config.taps or first.tap_layers,
        "has_last": config.last and first.has_last,
        "window": config.window or first.window,
        "codec": codec.name,
    }
    left_out: dict[str, int] = {}
    for source in sources:
        for reason, count in source.left_out.items():
            left_out[reason] = left_out.get(reason, 0) + count
    taken, notes = choose(config, sources, replace(first, **shape), left_out)
    if not len(taken):
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items() if count)
        raise UserError(
            f"no sample is left to write: {reasons or 'the stores are empty'}",
            "at least one sample",
            "raise --limit or --budget, choose another --split, or complete the stores",
        )
    width = bytes_per_position(
        len(shape["tap_layers"]), first.hidden_size, has_last=shape["has_last"], codec=codec.name
    )
    segment_positions, segments, positions = lay_out(aligned(taken.n), width, config.segment_positions)
    is_linked = len(sources) == 1 and len(taken) == first.num_samples
    table = plan_table(sources, taken, segments, positions, is_linked)
    manifest = replace(
        first,
        **shape,
        data=merged_data(config, sources, is_linked),
        segment_positions=segment_positions,
        num_segments=int(segments[-1]) + 1,
        num_samples=len(taken),
        num_positions=int(taken.n.sum(dtype=np.int64)),
        plan_sha256=plan_sha256(table, segment_positions),
    )
    return RecodePlan(
        config=config,
        sources=sources,
        taken=taken,
        table=table,
        manifest=manifest,
        is_linked=is_linked,
        left_out={reason: count for reason, count in left_out.items() if count},
        notes=(*notes, *facts_note(sources)),
    )


def plan_table(
    sources: Sequence[Source], taken: Taken, segments: np.ndarray, positions: np.ndarray, is_linked: bool
) -> pa.Table:
    """The plan as `plan/index.arrow` holds it; what is not about places is that of the stores."""
    own: dict[str, Any] = {"segment": segments, "position": positions, "n": taken.n, "first": taken.first}
    if not is_linked:
        file, row = np.divmod(np.arange(len(taken), dtype=np.int32), rows_per_file(taken))
        own |= {"tokens_file": file, "tokens_row": row}
    first_ids = first_sample_ids(sources)
    columns: list[pa.Array] = []
    for field in PLAN_SCHEMA:
        if field.name in own:
            columns.append(pa.array(own[field.name], field.type))
            continue
        values = np.empty(len(taken), dtype=object if pa.types.is_dictionary(field.type) else np.int64)
        for k, source in enumerate(sources):
            is_own = taken.source == k
            values[is_own] = source.column(field.name)[taken.number[is_own]]
            if field.name == "sample_id":
                values[is_own] += first_ids[k]
        if pa.types.is_dictionary(field.type):
            columns.append(pa.array(values, pa.string()).dictionary_encode())
        else:
            columns.append(pa.array(values).cast(field.type))
    return pa.table(columns, schema=PLAN_SCHEMA)


def first_sample_ids(sources: Sequence[Source]) -> tuple[int, ...]:
    """What is added to the sample ids of each store: 0 for the first, so that ids stay, then past those before."""
    widths = [int(source.column("sample_id").max(initial=-1)) + 1 for source in sources]
    return tuple(np.cumsum([0, *widths[:-1]]).tolist())


def merged_data(config: RecodeConfig, sources: Sequence[Source], is_linked: bool) -> dict[str, Any]:
    """`data` of the new manifest: the facts that all stores share, and where each store came from.

    A fingerprint speaks of whole token files, so it goes to the origin unless these are linked.
    """
    differing = differing_facts(sources)
    origins: dict[str, Any] = {}  # by number from "1" on, so that a difference is named by its path
    for number, (source, first_id) in enumerate(zip(sources, first_sample_ids(sources)), 1):
        manifest = source.manifest
        origin: dict[str, Any] = {"plan_sha256": manifest.plan_sha256, "segments": source.segments}
        origin["snapshot"] = source.snapshot
        origin |= {"codec": manifest.codec, "tap_layers": list(manifest.tap_layers), "window": manifest.window}
        origin["first_sample_id"] = first_id
        origin["facts"] = {name: source.facts[name] for name in differing if name in source.facts}
        kept = ("recoded",) if is_linked else ("fingerprint", "recoded")
        origin |= {name: manifest.data[name] for name in kept if name in manifest.data}
        origins[str(number)] = origin
    budget = None if config.budget is None else parse_size(config.budget)
    recoded = {"sources": origins, "split": config.split, "limit": config.limit, "budget_bytes": budget}
    data = {name: value for name, value in sources[0].manifest.data.items() if is_linked or name != "fingerprint"}
    if len(sources) > 1:
        data["facts"] = {name: value for name, value in sources[0].facts.items() if name not in differing}
        data["report"] = {"merged": [source.manifest.data.get("report") for source in sources]}
    return data | {"recoded": recoded}


def facts_note(sources: Sequence[Source]) -> list[str]:
    differing = [name for name in differing_facts(sources) if name != "sources"]
    return [f"prepared with different {', '.join(differing)}; the manifest keeps each"] if differing else []
