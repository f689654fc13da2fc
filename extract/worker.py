"""One worker of `extract`: loads the target and records groups of segments.

Runs in a process of its own under `watch`. It asks its launcher for work and never decides
what to do next; what it is asked to do gives the same bytes whoever does it.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .. import UserError
from ..store.codecs import get_codec
from ..store.index import STATUS_FAILED, STATUS_NON_FINITE, STATUS_OK, columns, read_plan
from ..store.manifest import Manifest, read_manifest
from ..store.samples import SampleTable
from ..watch import Channel
from .batching import make_batches
from .devices import single_devices
from .recheck import chosen_again
from .writing import Entry, WriterProcess

if TYPE_CHECKING:
    import torch

    from .targets.hf import HfTarget

MEASURED_EVERY = 101  # positions; a prime, so that no place in a chunk or a sample is preferred


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What a worker is told at its start; everything that is the store's identity stands in the store."""

    store_dir: str
    device: str
    token_budget: int
    cpu_threads: int
    slow_kernels: bool
    stall_s: float


@dataclass(frozen=True, slots=True)
class Note:
    """Told once the target is loaded: a line for the user; the same one from all workers is shown once."""

    text: str


@dataclass(frozen=True, slots=True)
class WantsFrozenWork:
    """Asked once, with the target loaded; True says: write the frozen parts."""


@dataclass(frozen=True, slots=True)
class WantsGroup:
    """Asked for each group; the reply is a Group, or None when there is no more."""


@dataclass(frozen=True, slots=True)
class Group:
    """Segments whose samples are batched together, and those of them that are still to be written."""

    segments: range
    wanted: frozenset[int]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Told after each batch: recorded positions on their way to the disk, not yet committed."""

    num_positions: int


@dataclass(frozen=True, slots=True)
class CheckedAgain:
    """Told after a sample was run a second time, alone: its tokens, and whether it is now marked as failed."""

    num_tokens: int
    has_failed: bool


class StateWriter(Protocol):
    """Where a worker's encoded states go: a process of their own, or straight to the disk."""

    def put(self, rows: "torch.Tensor", entries: tuple[Entry, ...]) -> None: ...


def work(channel: Channel, order: Order) -> None:
    """A worker's life. Raises UserError for a target that changed or is unsound, or a full disk."""
    import torch

    from .targets.hf import load_target

    store_dir = Path(order.store_dir)
    manifest = read_manifest(store_dir)
    first, *beside = single_devices(order.device)
    if order.device == "cpu":
        torch.set_num_threads(order.cpu_threads)
    else:
        torch.cuda.set_device(first)
    target = load_target(manifest.target["name"], device=first, dtype=manifest.target["dtype"], beside=beside)
    require_same_target(manifest, target.facts.as_plain())
    if not order.slow_kernels:
        target.require_fast_kernels()
    if target.kernel_note:
        channel.tell(Note(target.kernel_note))
    if channel.ask(WantsFrozenWork(), order.stall_s):
        from ..store.frozen import write_frozen

        write_frozen(store_dir, *target.frozen())
    recorder = Recorder(channel, order, manifest, target)
    slot_bytes = recorder.largest_batch_bytes()
    with WriterProcess(channel, store_dir, slot_bytes=slot_bytes, stall_s=order.stall_s) as writer:
        while (group := channel.ask(WantsGroup(), order.stall_s)) is not None:
            assert isinstance(group, Group)
            recorder.record(group, writer)
        writer.finish()


def require_same_target(manifest: Manifest, facts: dict[str, Any]) -> None:
    """The launcher read these facts a moment ago; weights may be replaced under a running command."""
    changed = [name for name, value in manifest.target.items() if facts.get(name) != value]
    if changed:
        name = changed[0]
        raise UserError(
            f"the target changed while it was loaded: {name} = {facts.get(name)!r}",
            f"{manifest.target[name]!r}, as the store says",
            "leave the target's folder alone while extract runs, then give the same command again",
        )


