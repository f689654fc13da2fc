"""The launcher of `extract`: one process that plans, deals, watches and reports.

It loads no target and touches no state. Workers (one per CUDA device, or as many as shards on a
CPU) ask it for groups of segments; what they commit is safe, and the same command continues.
Several launchers may fill one store, each its own shards: they meet in the commits alone.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from .. import UserError
from ..progress import bar, say
from ..store.create import require_own_folder
from ..store.files import FolderLock, free_bytes, remove_temporaries
from ..store.frozen import CONFIG_PATH, remove_unfinished
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
from ..store.ranges import as_ranges
from ..store.segment_locks import SegmentLocks
from ..store.size import human_bytes
from ..store.state_error import extracted_errors, write_errors
from ..store.stopped import told_when_stopped
from ..store.writer import StoreWriter, create_store
from ..watch import Job, run_all
from .config import ExtractConfig
from .dealing import (
    CheckedAgain,
    Compiled,
    Group,
    Halved,
    Note,
    Order,
    Recorded,
    WantsFrozenWork,
    WantsGroup,
)
from .ready_ids import ready_data
from .run_log import log_run
from .summary import ExtractReport
from .survey import Survey, needed_bytes, survey
from .worker import work
from .writing import Committed

TOLD_FROM = 0.05
"""Share of the time waited for the disk that is worth a word."""


def extract(config: ExtractConfig) -> ExtractReport:
    """Fills the store, or what is missing of it, and gives the counts.

    Raises UserError for whatever the user can mend, ChildDied naming a worker that died, and
    Stalled when one fell silent; what was committed until then is kept.
    """
    started = time.monotonic()
    found = survey(replace(config, data=str(ready_data(config))))
    refuse_other_store(found)
    clear_away(found)
    if config.space_check:
        check_space(found, committed_so_far(found.store_dir))
    create_store(found.store_dir, found.manifest, found.plan.table, found.samples.folder)
    with held(found):
        dealer = Dealer(found, StoreWriter(found.store_dir, found.manifest).committed())
        dealer.run()
        is_finished = finish(found)
        return report(dealer, time.monotonic() - started, is_finished=is_finished)


def refuse_other_store(found: Survey) -> None:
    """A store of another identity, or somebody else's folder, is refused before anything is touched or measured."""
    require_own_folder(found.store_dir)
    if (found.store_dir / MANIFEST_NAME).exists():
        require_same(found.store_dir, read_manifest(found.store_dir), found.manifest)


@contextmanager
def held(found: Survey) -> Iterator[None]:
    """The store for this launcher alone, or, with `--only`, its own segments of it."""
    is_shared = found.config.only is not None
    with ExitStack() as locks:
        locks.enter_context(FolderLock(found.store_dir, is_shared=is_shared))
        if is_shared:
            locks.enter_context(SegmentLocks(found.store_dir, found.own_segments))
        yield


def clear_away(found: Survey) -> None:
    """Removes what killed workers left half written; it would count as used space."""
    if (found.store_dir / MANIFEST_NAME).exists():
        with held(found):
            remove_own_temporaries(found)


def remove_own_temporaries(found: Survey) -> None:
    """Those of segments that this launcher holds: whoever else wrote them is dead, or would hold them.

    Alone in the store it holds all, those outside the budget too.
    """
    remove_unfinished(found.store_dir, is_alone=found.config.only is None)
    own = chain(*found.own_segments) if found.config.only is not None else range(found.plan.num_segments)
    remove_temporaries(found.store_dir, set(own))


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
            "free space, take a part with --budget, record fewer --taps, or start all the same with --no-space-check",
        )


def finish(found: Survey) -> bool:
    """Writes what speaks of all that was asked for, once all of it is there; the last launcher finds it so."""
    if not write_consolidated(found.store_dir, read_manifest(found.store_dir).identity_sha256, found.num_asked):
        return False
    errors = extracted_errors(found.store_dir)
    if errors is not None:
        write_errors(found.store_dir, errors)
    return True


