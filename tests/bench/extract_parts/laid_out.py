"""A store's plan over samples of random ids with lognormal lengths, as `survey` makes it, without a target's files."""

import shutil
from pathlib import Path

import numpy as np
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.plan import make_plan
from dflash_offline.extract.shares import own_groups
from dflash_offline.extract.survey import Survey
from dflash_offline.extract.targets.base import TargetFacts, default_taps
from dflash_offline.store.create import create_store
from dflash_offline.store.manifest import Manifest
from dflash_offline.store.placing import aligned, power_of_two_from
from dflash_offline.store.samples import SampleTable, SampleWriter
from dflash_offline.store.size import bytes_per_position

MEDIAN, SIGMA, SHORTEST, LONGEST = 1500, 0.8, 50, 8192
IDS = (6, 500)


def write_samples(folder: Path, count: int, longest: int = LONGEST) -> SampleTable:
    draw = np.random.default_rng(0)
    median = min(MEDIAN, longest // 4)
    lengths = np.clip(draw.lognormal(np.log(median), SIGMA, size=count), min(SHORTEST, longest), longest).astype(int)
    with SampleWriter(folder) as writer:
        for line, n in enumerate(lengths):
            writer.add(draw.integers(*IDS, n), np.ones(n), split="train", task="", source="", source_line=line)
    return SampleTable(folder)


def lay_out(
    store: Path,
    codec: str,
    facts: TargetFacts,
    samples: SampleTable,
    workers: tuple[str, ...],
    token_budget: int,
    *,
    in_one_group: bool,
) -> Survey:
    """A new store in `store`, its plan, and who is to fill it.

    In one group, all samples lie in one segment, and batches are as full as those of a large store: segments of so few
    samples would be small, and batches inside their groups too. Several workers need several groups to share.
    """
    taps = default_taps(facts.num_layers)
    width = bytes_per_position(len(taps), facts.hidden_size, codec=codec)
    whole = power_of_two_from(int(aligned(samples.column("num_recorded").astype(np.int64)).sum()))
    plan = make_plan(samples, bytes_per_position=width, segment_positions=whole if in_one_group else None)
    manifest = Manifest(
        target=facts.as_plain(),
        data={},
        tap_layers=taps,
        hidden_size=facts.hidden_size,
        codec=codec,
        segment_positions=plan.segment_positions,
        num_segments=plan.num_segments,
        num_samples=plan.num_samples,
        num_positions=plan.num_positions,
        plan_sha256=plan.sha256,
    )
    shutil.rmtree(store, ignore_errors=True)
    create_store(store, manifest, plan.table, samples.folder)
    return Survey(
        config=ExtractConfig(store=str(store), token_budget=token_budget, codec=codec),
        samples=samples,
        facts=facts,
        plan=plan,
        manifest=manifest,
        workers=workers,
        num_asked=plan.num_segments,
        groups=tuple(own_groups(plan.num_segments, plan.num_segments, 1, None)),
    )
