"""The trainer: one process, one device, one Python thread; the loop of updates, exams and checkpoints.

Knows how the pieces follow each other and nothing of how they work. Rank 0 writes everything below RUN. All ranks come
to the same decisions from the same numbers, so that none waits for a call that another does not make.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from .. import UserError
from ..pinned_memory import pinned
from ..store.files import publish
from ..store.frozen import read_frozen
from ..watch import Channel
from .batch import RowBatch
from .checkpoint import LoopState, list_steps
from .checkpoint_writer import CheckpointWriter
from .clock import StepClock
from .device import compiled_once
from .drafter import Drafter
from .evaluate.drafting import NotFinite
from .exam import examine
from .guards import Suspect, blamed, diverged, suspects
from .loader import Loader
from .memory_choice import memory_table
from .metrics import EXAM, ORIGIN
from .noise import TapNoise
from .optim import MasterOptimizer, Unsound
from .order import RowCounts, num_rows_of_rank
from .outcome import REPORT_NAME, outcome_of
from .pending import PendingUpdate
from .plots import plot_run
from .rank import Rank
from .ranks import Ranks
from .replay import choose_graph
from .restore import restore, start_from
from .rows_left import plan_rows
from .run import Run, interval
from .speed import StepSpeed, measured_peak, row_numbers
from .staging import Staged, StagedRow
from .step import TrainStep
from .telling import Telling
from .warm_start import WarmStart


@contextmanager
def told_to_end() -> Iterator[Callable[[], bool]]:
    """A function that says whether SIGTERM came; while the block runs that ends nothing by itself."""
    signals: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: signals.append(number))
    try:
        yield lambda: bool(signals)
    finally:
        signal.signal(signal.SIGTERM, before)


class Trainer:
    """The state of a run in memory: weights, optimizer, buffers, and where the loop stands."""

    def __init__(self, run: Run, device: torch.device, channel: Channel, ranks: Ranks | None = None) -> None:
        self.run, self.facts, self.config = run, run.facts, run.config
        self.device, self.channel = device, channel
        self.ranks = ranks or Ranks(Rank(device=str(device)), device, channel)
        facts, dtype = self.facts, getattr(torch, self.facts.dtype)
        self.peak_flops = measured_peak(device, dtype)  # before anything else is on the device
        frozen = read_frozen(Path(self.config.store))
        drafter = Drafter(facts.spec, is_checkpointed=facts.is_checkpointed)
        if facts.init is None:
            drafter.init_weights(facts.seed)
        self.drafter = drafter.to(device, dtype)
        has_room = run.choice is None or run.choice.has_graph
        has_graph, self.graph_note = choose_graph(self.config.cuda_graph, device, has_room=has_room)
        loss = replace(self.config.loss, chunk_blocks=facts.chunk_blocks)
        self.step = TrainStep(
            self.drafter,
            frozen.embedding,
            frozen.head,
            facts.shape,
            loss,
            norm=frozen.norm,
            norm_eps=facts.target["rms_norm_eps"],
            has_graph=has_graph,
        )
        self.optimizer = MasterOptimizer(self.drafter.named_parameters(), self.config.optim, facts.steps)
        self.batch = RowBatch(facts.spec, facts.shape, device, dtype, has_last=self.config.loss.needs_last)
        self.num_own_rows = num_rows_of_rank(facts.rows_per_step, self.ranks.number, self.ranks.count)
        self.running_losses = torch.zeros(self.num_own_rows, dtype=torch.float64, device=device)
        self.last_step = min(facts.steps, facts.steps if self.config.stop_at is None else self.config.stop_at)
        self.eval_every = interval(self.config.eval_every, facts.steps)
        self.checkpoint_every = interval(self.config.checkpoint_every, facts.steps)
        self.telling = Telling(run.run_dir, self.ranks)
        self.state = LoopState(step=0, epoch=0, row=0)
        self.saved_step: int | None = None
        self.is_ending = False  # every rank knows at the same step
        self.pending: PendingUpdate | None = None

    def train(self) -> None:
        """Runs the loop to its end, from the newest checkpoint or from the start; SIGTERM ends it with a checkpoint."""
        is_resumed = self.resume()
        self.greet(is_resumed)
        with (
            told_to_end() as self.is_told_to_end,
            CheckpointWriter(
                self.run.run_dir, keep=self.config.keep, stall_s=self.config.stall_s, beat=self.channel.beat
            ) as self.writer,
            self.telling.opened(self.state.step if is_resumed else -1),
            self.open_loader() as self.loader,
            pinned(self.loader.memory, self.device),
            compiled_once(self.device),
        ):
            noise = TapNoise(self.facts.noise, self.facts.seed, self.device) if self.facts.noise else None
            self.clock = StepClock(self.device)
            self.rows = Staged(self.loader, self.device, self.clock, noise=noise, graph_pool=self.step.graph_pool)
            if self.examine_if_due() and is_resumed:  # the run was told to end before this exam
                self.save()
            while self.state.step < self.last_step and not self.is_ending:
                self.update()
                self.examine_if_due()
                if self.is_due(self.checkpoint_every) or self.state.best_step == self.state.step:
                    self.save()
            if self.saved_step != self.state.step:
                self.save()
            self.writer.wait()
        if self.is_ending:
            self.telling.say("stopped", step=self.state.step)
        elif self.state.step < self.facts.steps:
            self.telling.say("paused", step=self.state.step, steps=self.facts.steps)
        elif self.ranks.is_first:
            self.finish()

    def greet(self, is_resumed: bool) -> None:
        """Says where the run starts and what was chosen for it."""
        notes = [self.run.mask_note()] + ([self.graph_note] if self.graph_note else [])
        if self.ranks.count > 1:
            notes.append(f"{self.ranks.count} ranks, {self.facts.rows_per_step} rows a step")
        if self.run.choice is not None:
            notes.append(memory_table(self.run.choice))
        self.telling.say("start", step=self.state.step, steps=self.facts.steps, is_resumed=is_resumed, notes=notes)

    def is_due(self, every: int) -> bool:
        """Every so many updates, and after the last one of this start."""
        return self.state.step % every == 0 or self.state.step == self.last_step

    def resume(self) -> bool:
        """Goes back to the newest checkpoint; False where there is none, and the run starts with its first weights."""
        state = restore(self.run.run_dir, self.drafter, self.optimizer, self.ranks)
        if state is not None:
            self.state, self.saved_step = state, state.step
        elif self.facts.init is not None:
            start_from(WarmStart(**self.facts.init), self.optimizer)
        return state is not None

    def open_loader(self) -> Loader:
        """The loader of the rows that are still to train on."""
        plan = plan_rows(self.run, self.state, self.last_step, self.ranks)
        return Loader(plan, slots=self.config.loader_slots, stall_s=self.config.stall_s, beat=self.channel.beat)

    def update(self) -> None:
        """One optimizer update on the next rows of the run."""
        self.clock.begin()
        self.writer.check()
        self.step.reset()
        rows = [self.add_row(number) for number in range(self.num_own_rows)]
        self.report()
        met = time.monotonic()
        counts = self.count_rows(rows)
        self.ranks.start_sum(self.step.gradient_sum, self.step.sums.values)
        self.ranks.finish_sum()
        reduce_s = time.monotonic() - met
        named = [Suspect(row.place, tuple(row.sample_ids.tolist())) for row in rows]
        try:
            update = self.optimizer.step(self.step.gradients, self.step.sums.weight)
        except Unsound as error:
            raise self.blamed(error, named, self.running_losses) from error
        self.rows.stage(self.batch)
        epoch, next_row = rows[0].after
        self.state = replace(self.state, step=self.state.step + 1, epoch=epoch, row=next_row)
        known = row_numbers(self.facts, self.state.step, counts, rows, self.device)
        speed = StepSpeed(
            times=self.clock.end(),
            num_tokens=counts.num_tokens,
            num_positions=self.facts.rows_per_step * self.facts.shape.anchors * self.facts.shape.block_size,
            flops=sum(row.flops for row in rows),
            peak_flops=self.peak_flops,
        )
        if self.ranks.count > 1:
            known["reduce_s"] = reduce_s
        self.pending = PendingUpdate.of(
            self.state.step, update, self.step.sums, known, speed, named, self.running_losses.clone()
        )

    def add_row(self, number: int) -> StagedRow:
        """Adds this rank's next row to the sums of the step; it is its row `number` there."""
        self.channel.beat()
        row = self.rows.load(self.batch)
        self.step.accumulate(self.batch)
        self.running_losses[number].copy_(self.step.sums.values[0])
        if number + 1 < self.num_own_rows:  # the row behind the last one is staged once the update is under way
            self.rows.stage(self.batch)
        return row

    def count_rows(self, rows: Sequence[StagedRow]) -> RowCounts:
        """What the step's rows hold, over all ranks; here they also learn whether one of them was told to end."""
        own = [float(sum(counts)) for counts in zip(*(row.counts for row in rows))]
        *totals, num_told = self.ranks.add_up([*own, float(self.is_told_to_end())], "the other ranks' rows")
        self.is_ending = num_told > 0
        return RowCounts(*map(int, totals))

    def blamed(self, error: Unsound, rows: Sequence[Suspect], running_losses: torch.Tensor) -> UserError:
        """The error with the rows that it comes from; all ranks have found it in the same numbers."""
        own = suspects(rows, running_losses.tolist())
        return blamed(error, self.ranks.gather(own, "the rows of a step that went wrong"))

    def report(self) -> None:
        """Writes and tells the numbers of the update before, if they are not yet told.

        Raises UserError, naming rows and samples, where that update spoilt the weights.
        """
        pending, self.pending = self.pending, None
        if pending is None:
            return
        try:
            numbers = pending.numbers(self.step.sums)
        except Unsound as error:
            assert pending.running_losses is not None
            raise self.blamed(error, pending.rows, pending.running_losses) from error
        if self.ranks.count > 1:
            numbers["reduce_s"] += self.ranks.device_sum_s()
        self.telling.write_update(pending.step, numbers)

    def examine_if_due(self) -> bool:
        """Holds the exam of this step where it is due and was not held; whether it was."""
        if self.is_ending or not self.is_due(self.eval_every) or self.state.exam_step == self.state.step:
            return False
        return self.examine()

    def examine(self) -> bool:
        """The exam of the present weights; the best so far is remembered. False where it was broken off."""
        self.report()
        try:
            found = examine(self.run, self.step, self.ranks, self.is_told_to_end)
        except NotFinite as error:
            saved = list_steps(self.run.run_dir)
            raise diverged(error, self.state.step, self.config.optim, self.run.run_dir, saved) from error
        if found is None:
            self.is_ending = True
            return False
        numbers, by_origin = found
        step, value = self.state.step, numbers["acceptance_length"]
        self.state = replace(self.state, acceptance_length=value, exam_step=step)
        best = self.state.best_acceptance_length
        is_trained = step > 0 or self.facts.steps == 0
        if value is not None and is_trained and (best is None or value >= best):
            self.state = replace(self.state, best_step=step, best_acceptance_length=value)
        self.telling.write(EXAM, step, numbers)
        for part in by_origin:
            self.telling.write(ORIGIN, step, part)
        return True

    def save(self) -> None:
        """Begins to write a checkpoint of this step; the lines of metrics.jsonl are made durable before it.

        Raises UserError where the ranks no longer hold the same bits.
        """
        self.report()
        if self.ranks.count > 1:
            self.ranks.require_equal(self.optimizer.checksum(), f"weights and moments after step {self.state.step}")
        self.telling.sync()
        if self.ranks.is_first:
            weights = dict(zip(self.optimizer.names, self.optimizer.masters))
            self.writer.write(self.state, weights, {**self.optimizer.state_dict(), "masters": {}})
        self.saved_step = self.state.step

    def finish(self) -> None:
        """Says in RUN how the run ended; from then on it is finished."""
        outcome = outcome_of(
            self.run.run_dir,
            self.facts,
            best_step=self.state.best_step,
            best_acceptance_length=self.state.best_acceptance_length,
        )
        plot_run(self.run.run_dir)
        publish(self.run.run_dir / REPORT_NAME, (json.dumps(outcome, indent=1) + "\n").encode())