class Dealer:
    """Gives groups to whichever worker asks, and shows one bar for all of them."""

    def __init__(self, found: Survey, kept: set[int]) -> None:
        self.found = found
        self.kept = kept
        self.own = set(chain(*found.own_segments))
        self.groups = [Group(group, frozenset((set(group) & self.own) - kept)) for group in found.groups]
        self.groups = [group for group in self.groups if group.wanted]
        self.is_frozen_wanted = not (found.store_dir / CONFIG_PATH).exists()
        self.num_committed = len(self.own & kept)
        self.notes: set[str] = set()
        self.checks: list[CheckedAgain] = []
        self.workers = found.workers[: max(len(self.groups), int(self.is_frozen_wanted))]
        self.first_recorded_s: float | None = None
        self.last_recorded_s = 0.0
        self.num_timed = 0  # positions recorded after the first batch
        self.waited_s = 0.0  # of all workers for their writers, after the first batch
        self.halved: list[Halved] = []
        self.num_shapes: dict[str, int] = {}  # compiled ones, by device and worker

    def run(self) -> None:
        """Runs the workers until nothing is left to deal; starts none when there is nothing."""
        config, plan = self.found.config, self.found.plan
        for line in self.opening():
            say(line)
        if not self.workers:
            return
        jobs = [Job(f"shard {name} ({device})", work, (self.order(device),)) for name, device in self.named_workers()]
        total = int(plan.column("n")[self.found.rows_of(self.own - self.kept)].sum(dtype=np.int64))
        clear_away = partial(remove_own_temporaries, self.found)
        try:
            with (
                told_when_stopped(self.found.store_dir, plan.table, plan.num_segments, clear_away),
                bar("extract", " positions", total=total, unit_scale=True) as self.bar,
            ):
                run_all(jobs, stall_s=config.stall_s, on_message=self.answer)
        finally:
            self.log()

    def log(self) -> None:
        """Leaves the speed of this run beside the store, for `plan`."""
        untold = log_run(self.found.store_dir, workers=self.workers, num_positions=self.num_timed, wall_s=self.timed_s)
        if untold:
            say(untold)

    def opening(self) -> list[str]:
        """What is there already, and what is not this launcher's to record."""
        found, lines = self.found, []
        num_segments = found.plan.num_segments
        if self.kept:
            lines.append(f"kept: {len(self.kept)} of {num_segments} segments are committed already")
        if found.num_asked < num_segments:
            lines.append(f"budget {found.config.budget}: the first {found.num_asked} of {num_segments} segments")
            beyond = sum(segment >= found.num_asked for segment in self.kept)
            if beyond:
                lines.append(f"{beyond} segments beyond the budget were committed before; they stay")
        if found.config.only is not None:
            own = as_ranges(np.array(sorted(self.own))) if self.own else "none: there are fewer groups than shards"
            lines.append(f"shards {found.config.only} of {found.config.shards}: segments {own}")
        return lines

    def named_workers(self) -> list[tuple[int, str]]:
        """The shard and the device of each worker."""
        shards = self.found.config.own_shards or range(len(self.workers))
        return list(zip(shards, self.workers))

    def order(self, device: str) -> Order:
        config = self.found.config
        return Order(
            store_dir=str(self.found.store_dir.absolute()),
            target=self.found.facts.name,
            device=device,
            token_budget=config.token_budget,
            cpu_threads=config.cpu_threads,
            slow_kernels=config.slow_kernels,
            compile=config.compile,
            stall_s=config.stall_s,
        )

    def answer(self, name: str, message: object) -> object:
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
            self.time(message)
        elif isinstance(message, CheckedAgain):
            self.checks.append(message)
        elif isinstance(message, Halved):
            self.halved.append(message)
            say(
                f"{name} ran out of memory: {message.detail}. It goes on with token_budget = {message.token_budget:,}; "
                "states are the same within rounding"
            )
        elif isinstance(message, Compiled):
            self.num_shapes[name] = message.num_shapes
        elif isinstance(message, Committed):
            self.num_committed += 1
        if isinstance(message, (Recorded, Halved, Committed)):
            self.bar.set_postfix_str(self.state_text(), refresh=False)
        return None

    def state_text(self) -> str:
        """What the bar says beside its speed."""
        parts = [f"{self.num_committed}/{len(self.own)} segments"]
        if self.halved:
            parts.append(f"token budget halved by {len(self.halved)} of {len(self.workers)} workers")
        if self.waited_share >= TOLD_FROM:
            parts.append(f"disk slower than the target: waited {self.waited_share:.0%} of the time")
        return ", ".join(parts)

    @property
    def timed_s(self) -> float:
        """Seconds from the first batch to the last one so far."""
        return self.last_recorded_s - (self.first_recorded_s or self.last_recorded_s)

    @property
    def waited_share(self) -> float:
        """The share of the workers' time in which every slot of their rings was full."""
        return self.waited_s / (self.timed_s * len(self.workers)) if self.timed_s else 0.0

    def time(self, message: Recorded) -> None:
        """Counts towards the speed; the first batch only starts the clock, since a target was loaded before it."""
        self.last_recorded_s = time.monotonic()
        if self.first_recorded_s is None:
            self.first_recorded_s = self.last_recorded_s
        else:
            self.num_timed += message.num_positions
            self.waited_s += message.waited_s


def report(dealer: Dealer, wall_s: float, *, is_finished: bool = True) -> ExtractReport:
    """Counts what the commits say, not what this run believes to have done."""
    found, kept = dealer.found, dealer.kept
    commits = read_commits(found.store_dir, read_manifest(found.store_dir).identity_sha256)
    status = commits.table.column("status").to_numpy()
    n = commits.table.column("n").to_numpy()
    new = dealer.own - kept
    return ExtractReport(
        data=found.config.data,
        store=found.config.store,
        num_samples=commits.table.num_rows,
        num_ok=int((status == STATUS_OK).sum()),
        num_non_finite=int((status == STATUS_NON_FINITE).sum()),
        num_failed=int((status == STATUS_FAILED).sum()),
        num_without_anchor=found.plan.num_without_anchor,
        num_planned=found.plan.num_samples,
        num_positions=int(n.sum(dtype=np.int64)),
        num_segments=len(commits.segments),
        num_missing=len(set(range(found.num_asked)) - set(commits.segments)),
        num_kept_segments=len(kept),
        num_new_segments=len(new & set(commits.segments)),
        num_new_positions=int(n[np.isin(commits.table.column("segment").to_numpy(), sorted(new))].sum(dtype=np.int64)),
        store_bytes=sum(sum(sizes) for sizes in commits.segments.values()),
        num_checked_again=len(dealer.checks),
        num_checked_tokens=sum(check.num_tokens for check in dealer.checks),
        num_checks_failed=sum(check.has_failed for check in dealer.checks),
        halved=tuple(f"{one.device} to {one.token_budget:,}" for one in dealer.halved),
        num_shapes=max(dealer.num_shapes.values(), default=0),
        waited_share=dealer.waited_share,
        workers=dealer.workers,
        wall_s=wall_s,
        is_finished=is_finished,
    )
