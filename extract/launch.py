"""The launcher of `extract`, and `plan`: one process that plans, deals, watches and reports.

It loads no target and touches no state. Workers (one per CUDA device, or as many as shards on a
CPU) ask it for groups of segments; what they commit is safe, and the same command continues.
"""

import time
from pathlib import Path

import numpy as np

from .. import UserError
from ..progress import bar, say
from ..settings import as_options
from ..store.create import require_own_folder
from ..store.files import FolderLock, free_bytes, remove_temporaries
from ..store.frozen import CONFIG_PATH
from ..store.geometry import states_bytes
from ..store.index import (
    COMMITS_FOLDER,
    STATUS_FAILED,
    STATUS_NON_FINITE,
    STATUS_OK,
    committed_segments,
    read_commits,
    write_consolidated,
)
from ..store.manifest import MANIFEST_NAME, read_manifest, require_same
from ..store.size import human_bytes
from ..store.state_error import extracted_errors, write_errors
from ..store.writer import StoreWriter, create_store
from ..watch import Job, run_all
from .batching import make_batches, padded_tokens
from .config import ExtractConfig
from .plan import Plan, make_groups
from .summary import ExtractReport, PlanSummary
from .survey import Survey, needed_bytes, survey, whole_bytes
from .worker import Group, Note, Order, Recorded, WantsFrozenWork, WantsGroup, work
from .writing import Committed


def plan_command(config: ExtractConfig) -> PlanSummary:
    """Says what `extract` would do with this config; writes nothing."""
    found = survey(config)
    refuse_other_store(found)
    plan, committed = found.plan, committed_so_far(found.store_dir)
    num_tokens = int(found.samples.column("num_tokens")[plan.column("sample_id")].sum(dtype=np.int64))
    full_segment = np.array([plan.segment_positions])
    return PlanSummary(
        data=config.data,
        store=config.store,
        target=found.facts.name,
        dtype=found.facts.dtype,
        num_samples=plan.num_samples,
        num_without_anchor=plan.num_without_anchor,
        num_tokens=num_tokens,
        num_positions=plan.num_positions,
        window=config.window,
        num_outside_window=int(plan.lengths.sum()) - plan.num_positions,
        tap_layers=found.manifest.tap_layers,
        num_layers=found.facts.num_layers,
        has_last=config.last,
        hidden_size=found.facts.hidden_size,
        codec=found.manifest.codec,
        segment_positions=plan.segment_positions,
        num_segments=plan.num_segments,
        segment_bytes=states_bytes(found.manifest, full_segment, 1),
        store_bytes=whole_bytes(found),
        needed_bytes=needed_bytes(found, committed),
        free_bytes=free_bytes(found.store_dir),
        num_committed=len(committed),
        workers=found.workers,
        padding_share=1.0 - int(plan.lengths.sum()) / forwarded_tokens(plan, config.token_budget),
        next_command=f"dflash extract {as_options(config, ('data', 'store'))}",
    )


def forwarded_tokens(plan: Plan, token_budget: int) -> int:
    """Tokens of all forwards, padding included."""
    segments, lengths = plan.column("segment"), plan.lengths
    total = 0
    for group in make_groups(plan.num_segments):
        first, last = np.searchsorted(segments, [group.start, group.stop])
        total += padded_tokens(lengths[first:last], make_batches(lengths[first:last], token_budget))
    return total


def extract(config: ExtractConfig) -> ExtractReport:
    """Fills the store, or what is missing of it, and gives the counts.

    Raises UserError for whatever the user can mend, ChildDied naming a worker that died, and
    Stalled when one fell silent; what was committed until then is kept.
    """
    started = time.monotonic()
    found = survey(config)
    refuse_other_store(found)
    clear_away(found)
    if config.space_check:
        check_space(found, committed_so_far(found.store_dir))
    create_store(found.store_dir, found.manifest, found.plan.table, Path(config.data))
    with FolderLock(found.store_dir):
        dealer = Dealer(found, StoreWriter(found.store_dir, found.manifest).committed())
        dealer.run()
        write_consolidated(found.store_dir, found.plan.sha256, found.plan.num_segments)
        errors = extracted_errors(found.store_dir)
        if errors is not None:
            write_errors(found.store_dir, errors)
        return report(dealer, time.monotonic() - started)


def refuse_other_store(found: Survey) -> None:
    """A store of another identity, or somebody else's folder, is refused before anything is touched or measured."""
    require_own_folder(found.store_dir)
    if (found.store_dir / MANIFEST_NAME).exists():
        require_same(found.store_dir, read_manifest(found.store_dir), found.manifest)


def clear_away(found: Survey) -> None:
    """Removes what killed workers left half written; it would count as used space."""
    if (found.store_dir / MANIFEST_NAME).exists():
        with FolderLock(found.store_dir):
            remove_temporaries(found.store_dir, range(found.plan.num_segments))


