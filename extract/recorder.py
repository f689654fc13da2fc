"""Runs the target over groups of segments, one batch ahead of what is judged and handed to the writer.

A batch is sent to the device, and while it computes the one before it is copied, judged and handed over; so the device
waits neither for a copy nor, while the ring has room, for the disk. At most two batches are on the device. Which
samples share a batch, and all that is written of them, do not depend on any of this.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from .. import UserError
from ..store.codecs import get_codec
from ..store.index import STATUS_FAILED, STATUS_OK, columns, read_plan
from ..store.manifest import Manifest
from ..store.samples import SampleTable
from ..watch import Channel
from .batching import in_turns, make_batches
from .copying import SideStream
from .dealing import CheckedAgain, Compiled, Group, Halved, Note, Order, Recorded
from .int8_rows import encode_states, errors
from .recheck import chosen_again
from .sent_batch import Again, Sent, measured_places, recorded_part, status_of, with_errors
from .soundness import Alone, check_target, fault_against, peaks_there, run_alone
from .targets.base import length_bound
from .writing import Entry, Room

if TYPE_CHECKING:
    from .targets.hf import HfTarget


class StateWriter(Protocol):
    """Where a worker's encoded states go: a process of their own, or straight to the disk."""

    def room(self, shape: tuple[int, ...]) -> Room:
        """Memory for encoded rows [Lt (+1), N, S, row_bytes]; waits until there is some."""
        ...

    def put(self, room: Room, entries: tuple[Entry, ...]) -> None:
        """Takes the room, now filled."""
        ...


