"""Which run trains next, and what becomes of one: the sweep's side of the pool.

Every change is in sweep.json before the next thing happens. Knows records and messages; starts no process itself.
"""

import dataclasses
import traceback
from collections.abc import Sequence
from typing import Any

from ... import UserError
from ...progress import say
from ...settings_text import as_dict
from ...store.files import StorageError
from ...watch import ChildDied, Job, PeerLost, Stalled
from ..facts import FACTS_NAME
from ..metrics import EXAM, METRICS_NAME, ORIGIN, TRAIN, read_metrics
from ..rank import Rank
from ..sinks import CLOSE_S, HURRIED_S, Sinks
from .check import Device, config_of
from .effects import main_effects, ranked
from .halving import decide, may_try_again
from .kernels import kernels_for
from .one_run import MEASURED, NO_KERNELS, train_one
from .record import FAILED, FINISHED, INTERRUPTED, PAUSED, RUNNING, WAITING, RunRecord, Sweep
from .sound import has_both_lengths
from .table import LiveTable

NOT_BY_ITSELF = (ChildDied, PeerLost, Stalled, OSError, StorageError)
"""Ends that say nothing of the run: the same command takes it up again, and until then a rung waits for it."""


class Schedule:
    """The runs of a sweep on its devices; see `pool.Work`."""

    def __init__(self, sweep: Sweep, devices: Sequence[Device], table: LiveTable) -> None:
        self.sweep, self.devices, self.table = sweep, devices, table
        self.sinks: dict[str, Sinks] = {}
        self.arrived: set[str] = set()  # said that they are at their rung or end; their processes still live
        self.by_name = {f"run {run.number}": run for run in sweep.runs}

    def next_job(self, device: str) -> Job | None:
        """The waiting run with the lowest number, to its next rung or to its end."""
        run = next(iter(self.sweep.with_state(WAITING)), None)
        if run is None:
            return None
        config = dataclasses.replace(config_of(self.sweep, run, device), stop_at=self.next_rung(run))
        name = f"run {run.number}"
        self.sinks[name] = Sinks(config.sinks, self.sweep.folder / run.folder, as_dict(config))
        rank = Rank(device=device, num_local=len(self.devices))
        kernels = kernels_for(self.sweep, run)
        run.state, run.device, run.error = RUNNING, device, None
        self.sweep.write()
        self.table.started(run)
        return Job(name, train_one, (config, rank, self.sweep.part, str(self.sweep.folder / run.log), kernels))

    def next_rung(self, run: RunRecord) -> int | None:
        """The step at which the run is compared next; None where it goes to its end."""
        return next(iter(self.sweep.rungs[len(run.rungs) :]), None)

    def hear(self, name: str, message: Any) -> None:
        """What a trainer tells: its kind and its numbers."""
        run, (kind, numbers) = self.by_name[name], message
        if kind == "start":
            run.step = numbers["step"]
            self.sinks[name].open(numbers["step"], numbers["is_resumed"])
        elif kind in (TRAIN, EXAM, ORIGIN):
            run.step = numbers["step"]
            self.sinks[name].write(kind, numbers)
        elif kind in ("paused", "finished"):
            run.step = numbers.get("step", run.steps or run.step)  # one that was finished before tells no step
            self.arrived.add(name)
        elif kind == MEASURED:
            run.results, run.state, run.step = numbers, FINISHED, numbers["step"]
        elif kind == NO_KERNELS:
            self.table.say(f"{name} compiles its own kernels: {numbers['reason']}")
        elif kind in ("spike", "notes"):
            return
        self.table.heard(run, kind, numbers)

    def come_to_rung(self, run: RunRecord) -> None:
        """Notes what the exam of the run's next rung found, at which it is or, by another command's doing, past it.

        Raises UserError where no such exam was held.
        """
        step, run_dir = self.next_rung(run), self.sweep.folder / run.folder
        exams = [line for line in read_metrics(run_dir / METRICS_NAME, EXAM) if line["step"] == step]
        if not exams or not has_both_lengths(exams[0]):
            raise UserError(
                f"run {run.number} was trained past the rung at step {step} by another command, and {METRICS_NAME} "
                f"holds no exam of that step",
                "an exam at each rung, which a run holds when the sweep's command trains it",
                f"remove {str(run_dir)!r}, and the sweep trains it anew where that rung is not decided",
            )
        names = ("step", "acceptance_length", "acceptance_length_cycles")
        run.rungs.append({**{name: exams[0][name] for name in names}, "is_kept": None})
        run.state = PAUSED

    def ended(self, name: str, error: Exception | None) -> None:
        """Notes how a run's process ended, and decides a rung that waited for it.

        Only here a run comes to a rung: what is decided there may start it again, and its process must be gone.
        """
        run = self.by_name[name]
        self.sinks.pop(name).close(CLOSE_S if error is None else HURRIED_S)
        has_arrived = name in self.arrived
        self.arrived.discard(name)
        if run.state == RUNNING and has_arrived and error is None:
            try:
                self.come_to_rung(run)
            except (UserError, OSError) as fault:  # ends this run alone
                error = fault
        if run.state == RUNNING:
            run.state, run.error = end_of(error)
        if error is not None:
            with (self.sweep.folder / run.log).open("a", encoding="utf-8") as log:
                log.write("".join(traceback.format_exception(error)))
        self.settle()
        self.table.ended(run)

    def settle(self) -> None:
        """Decides the rungs that can be decided, ranks, and writes."""
        if self.sweep.halving is not None:
            for step in decide(self.sweep.runs, self.sweep.rungs, self.sweep.halving["keep"]):
                self.table.decided(step, self.sweep)
        self.sweep.ranking = ranked(self.sweep.runs)
        self.sweep.effects = main_effects(self.sweep)
        self.sweep.write()

    def tick(self) -> None:
        self.table.redraw()

    def close(self) -> None:
        """No process is left: runs that were under way are said to be interrupted."""
        for sinks in self.sinks.values():
            sinks.close(HURRIED_S)
        for run in self.sweep.with_state(RUNNING):
            run.state, run.error = INTERRUPTED, "the sweep was ended"
        self.settle()
        self.table.close()


def end_of(error: Exception | None) -> tuple[str, str]:
    """State and reason of a run whose process ended before the run did."""
    if error is None:
        return INTERRUPTED, "told to end, with a checkpoint"
    first = error.happened if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    is_own = not isinstance(error, NOT_BY_ITSELF)
    text = str(error) if isinstance(error, (ChildDied, PeerLost, Stalled)) else first
    return (FAILED if is_own else INTERRUPTED), " ".join(text.split())


def take_up(sweep: Sweep) -> None:
    """Lets runs go on that another command left: those under way, interrupted, or failed with their rung undecided."""
    for run in sweep.with_state(RUNNING, INTERRUPTED, FAILED):
        if run.state != FAILED or may_try_again(sweep.runs, run):
            run.state, run.error = WAITING, None
    for run in sweep.with_state(FINISHED):
        if not (sweep.folder / run.folder / FACTS_NAME).exists():
            say(f"run {run.number} was finished, and its {run.folder}/{FACTS_NAME} is gone: it is trained again")
            run.state, run.results, run.decoded = WAITING, None, None  # what its rungs decided stands