def committed_so_far(store_dir: Path) -> set[int]:
    return committed_segments(store_dir) if (store_dir / COMMITS_FOLDER).is_dir() else set()


def check_space(found: Survey, committed: set[int]) -> None:
    """Refuses a disk that cannot take what is still to write, before any target is loaded."""
    needed, free = needed_bytes(found, committed), free_bytes(found.store_dir)
    if needed > free:
        raise UserError(
            f"the store needs {human_bytes(needed)} ({needed} bytes) more, "
            f"{found.config.store!r} has {human_bytes(free)} free",
            "a disk that takes the whole plan (samples x taps x width x bytes; see `dflash plan`)",
            "free space, record fewer --taps, or start all the same with --no-space-check",
        )


class Dealer:
    """Gives groups to whichever worker asks, and shows one bar for all of them."""

    def __init__(self, found: Survey, kept: set[int]) -> None:
        self.found = found
        self.kept = kept
        groups = make_groups(found.plan.num_segments)
        self.groups = [Group(group, frozenset(set(group) - kept)) for group in groups]
        self.groups = [group for group in self.groups if group.wanted]
        self.is_frozen_wanted = not (found.store_dir / CONFIG_PATH).exists()
        self.num_committed = len(kept)
        self.notes: set[str] = set()
        self.workers = found.workers[: max(len(self.groups), int(self.is_frozen_wanted))]

    def run(self) -> None:
        """Runs the workers until nothing is left to deal; starts none when there is nothing."""
        config, plan = self.found.config, self.found.plan
        if self.kept:
            say(f"kept: {len(self.kept)} of {plan.num_segments} segments are committed already")
        if not self.workers:
            return
        jobs = [Job(f"shard {i} ({device})", work, (self.order(device),)) for i, device in enumerate(self.workers)]
        is_new = ~np.isin(plan.column("segment"), sorted(self.kept))
        total = int(plan.column("n")[is_new].sum(dtype=np.int64))
        with bar("extract", " positions", total=total, unit_scale=True) as self.bar:
            try:
                run_all(jobs, stall_s=config.stall_s, on_message=self.answer)
            except BaseException:
                self.bar.close()
                remove_temporaries(self.found.store_dir, range(plan.num_segments))
                say(self.what_is_safe())
                raise

    def order(self, device: str) -> Order:
        config = self.found.config
        return Order(
            store_dir=str(self.found.store_dir.absolute()),
            device=device,
            token_budget=config.token_budget,
            cpu_threads=config.cpu_threads,
            slow_kernels=config.slow_kernels,
            stall_s=config.stall_s,
        )

    def answer(self, _name: str, message: object) -> object:
        """Handles one message of a worker."""
        if isinstance(message, WantsGroup):
            return self.groups.pop(0) if self.groups else None
        if isinstance(message, WantsFrozenWork):
            is_wanted, self.is_frozen_wanted = self.is_frozen_wanted, False
            return is_wanted
        if isinstance(message, Note) and message.text not in self.notes:
            self.notes.add(message.text)
            say(message.text)
        elif isinstance(message, Recorded):
            self.bar.update(message.num_positions)
        elif isinstance(message, Committed):
            self.num_committed += 1
            self.bar.set_postfix_str(f"{self.num_committed}/{self.found.plan.num_segments} segments", refresh=False)
        return None

    def what_is_safe(self) -> str:
        """What a broken run leaves, as the disk has it: a worker may have died before it could tell."""
        plan, done = self.found.plan, committed_segments(self.found.store_dir)
        num_samples = int(np.isin(plan.column("segment"), sorted(done)).sum())
        return (
            f"stopped: {num_samples:,} of {plan.num_samples:,} samples, in {len(done)} of {plan.num_segments} "
            "segments, are committed and safe; the same command continues from there"
        )


def report(dealer: Dealer, wall_s: float) -> ExtractReport:
    """Counts what the commits say, not what this run believes to have done."""
    found, kept = dealer.found, dealer.kept
    commits = read_commits(found.store_dir, found.plan.sha256)
    status = commits.table.column("status").to_numpy()
    is_new = ~np.isin(commits.table.column("segment").to_numpy(), sorted(kept))
    return ExtractReport(
        data=found.config.data,
        store=found.config.store,
        num_samples=commits.table.num_rows,
        num_ok=int((status == STATUS_OK).sum()),
        num_non_finite=int((status == STATUS_NON_FINITE).sum()),
        num_failed=int((status == STATUS_FAILED).sum()),
        num_without_anchor=found.plan.num_without_anchor,
        num_positions=found.plan.num_positions,
        num_segments=len(commits.segments),
        num_kept_segments=len(kept),
        num_new_positions=int(commits.table.column("n").to_numpy()[is_new].sum(dtype=np.int64)),
        store_bytes=sum(sum(sizes) for sizes in commits.segments.values()),
        workers=dealer.workers,
        wall_s=wall_s,
    )