class Recorder:
    """Runs the target over groups of segments; holds the states of two batches at a time."""

    def __init__(self, channel: Channel, order: Order, manifest: Manifest, target: "HfTarget") -> None:
        self.channel = channel
        self.target = target
        self.manifest = manifest
        self.codec = get_codec(manifest.codec)
        self.order = order
        self.token_budget = order.token_budget
        self.side = SideStream(target.device)
        self.pending: Sent | None = None
        self.is_checked = False
        store_dir = Path(order.store_dir)
        self.samples = SampleTable(store_dir / "plan")
        plan = columns(read_plan(store_dir, manifest.plan_sha256))
        names = ("sample_id", "segment", "position", "n", "first", "tokens_file", "tokens_row")
        self.plan = {name: plan[name] for name in names}
        self.lengths = plan["first"].astype(np.int64) + plan["n"]  # tokens to run of each sample [N]
        content = self.samples.column("content")[plan["sample_id"]]  # [N] u64
        self.is_chosen_again = chosen_again(content, self.lengths)  # [N] bool
        self.has_told_fault = False
        self.length_bound = length_bound(target.facts.rope)

    def largest_batch_bytes(self) -> int:
        """Bytes that the encoded states of any batch of this store fit into."""
        tokens = max(int(self.plan["n"].max()), min(self.token_budget, 2 * int(self.lengths.sum())))
        planes = len(self.manifest.tap_layers) + int(self.manifest.has_last)
        return tokens * planes * self.codec.row_bytes(self.manifest.hidden_size)

    def record(self, group: Group, writer: StateWriter) -> None:
        """Records the wanted segments of a group.

        The batches are those of the whole group, whatever is wanted of it, so that a resumed
        group gives the same bytes; a batch without a wanted sample is not run. Samples leave as
        their batches come, so memory holds two batches and the writer one open file per segment.
        Raises UserError where the device's memory does not hold a batch for the second time.
        """
        first, last = np.searchsorted(self.plan["segment"], [group.segments.start, group.segments.stop])
        rows = np.arange(first, last)
        while len(rows):
            rows = self.record_rows(rows, group.wanted, writer)

    def record_rows(self, rows: np.ndarray, wanted: frozenset[int], writer: StateWriter) -> np.ndarray:
        """Records samples, rows of the plan; gives those that are left where a batch did not fit into memory."""
        batches = self.batches_of(rows)
        if not self.is_checked and not self.fits(lambda: self.check(batches), batches[0]):
            return rows
        batches = in_turns(batches)
        for number, batch in enumerate(batches):
            is_wanted = [segment in wanted for segment in self.plan["segment"][batch].tolist()]
            if not any(is_wanted):
                continue
            sent: list[Sent] = []
            places = np.flatnonzero(is_wanted)
            has_fit = self.fits(lambda: sent.append(self.send(batch, places)), batch)  # noqa: B023
            self.hand_over(writer)
            if not has_fit:
                return np.sort(np.concatenate(batches[number:]))
            self.pending = sent[0]
        self.hand_over(writer)
        return rows[:0]

    def batches_of(self, rows: np.ndarray) -> list[np.ndarray]:
        """Rows of the plan that share a forward."""
        batches = make_batches(self.lengths[rows], self.token_budget, bound=self.length_bound)
        return [rows[batch] for batch in batches]

    def fits(self, run: Callable[[], None], batch: np.ndarray) -> bool:
        """Runs it; False where the device's memory does not hold it and smaller batches are to be tried, once."""
        failure = ""
        try:
            run()
        except torch.OutOfMemoryError as error:
            failure = str(error).splitlines()[0]
        if failure:  # here nothing of the failed forward is alive any more
            self.halve(batch, failure)
        return not failure

    def halve(self, batch: np.ndarray, failure: str) -> None:
        """Halves the token budget, once. Raises UserError the second time."""
        device, longest = self.order.device, int(self.lengths[batch].max())
        if self.token_budget < self.order.token_budget or self.token_budget == 1:
            raise self.too_large(batch, failure)
        self.token_budget = max(1, self.token_budget // 2)
        self.side.make_room()
        detail = f"{len(batch)} sample(s) of up to {longest:,} tokens did not fit: {failure}"
        self.channel.tell(Halved(device, self.token_budget, detail))

    def too_large(self, batch: np.ndarray, failure: str) -> UserError:
        """What is said of a batch for which the device has no memory and no smaller ones are to be tried."""
        longest = int(self.lengths[batch].max())
        was_halved = self.token_budget < self.order.token_budget
        again = f", half of {self.order.token_budget:,}" if was_halved else ""
        return UserError(
            f"{self.order.device} ran out of memory a second time, with {len(batch)} sample(s) of up to {longest:,} "
            f"tokens and token_budget = {self.token_budget:,}{again}: {failure}",
            f"room beside the target for the states and the forward of {len(batch) * longest:,} tokens; "
            f"{self.states_bytes(len(batch) * longest) / 1e9:.2f} GB of it are the states that are recorded",
            f"give --token-budget {max(1, self.token_budget // 2)}, fewer --taps, or more --gpus-per-shard; "
            "committed segments stay, and states are the same within rounding",
        )

    def states_bytes(self, num_tokens: int) -> int:
        """Bytes of the recorded states of so many tokens as they come from the forward."""
        planes = len(self.manifest.tap_layers) + int(self.manifest.has_last)
        return num_tokens * planes * self.manifest.hidden_size * self.target.dtype.itemsize

    def check(self, batches: list[np.ndarray]) -> None:
        """Before this worker's first segment: is the target causal, and in batches what it is alone?"""
        padded = (b for b in batches if len(b) > 1 and self.lengths[b[0]] > self.lengths[b[-1]])
        ids, lengths = self.load(next(padded, batches[0]))
        check_target(self.target, ids, lengths, self.manifest.tap_layers, last=self.manifest.has_last)
        self.is_checked = True

    def send(self, batch: np.ndarray, wanted: np.ndarray) -> Sent:
        """Sends one batch to the device: the forward, the judging and the encoding, so that int8 halves the copy.

        What is run again alone goes first: the device is soon through with a sample, and has the batch to do behind it.
        """
        ids, lengths = self.load(batch)
        alone = {
            place: self.run_again(ids[place, : int(self.lengths[batch[place]])])
            for place in wanted.tolist()
            if self.is_chosen_again[batch[place]]
        }
        taps, final = self.target.record(
            ids, lengths, self.manifest.tap_layers, last=self.manifest.has_last, shape=self.compiled_shape(batch)
        )
        states = taps if final is None else torch.cat([taps, final[None]])  # [Lt (+1), N, S, H]
        first, n = self.plan["first"][batch], self.plan["n"][batch]
        stored = recorded_part(states.to(torch.bfloat16), first, n, self.side)  # [Lt (+1), N, longest n, H]
        rows = encode_states(stored, self.codec.outliers)
        measured, counts = self.measure(stored, rows, batch, wanted)
        return Sent(
            batch=batch,
            wanted=wanted,
            rows=rows,
            peaks=peaks_there(stored),
            errors=measured,
            num_measured=counts,
            again={place: Again.of(one, taps, final, place) for place, one in alone.items()},
            computed=self.side.computed(),
        )

    def compiled_shape(self, batch: np.ndarray) -> tuple[int, int] | None:
        """The shape that a batch is padded to where the target is compiled, None where not; a new one is told."""
        if not self.order.compile:
            return None
        compiled, longest, bound = self.target.compiled, int(self.lengths[batch].max()), self.length_bound
        shape = compiled.shape_for(len(batch), longest, self.token_budget)
        if shape is not None and bound is not None and longest <= bound < shape[1]:
            return None  # padding alone would give it the angles of a longer text
        if shape is not None and shape not in compiled.shapes:
            self.channel.tell(Compiled(self.order.device, len(compiled.shapes) + 1))
        return shape

    def run_again(self, ids: torch.Tensor) -> Alone:
        """Sends a sample of ids [n] to the device once more, alone."""
        return run_alone(self.target, ids, self.manifest.tap_layers, with_head=self.manifest.has_last)

    def measure(
        self, states: torch.Tensor, rows: torch.Tensor, batch: np.ndarray, wanted: np.ndarray
    ) -> tuple[torch.Tensor | None, list[int]]:
        """Errors of some states [Lt, N, S, H] of the wanted samples, where the codec has any, and how many of each."""
        if self.codec.outliers is None:
            return None, []
        places = [
            measured_places(int(self.plan["position"][row]), int(self.plan["n"][row])) for row in batch[wanted].tolist()
        ]
        counts = [len(own) for own in places]
        index = np.stack([np.repeat(wanted, counts), np.concatenate(places)])  # [2, M]
        sample, place = self.side.upload(index)
        return errors(states[:, sample, place], rows[:, sample, place], self.codec.outliers), counts

    def hand_over(self, writer: StateWriter) -> None:
        """Copies the batch before the one that was sent last into the writer's memory, judges it and hands it over.

        The copy starts when the forward behind it has been sent whole: where a forward asks the device for a number
        after all, the host would get it behind the copy, with the device idle meanwhile.
        """
        sent, self.pending = self.pending, None
        if sent is None:
            return
        room = writer.room(tuple(sent.rows.shape))
        pairs = [(sent.rows, room.rows)]
        here: dict[str, torch.Tensor] = {}
        for name, there in (("peaks", sent.peaks), ("errors", sent.errors)):
            if there is not None:
                here[name] = self.side.host(there)
                pairs.append((there, here[name]))
        self.side.copy(pairs, sent.computed).wait()
        peak, n = here["peaks"].numpy(), self.plan["n"][sent.batch]
        entries = [
            Entry(int(sent.batch[place]), place, status_of(peak[:, place, : n[place]]))
            for place in sent.wanted.tolist()
        ]
        entries = self.judged_again(entries, sent)
        writer.put(room, with_errors(entries, here.get("errors"), sent.num_measured))
        self.channel.tell(Recorded(int(n[sent.wanted].sum()), room.waited_s))

    def judged_again(self, entries: list[Entry], sent: Sent) -> list[Entry]:
        """The entries of a batch, those that were run again compared; once more alone on the device where it is full.

        Raises UserError where that does not fit either.
        """
        failure = ""
        for _ in range(2):
            try:
                return [self.checked_again(entry, sent) for entry in entries]
            except torch.OutOfMemoryError as error:
                failure = str(error).splitlines()[0]
            self.side.make_room()  # the next batch's forward was under way beside it
        raise self.too_large(sent.batch, failure)

    def checked_again(self, entry: Entry, sent: Sent) -> Entry:
        """The entry, marked as failed where the sample alone has other states than in its batch."""
        again = sent.again.get(entry.place)
        if again is None or entry.status != STATUS_OK:
            return entry
        with self.side.beside(sent.computed):
            fault = fault_against(self.target, again.alone, again.taps, again.last, self.manifest.tap_layers)
        self.channel.tell(CheckedAgain(again.taps.shape[1], fault is not None))
        if fault is None:
            return entry
        if not self.has_told_fault:
            self.has_told_fault = True
            sample = int(self.plan["sample_id"][entry.row])
            self.channel.tell(Note(f"sample {sample} is marked as failed: {fault.happened} ({fault.expected})"))
        return replace(entry, status=STATUS_FAILED)

    def load(self, batch: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [N, S] long, zero-padded on the right, on the device; lengths [N] long, on the CPU.

        Only tokens up to the last recorded one are run: a causal target's states there see nothing later.
        """
        lengths = self.lengths[batch]  # [N]
        ids = np.zeros((len(batch), int(lengths.max())), dtype=np.int64)  # [N, S]
        for place, (row, n) in enumerate(zip(batch.tolist(), lengths.tolist())):
            tokens, _ = self.samples.tokens_at(int(self.plan["tokens_file"][row]), int(self.plan["tokens_row"][row]))
            ids[place, :n] = tokens[:n]
            if ids[place].max() >= self.target.facts.vocab_size:
                raise UserError(
                    f"sample {self.plan['sample_id'][row]} holds token id {ids[place].max()}",
                    f"ids below the {self.target.facts.vocab_size} rows of the target's embedding",
                    "prepare the data with the target's own tokenizer",
                )
        return self.side.upload(ids), torch.from_numpy(lengths)