class Recorder:
    """Runs the target over groups of segments; holds the states of one batch at a time."""

    def __init__(self, channel: Channel, order: Order, manifest: Manifest, target: "HfTarget") -> None:
        self.channel = channel
        self.target = target
        self.manifest = manifest
        self.codec = get_codec(manifest.codec)
        self.token_budget = order.token_budget
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

    def largest_batch_bytes(self) -> int:
        """Bytes that the encoded states of any batch of this store fit into."""
        tokens = max(int(self.plan["n"].max()), min(self.token_budget, 2 * int(self.lengths.sum())))
        planes = len(self.manifest.tap_layers) + int(self.manifest.has_last)
        return tokens * planes * self.codec.row_bytes(self.manifest.hidden_size)

    def record(self, group: Group, writer: StateWriter) -> None:
        """Records the wanted segments of a group.

        The batches are those of the whole group, whatever is wanted of it, so that a resumed
        group gives the same bytes; a batch without a wanted sample is not run. Samples leave as
        their batches come, so memory holds one batch and the writer one open file per segment.
        """
        first, last = np.searchsorted(self.plan["segment"], [group.segments.start, group.segments.stop])
        batches = [int(first) + batch for batch in make_batches(self.lengths[first:last], self.token_budget)]
        if not self.is_checked:
            self.check(batches)
        for batch in batches:
            is_wanted = [segment in group.wanted for segment in self.plan["segment"][batch].tolist()]
            if any(is_wanted):
                self.record_batch(batch, np.flatnonzero(is_wanted), writer)

    def check(self, batches: list[np.ndarray]) -> None:
        """Before this worker's first segment: is the target, run in batches, the target run alone?"""
        from .soundness import check_target

        padded = (b for b in batches if len(b) > 1 and self.lengths[b[0]] > self.lengths[b[-1]])
        ids, lengths = self.load(next(padded, batches[0]))
        check_target(self.target, ids, lengths, self.manifest.tap_layers, last=self.manifest.has_last)
        self.is_checked = True

    def record_batch(self, batch: np.ndarray, wanted: np.ndarray, writer: StateWriter) -> None:
        """Runs one batch and hands its wanted samples, places in the batch, to the writer.

        They are judged as they were recorded and encoded where they are, so that int8 halves the copy off a GPU.
        """
        import torch

        from .int8_rows import encode_states
        from .soundness import peaks

        ids, lengths = self.load(batch)
        taps, final = self.target.record(ids, lengths, self.manifest.tap_layers, last=self.manifest.has_last)
        states = taps if final is None else torch.cat([taps, final[None]])  # [Lt (+1), N, S, H]
        first, n = self.plan["first"][batch], self.plan["n"][batch]
        stored = recorded_part(states.to(torch.bfloat16), first, n)  # [Lt (+1), N, longest n, H]
        peak = peaks(stored)  # [Lt (+1), N, longest n]
        entries = [Entry(int(batch[place]), place, status_of(peak[:, place, : n[place]])) for place in wanted.tolist()]
        entries = [self.checked_again(e, ids, taps, final) if self.is_chosen_again[e.row] else e for e in entries]
        rows = encode_states(stored, self.codec.outliers)
        writer.put(rows, self.measured(stored, rows, entries))
        self.channel.tell(Recorded(int(self.plan["n"][batch[wanted]].sum())))

    def checked_again(
        self, entry: Entry, ids: "torch.Tensor", taps: "torch.Tensor", final: "torch.Tensor | None"
    ) -> Entry:
        """The entry, marked as failed where the sample alone has other states than in this batch.

        ids [N, S], taps [Lt, N, S, H] and final [N, S, H] are the batch's, in the number format of the forward.
        """
        from .soundness import fault_of_sample

        if entry.status != STATUS_OK:
            return entry
        place, n = entry.place, int(self.lengths[entry.row])
        last = None if final is None else final[place, :n]
        own = taps[:, place, :n]
        fault = fault_of_sample(
            self.target, ids[place, :n], own, last, self.manifest.tap_layers, with_head=last is not None
        )
        self.channel.tell(CheckedAgain(n, fault is not None))
        if fault is None:
            return entry
        if not self.has_told_fault:
            self.has_told_fault = True
            sample = int(self.plan["sample_id"][entry.row])
            self.channel.tell(Note(f"sample {sample} is marked as failed: {fault.happened} ({fault.expected})"))
        return replace(entry, status=STATUS_FAILED)

    def measured(self, states: "torch.Tensor", rows: "torch.Tensor", entries: list[Entry]) -> tuple[Entry, ...]:
        """The entries with the errors of some of their sound states [Lt (+1), N, S, H], where the codec has any."""
        import torch

        from .int8_rows import errors

        if self.codec.outliers is None:
            return tuple(entries)
        places = [measured_places(int(self.plan["position"][e.row]), int(self.plan["n"][e.row])) for e in entries]
        places = [own if e.status == STATUS_OK else own[:0] for own, e in zip(places, entries)]
        counts = [len(own) for own in places]
        index = np.stack([np.repeat([e.place for e in entries], counts), np.concatenate(places)])  # [2, M]
        sample, place = torch.from_numpy(index).to(states.device)
        found = errors(states[:, sample, place], rows[:, sample, place], self.codec.outliers).cpu().numpy()  # [Lt, M]
        parts = np.split(found, np.cumsum(counts)[:-1], axis=1)
        return tuple(replace(e, errors=part.reshape(-1)) for e, part in zip(entries, parts))

    def load(self, batch: np.ndarray) -> tuple["torch.Tensor", "torch.Tensor"]:
        """Token ids [N, S] long, zero-padded on the right, and lengths [N] long, on the CPU.

        Only tokens up to the last recorded one are run: a causal target's states there see nothing later.
        """
        import torch

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
        return torch.from_numpy(ids), torch.from_numpy(lengths)


def measured_places(position: int, n: int) -> np.ndarray:
    """Which of a sample's n recorded positions are measured: every 101st of the segment, whoever records it."""
    return np.arange((MEASURED_EVERY // 2 - position) % MEASURED_EVERY, n, MEASURED_EVERY)


def recorded_part(states: "torch.Tensor", first: np.ndarray, n: np.ndarray) -> "torch.Tensor":
    """States [Lt, N, longest n, H] of the tokens first .. first + n - 1 [N] of states [Lt, N, S, H].

    What lies behind a sample's n is padding: repetitions of its last state in the batch.
    """
    import torch

    if not first.any():
        return states
    places = first[:, None].astype(np.int64) + np.arange(int(n.max()))  # [N, longest n]
    index = torch.from_numpy(np.minimum(places, states.shape[2] - 1)).to(states.device)
    return states[:, torch.arange(len(n), device=states.device)[:, None], index]


def status_of(peak: np.ndarray) -> int:
    """The status of a sample from the largest absolute value of each of its states, [Lt, n]."""
    from .soundness import has_zero_state, is_finite

    if not is_finite(peak):
        return STATUS_NON_FINITE
    return STATUS_FAILED if has_zero_state(peak) else STATUS_OK
