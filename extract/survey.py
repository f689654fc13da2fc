"""What an extraction will be, found out without loading a target or writing a byte.

`dflash plan` shows it, `dflash extract` carries it out; so both always speak of the same plan.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from .. import UserError
from ..store.codecs import get_codec
from ..store.frozen import CONFIG_PATH
from ..store.geometry import states_bytes
from ..store.manifest import MANIFEST_NAME, Manifest
from ..store.samples import SampleTable
from ..store.size import COMMIT_BYTES, PLAN_ROW_BYTES, bytes_per_position
from ..store.tokens_file import tokens_paths
from .config import ExtractConfig
from .data import Data, facts_sha256, read_data
from .devices import choose_devices, choose_workers, num_cuda_devices, single_devices
from .plan import Plan, make_plan
from .rejected import REJECTED_NAME
from .same_target import as_stored, named_target, require_prepared_for
from .shares import joined, num_fitting, own_groups
from .targets.base import TargetFacts, check_taps, default_taps


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """Everything known before the first worker starts."""

    config: ExtractConfig
    samples: SampleTable
    facts: TargetFacts
    plan: Plan
    manifest: Manifest
    num_asked: int
    """The first segments that are to be recorded, on all nodes: all, or those that fit the budget."""
    groups: tuple[range, ...]
    """The groups that this launcher records."""
    workers: tuple[str, ...]
    """The device of each worker."""

    @property
    def store_dir(self) -> Path:
        return Path(self.config.store)

    @property
    def own_segments(self) -> list[range]:
        """What this launcher records, and nobody else meanwhile."""
        return joined(list(self.groups), self.num_asked)

    def rows_of(self, segments: Iterable[int]) -> np.ndarray:
        """The rows of the plan that lie in these segments."""
        return np.flatnonzero(np.isin(self.plan.column("segment"), np.fromiter(segments, dtype=np.int64)))


def survey(config: ExtractConfig) -> Survey:
    """Reads DATA and the target's facts, chooses taps and devices, and makes the plan.

    Raises UserError for DATA that is incomplete or empty, a target DATA was not prepared for, a
    bad tap list, a device that is not there, CPU threads without a CPU, a sample longer than the target can read or
    with ids that it does not have, or a budget that holds nothing.
    """
    from .targets.facts import read_facts

    data = read_data(Path(config.data))
    samples = SampleTable(Path(config.data))
    require_own_samples(config, data, samples)
    available = 0 if config.devices == "cpu" else num_cuda_devices()
    devices = choose_devices(config.devices, available, config.gpus_per_shard)
    require_accelerate(config)
    require_threads_used(config, devices)
    target = named_target(config.data, data.facts, config.target)
    facts = read_facts(target, config.dtype, single_devices(devices[0])[0])
    require_prepared_for(config.data, data.facts, facts)
    tap_layers = config.taps if config.taps is not None else default_taps(facts.num_layers)
    check_taps(tap_layers, facts.num_layers)
    codec = get_codec(config.codec)
    codec.require_fits(facts.hidden_size)
    width = bytes_per_position(len(tap_layers), facts.hidden_size, has_last=config.last, codec=codec.name)
    plan = make_plan(
        samples, bytes_per_position=width, segment_positions=config.segment_positions, window=config.window
    )
    require_samples(config, plan, facts)
    require_known_ids(config, samples, plan, facts)
    manifest = Manifest(
        target=facts.as_plain(),
        data={"facts": data.facts, "report": data.report, "fingerprint": data.fingerprint},
        tap_layers=tap_layers,
        hidden_size=facts.hidden_size,
        has_last=config.last,
        window=config.window,
        codec=codec.name,
        segment_positions=plan.segment_positions,
        num_segments=plan.num_segments,
        num_samples=plan.num_samples,
        num_positions=plan.num_positions,
        plan_sha256=plan.sha256,
    )
    manifest = as_stored(Path(config.store), manifest)
    only = config.own_shards
    num_asked = num_fitting(plan, manifest, config.budget)
    return Survey(
        config=config,
        samples=samples,
        facts=facts,
        plan=plan,
        manifest=manifest,
        num_asked=num_asked,
        groups=tuple(own_groups(plan.num_segments, num_asked, config.shards or 1, only)),
        workers=choose_workers(devices, config.shards if only is None else len(only)),
    )


def require_own_samples(config: ExtractConfig, data: Data, samples: SampleTable) -> None:
    found = samples.fingerprint()
    if found != data.fingerprint:
        raise UserError(
            f"the samples in {config.data!r} have fingerprint {found}",
            f"{data.fingerprint}, as its data.json says",
            "prepare the data again, or copy the whole folder again",
        )
    said = samples.metadata.get("facts_sha256")
    if said != facts_sha256(data.facts):
        raise UserError(
            f"the token files in {config.data!r} were made by a run with facts {said}",
            f"{facts_sha256(data.facts)}, those of its data.json",
            "prepare the data again, or copy the whole folder again",
        )


def require_accelerate(config: ExtractConfig) -> None:
    """transformers spreads a target over several GPUs with accelerate's help only."""
    if config.gpus_per_shard > 1 and find_spec("accelerate") is None:
        raise UserError(
            f"gpus_per_shard = {config.gpus_per_shard}, but accelerate is not installed",
            "the package with which transformers spreads a target over several GPUs",
            "pip install accelerate, or drop --gpus-per-shard",
        )


