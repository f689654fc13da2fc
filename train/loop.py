"""The trainer: one process, one device, one Python thread; the loop of updates, exams and checkpoints.

Knows how the pieces follow each other and nothing of how they work. It writes everything below RUN.
"""

import json
import time
from dataclasses import replace
from pathlib import Path

import torch

from .. import UserError
from ..store.files import FolderLock, publish
from ..store.frozen import read_frozen
from ..threads import cpu_threads
from ..watch import Channel
from . import checkpoint
from .batch import RowBatch
from .checkpoint import LoopState
from .config import TrainConfig
from .device import card_bytes, compiled_once, copy_mark, pick_device, pinned
from .drafter import Drafter
from .exam import examine
from .loader import Loader, LoaderPlan
from .memory_choice import memory_table
from .metrics import EXAM, METRICS_NAME, TRAIN, MetricsFile
from .optim import MasterOptimizer
from .order import Place, RowCounts
from .outcome import REPORT_NAME, outcome_of
from .pending import PendingUpdate
from .plots import plot_run
from .replay import choose_graph
from .run import Run, check_run, interval, make_folder, require_unchanged, write_run
from .slot import RowSlot
from .step import TrainStep
from .warm_start import WarmStart, load_start

LOCK_WAIT_S = 10.0  # a killed trainer needs a moment to let go of its memory and of RUN


def run_trainer(channel: Channel, config: TrainConfig) -> None:
    """The trainer process: starts, resumes or finds finished the run that `config` names."""
    device = pick_device(config.device)
    run = check_run(config, lambda: device.type, card_bytes(device))
    torch.set_num_threads(config.cpu_threads or cpu_threads(run.facts.spec.hidden_size))
    make_folder(run.run_dir)
    with FolderLock(run.run_dir, wait_s=LOCK_WAIT_S):
        require_unchanged(run)
        if (run.run_dir / REPORT_NAME).exists():
            require_last_checkpoint(run)
            channel.tell(("finished", {}))
            return
        checkpoint.remove_temporaries(run.run_dir)
        write_run(run)
        Trainer(run, device, channel).train()


def require_last_checkpoint(run: Run) -> None:
    """Raises UserError where a run says that it is finished but has lost what it trained."""
    steps = checkpoint.list_steps(run.run_dir)
    if run.facts.steps not in steps:
        there = f"steps {', '.join(map(str, steps))}" if steps else "none"
        raise UserError(
            f"{str(run.run_dir)!r} has {REPORT_NAME}, but its last checkpoint is gone (step {run.facts.steps})",
            f"the checkpoints that it was finished with; there are: {there}",
            f"bring them back, or remove {str(run.run_dir / REPORT_NAME)!r} to train the missing steps again",
        )


