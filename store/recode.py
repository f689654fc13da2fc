"""The launcher of `recode`: reads one store or several of one identity and writes another; needs no target.

Worker processes take segments of the new store, each is committed when it is whole, and the same command goes on
from what is committed, as in `extract`.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from ..progress import bar, say
from ..watch import Job, run_all
from .codecs import get_codec
from .config import RecodeConfig
from .files import FolderLock, disk_errors, remove_temporaries
from .index import read_commits, write_consolidated
from .manifest import Manifest, read_manifest
from .ranges import ALL
from .recode_layout import check_space, lay_out_store, refuse_early, refuse_other_store
from .recode_plan import RecodePlan, plan_recode
from .recode_worker import Committed, Order, Recoded, WantsSegment, has_same_rows, work
from .size import human_bytes
from .state_error import (
    Measurement,
    committed_errors,
    earlier_codecs,
    error_text,
    measured_error,
    read_errors,
    write_errors,
)
from .stopped import told_when_stopped
from .writer import StoreWriter

__all__ = ["RecodeReport", "measured_error", "recode"]

MOST_WORKERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RecodeReport:
    """What the new store holds, what it was made of, and what this run did for it."""

    stores: tuple[str, ...]
    out: str
    codec: str
    tap_layers: tuple[int, ...]
    num_samples: int
    num_positions: int
    left_out: dict[str, int]
    bytes_before: int
    positions_before: int
    bytes_after: int
    num_segments: int
    num_kept_segments: int
    num_workers: int
    error: dict[str, Any] | None
    wall_s: float

    def text(self) -> str:
        num_new = self.num_segments - self.num_kept_segments
        done = f"{num_new:,} written now"
        if num_new:
            done += f" by {self.num_workers} worker(s) in {self.wall_s:.1f} s"
        each = self.bytes_before / max(1, self.positions_before), self.bytes_after / self.num_positions
        lines = [
            f"store      {self.out}: {self.num_positions:,} positions, codec {self.codec}, "
            f"taps {', '.join(map(str, self.tap_layers))}",
            f"samples    {self.num_samples:,} of {', '.join(self.stores)}",
            *(f"  left out: {count:,} {reason}" for reason, count in self.left_out.items()),
            f"bytes      {human_bytes(self.bytes_before)} before, {human_bytes(self.bytes_after)} now "
            f"({self.bytes_after / max(1, self.bytes_before):.3f}x); {each[0]:,.0f} and {each[1]:,.0f} a position",
            f"segments   {self.num_segments:,}: {self.num_kept_segments:,} kept from before, {done}",
        ]
        if self.error is not None:
            lines.append(f"error      {error_text(self.error)}")
        return "\n".join([*lines, f"next: dflash train --store {quote(self.out)}"])


def recode(config: RecodeConfig, stores: Sequence[str]) -> RecodeReport:
    """Fills the new store, or what is missing of it, and gives the counts.

    Raises UserError for whatever the user can mend, ChildDied naming a worker that died, and
    Stalled when one fell silent; what was committed until then is kept.
    """
    started = time.monotonic()
    plan = plan_recode(config, [Path(store) for store in stores])
    refuse_other_store(plan)
    refuse_early(plan)
    for note in plan.notes:
        say(note)
    with disk_errors(plan.store_dir):
        plan.store_dir.mkdir(parents=True, exist_ok=True)
    with FolderLock(plan.store_dir):
        remove_temporaries(plan.store_dir, range(plan.manifest.num_segments))
        if config.space_check:
            check_space(plan)
        lay_out_store(plan)
        writer = StoreWriter(plan.store_dir, plan.manifest)
        dealer = Dealer(plan, writer.committed())
        dealer.run()
        write_consolidated(plan.store_dir, writer.identity_sha256, plan.manifest.num_segments)
        keep_errors(plan)
        return report(dealer, stores, time.monotonic() - started)


class Dealer:
    """Gives segments to whichever worker asks, and shows one bar for all of them."""

    def __init__(self, plan: RecodePlan, kept: set[int]) -> None:
        self.plan = plan
        self.kept = kept
        self.segments = sorted(set(range(plan.manifest.num_segments)) - kept)
        self.num_committed = len(kept)
        wanted = plan.config.workers or min(MOST_WORKERS, len(os.sched_getaffinity(0)))
        self.num_workers = min(wanted, len(self.segments))

    def run(self) -> None:
        """Runs the workers until nothing is left to deal; starts none when there is nothing."""
        plan = self.plan
        if self.kept:
            say(f"kept: {len(self.kept)} of {plan.manifest.num_segments} segments are committed already")
        if not self.segments:
            return
        order = Order(
            store_dir=str(plan.store_dir.absolute()),
            sources=tuple(str(source.store_dir.absolute()) for source in plan.sources),
            first_ids=plan.first_ids,
            stall_s=plan.config.stall_s,
        )
        jobs = [Job(f"worker {number}", work, (order,)) for number in range(self.num_workers)]
        is_new = ~np.isin(plan.table.column("segment").to_numpy(), sorted(self.kept))
        num_segments, total = plan.manifest.num_segments, int(plan.taken.n[is_new].sum())
        clear_away = partial(remove_temporaries, plan.store_dir, range(num_segments))
        with (
            told_when_stopped(plan.store_dir, plan.table, num_segments, clear_away),
            bar("recode", " positions", total=total, unit_scale=True) as self.bar,
        ):
            run_all(jobs, stall_s=plan.config.stall_s, on_message=self.answer)

    def answer(self, _name: str, message: object) -> object:
        """Handles one message of a worker."""
        if isinstance(message, WantsSegment):
            return self.segments.pop(0) if self.segments else None
        if isinstance(message, Recoded):
            self.bar.update(message.num_positions)
        elif isinstance(message, Committed):
            self.num_committed += 1
            self.bar.set_postfix_str(f"{self.num_committed}/{self.plan.manifest.num_segments} segments", refresh=False)
        return None


def keep_errors(plan: RecodePlan) -> None:
    """Writes `state_errors.json`: what the states lost, here and before; nothing where nobody measured."""
    new, found = get_codec(plan.manifest.codec), Measurement()
    is_carried = False
    for k, source in enumerate(plan.sources):
        old, earlier = get_codec(source.manifest.codec), read_errors(source.store_dir)
        num_taken = int(plan.taken.n[plan.taken.source == k].sum(dtype=np.int64)) * num_planes(plan.manifest)
        if not num_taken:
            continue
        if not new.is_lossless and not has_same_rows(old, new):
            found.against.add(old.name)
            found.num_all += num_taken
            found.before += [] if earlier is None else [without_before(earlier), *earlier.before]
        elif earlier is not None:
            own = int(source.column("n").sum(dtype=np.int64)) * num_planes(source.manifest)
            found.carry(earlier, is_whole=source.segments == ALL and num_taken == own)
            is_carried = True
        elif not old.is_lossless or earlier_codecs(source.manifest):
            found.unmeasured.add(f"plan {source.manifest.plan_sha256[:16]} ({old.name})")
    if not new.is_lossless:
        here, _ = committed_errors(plan.store_dir)
        found.codecs |= {new.name} if here.num_states else set()
        found.errors.merge(here)
    found.is_own &= not (is_carried and found.unmeasured)
    if found.errors.num_states:
        write_errors(plan.store_dir, found)


def num_planes(manifest: Manifest) -> int:
    """States of one position."""
    return len(manifest.tap_layers) + int(manifest.has_last)


def without_before(earlier: Measurement) -> dict[str, Any]:
    return {name: value for name, value in earlier.facts().items() if name != "before"}


def report(dealer: Dealer, stores: Sequence[str], wall_s: float) -> RecodeReport:
    """Counts what the commits say, not what this run believes to have done."""
    plan = dealer.plan
    commits = read_commits(plan.store_dir, read_manifest(plan.store_dir).identity_sha256)
    return RecodeReport(
        stores=tuple(stores),
        out=plan.config.out,
        codec=plan.manifest.codec,
        tap_layers=plan.manifest.tap_layers,
        num_samples=commits.table.num_rows,
        num_positions=int(commits.table.column("n").to_numpy().sum(dtype=np.int64)),
        left_out=plan.left_out,
        bytes_before=sum(source.size_bytes for source in plan.sources),
        positions_before=sum(int(source.column("n").sum(dtype=np.int64)) for source in plan.sources),
        bytes_after=sum(sum(sizes) for sizes in commits.segments.values()),
        num_segments=len(commits.segments),
        num_kept_segments=len(dealer.kept),
        num_workers=dealer.num_workers,
        error=measured_error(plan.store_dir),
        wall_s=wall_s,
    )