def require_threads_used(config: ExtractConfig, devices: tuple[str, ...]) -> None:
    """Only a worker on a CPU is given `cpu_threads`."""
    if "cpu" not in devices and config.cpu_threads != ExtractConfig().cpu_threads:
        raise UserError(
            f"cpu_threads = {config.cpu_threads} does nothing on {', '.join(devices)}",
            "workers on a CPU, which read it",
            "drop cpu_threads, or give --devices cpu",
        )


def require_samples(config: ExtractConfig, plan: Plan, facts: TargetFacts) -> None:
    if plan.num_samples == 0:
        raise UserError(
            f"{config.data!r} holds no sample to record ({plan.num_without_anchor} without an anchor)",
            "at least one sample with two trained tokens in a row",
            f"see {Path(config.data) / REJECTED_NAME} for what was left out and why",
        )
    longest = int(plan.lengths.max())
    if longest > facts.max_positions:
        raise UserError(
            f"the longest sample has {longest} tokens up to its last eligible anchor",
            f"at most {facts.max_positions}, what target {facts.name!r} can read",
            f"run `dflash prepare` again with --max-length {facts.max_positions}",
        )


def require_known_ids(config: ExtractConfig, samples: SampleTable, plan: Plan, facts: TargetFacts) -> None:
    """Raises UserError for a recorded id that the target's embedding has no row for; versions before let some pass.

    Reads all ids once: 1 GB of them in memory in 0.2 s (measured here, 2026-12-01). Only where one is too large are
    the samples looked at one by one, since one behind the last recorded token does no harm.
    """
    ids = (batch.column("token_ids").values.to_numpy() for batch in samples.batches)
    if max((int(some.max(initial=0)) for some in ids), default=0) < facts.vocab_size:
        return
    for row, length in zip(plan.column("sample_id").tolist(), plan.lengths.tolist()):
        highest = int(samples.tokens(row)[0][:length].max())
        if highest >= facts.vocab_size:
            raise UserError(
                f"sample {row} of {config.data!r} holds token id {highest}",
                f"ids below the {facts.vocab_size} rows of the target's embedding",
                "run `dflash prepare` again, into another folder: it leaves such lines out",
            )


def whole_bytes(found: Survey) -> int:
    """Bytes of the store when all that was asked for is there.

    Exact for states (zstd never takes more), an upper bound for the small rest.
    """
    return to_write_bytes(found, set(range(found.num_asked))) + frozen_bytes(found.facts) + layout_bytes(found)


def needed_bytes(found: Survey, committed: set[int]) -> int:
    """Bytes of it that are still to be written, here and on other nodes: they share the disk."""
    needed = to_write_bytes(found, set(range(found.num_asked)) - committed)
    if not (found.store_dir / CONFIG_PATH).exists():
        needed += frozen_bytes(found.facts)
    if not (found.store_dir / MANIFEST_NAME).exists():
        needed += layout_bytes(found)
    return needed


def to_write_bytes(found: Survey, segments: set[int]) -> int:
    """Bytes of the states of some segments and of their commits, and of the plan's and the index's rows."""
    n = found.plan.column("n")[found.rows_of(segments)]
    states = states_bytes(found.manifest, n, len(segments))
    return states + len(segments) * COMMIT_BYTES + found.plan.num_samples * PLAN_ROW_BYTES


def frozen_bytes(facts: TargetFacts) -> int:
    value_bytes = 4 if facts.dtype == "float32" else 2
    return (1 if facts.is_tied else 2) * facts.vocab_size * facts.hidden_size * value_bytes


def layout_bytes(found: Survey) -> int:
    """Tokens, manifest, metadata of the arrays, heads of the plan and of index.arrow."""
    return sum(path.stat().st_size for path in tokens_paths(found.samples.folder).values()) + 4 * COMMIT_BYTES
