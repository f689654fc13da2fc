"""`dflash plan`: what `extract` would do with the same settings. Writes nothing, loads no target."""

from dataclasses import replace

import numpy as np

from .. import UserError
from ..settings_text import as_options
from ..store.codecs import get_codec
from ..store.files import free_bytes
from ..store.geometry import states_bytes
from ..store.manifest import Manifest
from .batching import make_batches, padded_tokens
from .config import ExtractConfig, PlanConfig
from .launch import committed_so_far, refuse_other_store
from .plan import Plan, make_groups
from .ready_ids import ready_data
from .run_log import last_run
from .summary import PlanSummary
from .survey import Survey, needed_bytes, survey, whole_bytes


def plan_command(config: ExtractConfig) -> PlanSummary:
    """Says what `extract` would do with this config; writes nothing."""
    rate = config.rate if isinstance(config, PlanConfig) else None
    asked = config.of_extract() if isinstance(config, PlanConfig) else config
    found = survey(replace(asked, data=str(ready_data(asked, is_read_only=True))))
    refuse_other_store(found)
    plan, committed = found.plan, committed_so_far(found.store_dir)
    num_tokens = found.samples.column("num_tokens")[plan.column("sample_id")]
    asked_rows = found.rows_of(range(found.num_asked))
    n = plan.column("n")[asked_rows]
    full_segment = np.array([plan.segment_positions])
    return PlanSummary(
        data=found.config.data,
        store=asked.store,
        target=found.facts.name,
        dtype=found.facts.dtype,
        num_samples=plan.num_samples,
        num_without_anchor=plan.num_without_anchor,
        num_tokens=int(num_tokens.sum(dtype=np.int64)),
        num_positions=plan.num_positions,
        window=asked.window,
        num_outside_window=int(plan.lengths.sum()) - plan.num_positions,
        tap_layers=found.manifest.tap_layers,
        num_layers=found.facts.num_layers,
        has_last=asked.last,
        hidden_size=found.facts.hidden_size,
        codec=found.manifest.codec,
        codec_bytes=bytes_by_codec(found.manifest, n, found.num_asked),
        segment_positions=plan.segment_positions,
        num_segments=plan.num_segments,
        segment_bytes=states_bytes(found.manifest, full_segment, 1),
        budget=asked.budget,
        num_asked=found.num_asked,
        num_asked_samples=len(asked_rows),
        num_asked_tokens=int(num_tokens[asked_rows].sum(dtype=np.int64)),
        only=asked.only,
        num_own=sum(map(len, found.own_segments)),
        store_bytes=whole_bytes(found),
        needed_bytes=needed_bytes(found, committed),
        free_bytes=free_bytes(found.store_dir),
        num_committed=len(committed),
        workers=found.workers,
        padding_share=1.0 - int(plan.lengths.sum()) / forwarded_tokens(plan, asked.token_budget),
        time=time_text(found, committed, rate),
        next_command=f"dflash extract {as_options(asked, ('data', 'store'))}",
    )


def forwarded_tokens(plan: Plan, token_budget: int) -> int:
    """Tokens of all forwards, padding included."""
    segments, lengths = plan.column("segment"), plan.lengths
    total = 0
    for group in make_groups(plan.num_segments):
        first, last = np.searchsorted(segments, [group.start, group.stop])
        total += padded_tokens(lengths[first:last], make_batches(lengths[first:last], token_budget))
    return total


def bytes_by_codec(manifest: Manifest, n: np.ndarray, num_segments: int) -> dict[str, int]:
    """Bytes of the states of these samples with each codec that fits the target's width.

    Of zstd the most they may take; the segments are those of the plan.
    """
    found: dict[str, int] = {}
    for name in dict.fromkeys(("raw", "zstd", "int8", manifest.codec)):
        codec = get_codec(name)
        try:
            codec.require_fits(manifest.hidden_size)
        except UserError:
            continue
        found[codec.name] = states_bytes(replace(manifest, codec=codec.name), n, num_segments)
    return found


def time_text(found: Survey, committed: set[int], rate: float | None) -> str:
    """How long this launcher's workers need for what is left of its share, and where the speed is from.

    `rate` is in tokens a second of one worker, padding not counted.
    """
    left = {segment for segments in found.own_segments for segment in segments} - committed
    num_tokens = int(found.plan.lengths[found.rows_of(left)].sum())
    source = "as given"
    if rate is None:
        run = last_run(found.store_dir)
        if run is None:
            return f"{num_tokens:,} tokens to run; unknown how long, give --rate TOKENS_PER_S of one worker"
        rate = run.rate * int(found.plan.lengths.sum()) / found.plan.num_positions
        source = f"measured in this store, {run.num_workers} worker(s) on {run.devices} of {run.host}"
    hours = num_tokens / rate / len(found.workers) / 3600
    return f"{hours:.3g} hours for {num_tokens:,} tokens, at {rate:,.0f} tokens/s of each worker ({source})"