class Trainer:
    """The state of a run in memory: weights, optimizer, buffers, and where the loop stands."""

    def __init__(self, run: Run, device: torch.device, channel: Channel) -> None:
        self.run, self.facts, self.config = run, run.facts, run.config
        self.device, self.channel = device, channel
        facts, dtype = self.facts, getattr(torch, self.facts.dtype)
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
        self.eval_every = interval(self.config.eval_every, facts.steps)
        self.checkpoint_every = interval(self.config.checkpoint_every, facts.steps)
        self.state = LoopState(step=0, epoch=0, row=0)
        self.pending: PendingUpdate | None = None

    def train(self) -> None:
        """Runs the loop to its end, from the newest checkpoint or from the start."""
        is_resumed = self.resume()
        if not is_resumed and self.facts.init is not None:
            self.warm_start(WarmStart(**self.facts.init))
        start = {"step": self.state.step, "steps": self.facts.steps, "is_resumed": is_resumed}
        notes = [self.run.mask_note()] + ([self.graph_note] if self.graph_note else [])
        if self.run.choice is not None:
            notes.append(memory_table(self.run.choice))
        self.channel.tell(("start", start | {"notes": notes}))
        with (
            MetricsFile(self.run.run_dir / METRICS_NAME, self.state.step if is_resumed else -1) as self.metrics,
            self.open_loader() as self.loader,
            pinned(self.loader.memory, self.device),
            compiled_once(self.device),
        ):
            if not is_resumed:
                self.examine()
            while self.state.step < self.facts.steps:
                self.update()
                if self.is_due(self.eval_every):
                    self.examine()
                if self.is_due(self.checkpoint_every) or self.state.best_step == self.state.step:
                    self.save()
            if self.state.step not in checkpoint.list_steps(self.run.run_dir):
                self.save()
        self.finish()

    def is_due(self, every: int) -> bool:
        """Every so many updates, and after the last one."""
        return self.state.step % every == 0 or self.state.step == self.facts.steps

    def resume(self) -> bool:
        """Goes back to the newest checkpoint; False where there is none."""
        steps = checkpoint.list_steps(self.run.run_dir)
        if not steps:
            return False
        loaded = checkpoint.load(self.run.run_dir, steps[-1])
        with torch.no_grad():
            for name, parameter in self.drafter.named_parameters():
                parameter.copy_(loaded.weights[name])
        self.optimizer.load_state_dict({**loaded.optimizer, "masters": loaded.weights})
        self.state = loaded.state
        return True

    @torch.no_grad()
    def warm_start(self, start: WarmStart) -> None:
        """Sets masters, and from them the weights, to those of the drafter that the run starts from."""
        weights = load_start(start)
        for name, master in zip(self.optimizer.names, self.optimizer.masters):
            master.copy_(weights[name])
        self.optimizer.round_masters()

    def open_loader(self) -> Loader:
        """The loader of the rows that are still to train on."""
        facts = self.facts
        slot = RowSlot(
            shape=facts.shape,
            num_taps=facts.spec.num_taps,
            hidden_size=facts.spec.hidden_size,
            codec_name=facts.codec_name,
            has_last=self.config.loss.needs_last,
        )
        plan = LoaderPlan(
            store_dir=Path(self.config.store).absolute(),
            segments=facts.segments,
            snapshot=facts.snapshot,
            taps=self.run.taps,
            slot=slot,
            seed=facts.seed,
            shuffle_segments=facts.shuffle_segments,
            start=Place(self.state.epoch, self.state.row),
            num_rows=(facts.steps - self.state.step) * facts.rows_per_step,
            threads=self.config.loader_threads,
            uncached=self.config.uncached,
        )
        return Loader(plan, slots=self.config.loader_slots, stall_s=self.config.stall_s, beat=self.channel.beat)

    def update(self) -> None:
        """One optimizer update on the next rows of the run."""
        started, waited_s = time.monotonic(), self.loader.wait_s
        self.step.reset()
        counts: list[RowCounts] = []
        for _ in range(self.facts.rows_per_step):
            self.channel.beat()
            with self.loader.row() as row:
                self.batch.load(row.arrays)
                wait_for_copy = copy_mark(self.device)
                self.step.accumulate(self.batch)
                wait_for_copy()  # the loader may write the slot again
            counts.append(row.counts)
        update = self.optimizer.step(self.step.gradients, self.step.sums.weight)
        epoch, next_row = self.loader.next
        self.state = replace(self.state, step=self.state.step + 1, epoch=epoch, row=next_row)
        self.report()
        known = self.throughput(counts, time.monotonic() - started, self.loader.wait_s - waited_s)
        self.pending = PendingUpdate.of(self.state.step, update, self.step.sums, known)

    def report(self) -> None:
        """Writes and tells the numbers of the update before, if they are not yet told.

        Raises UserError where that update spoilt the weights.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            numbers = pending.numbers(self.step.sums)
            self.metrics.write(TRAIN, pending.step, **numbers)
            self.channel.tell(("train", {"step": pending.step, **numbers}))

    def throughput(self, counts: list[RowCounts], step_s: float, wait_s: float) -> dict[str, float]:
        """What the rows of an update held, and how fast they went."""
        shape, num_rows = self.facts.shape, len(counts)
        num_tokens = sum(row.num_tokens for row in counts)
        return {
            "epoch": self.state.step * num_rows / self.facts.rows_per_epoch,
            "num_samples": sum(row.num_samples for row in counts),
            "num_tokens": num_tokens,
            "num_blocks": sum(row.num_anchors for row in counts),
            "fill": num_tokens / (num_rows * shape.row_tokens),
            "step_s": step_s,
            "wait_s": wait_s,
            "rate_block_tok_s": num_rows * shape.anchors * shape.block_size / step_s,
        }

    def examine(self) -> None:
        """The exam of the present weights; the best so far is remembered with its step."""
        self.report()
        numbers = examine(self.run, self.step, self.channel.beat)
        step, value = self.state.step, numbers["acceptance_length"]
        self.state = replace(self.state, acceptance_length=value)
        best = self.state.best_acceptance_length
        is_trained = step > 0 or self.facts.steps == 0
        if value is not None and is_trained and (best is None or value >= best):
            self.state = replace(self.state, best_step=step, best_acceptance_length=value)
        self.metrics.write(EXAM, step, **numbers)
        self.channel.tell(("exam", {"step": step, **numbers}))

    def save(self) -> None:
        """A checkpoint of this step; the lines of metrics.jsonl are made durable before it."""
        self.report()
        self.metrics.sync()
        weights = dict(zip(self.optimizer.names, self.optimizer.masters))
        checkpoint.save(self.run.run_dir, self.state, weights, {**self.optimizer.state_dict(), "masters": {}})
        checkpoint.prune(self.run.run_dir, self.config.keep, self.state.best_step)

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
