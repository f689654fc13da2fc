"""The offline exam: drafts at every position of held-out answers, then walks them as decode would.

No target is loaded: a recorded answer that the target wrote greedily already says which drafts
it would accept, so the walk counts the same cycles as speculative decoding (tests compare them
one by one). On answers from elsewhere it measures agreement with the text, not with the target.
Knows the store and the drafter's forward; must not know the training loop that calls it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ... import UserError
from ...store.reader import StoreReader
from ...store.samples import eligible_anchors
from ..blocks import RowMasks
from ..drafter import Drafter
from ..slot import RowShape
from ..slot_counts import SlotCounts
from .acceptance import Acceptance, AnswerCycles, Cycle, judge
from .drafting import choose_tokens, require_finite
from .prompts import ids_sha256, sample_name, turn_name

HEAD_BLOCKS = 64  # blocks whose logits exist at once


@dataclass(frozen=True, slots=True)
class HeldOutSample:
    """One recorded sample: ids [S], loss_mask bool [S], taps u16 (bfloat16 bits) [Lt, n, H] from token `first` on."""

    ids: np.ndarray
    loss_mask: np.ndarray
    taps: np.ndarray
    task: str = ""
    first: int = 0
    origin: str = ""
    name: str = ""

    @property
    def row_length(self) -> int:
        """Tokens it takes in a row: the n recorded ones and the last label."""
        return self.taps.shape[1] + 1


def recorded_samples(reader: StoreReader, rows: Iterable[int], tap_layers: Sequence[int]) -> Iterator[HeldOutSample]:
    """Samples of a store by reader number, with these of its taps, one in memory at a time."""
    stored = list(reader.manifest.tap_layers)
    taps = [stored.index(layer) for layer in tap_layers]
    for i in map(int, rows):
        ids, loss_mask = reader.tokens(i)
        out = np.empty((len(taps), int(reader.samples.n[i]), reader.manifest.hidden_size), np.uint16)  # [Lt, n, H]
        reader.read(i, out, taps=taps)
        task, origin = str(reader.samples.task[i]), str(reader.samples.origin[i])
        first, name = int(reader.samples.first[i]), sample_name(reader, i)
        yield HeldOutSample(ids, loss_mask, out, task, first, origin, name)


@torch.no_grad()
def walk(
    drafter: Drafter,
    embedding: torch.Tensor,
    head: torch.Tensor,
    samples: Iterable[HeldOutSample],
    shape: RowShape,
    *,
    forward: Callable[..., torch.Tensor] | None = None,
    slots: SlotCounts | None = None,
) -> Acceptance:
    """The acceptance of the drafter's present weights on the samples; changes nothing in it.

    embedding, head [V, H]: the target's frozen ones, on the drafter's device. The samples are
    read once and packed into rows of `shape.row_tokens`, which each must fit with its n + 1
    tokens; every forward has the one shape. `forward` is called in place of the drafter: on CUDA
    its compiled form. Each answer (supervised span) of a sample counts as one prompt. `slots` counts what was drafted
    at every eligible anchor, walked over or not. Raises UserError for a drafter whose output is not finite.
    """
    answers: list[AnswerCycles] = []
    for row in packed(samples, shape.row_tokens):
        drafted = draft_row(drafter, embedding, head, row, shape, drafter if forward is None else forward, slots)
        for sample, leading in zip(row, drafted):
            answers += walked(sample, leading, shape.block_size)
    return Acceptance(tuple(answers), shape.block_size)


def walked(sample: HeldOutSample, leading: np.ndarray, block_size: int) -> list[AnswerCycles]:
    """The answers of a sample; the first has the name that decoding gives it, the others are numbered."""
    own = spans(sample.loss_mask)
    asked = ids_sha256(sample.ids[: own[0][0]]) if own else ""
    return [
        AnswerCycles(
            walk_span(leading, first, last, block_size),
            sample.task,
            sample.origin,
            name=turn_name(sample.name, number),
            conversation=sample.name,
            prompt_sha256=asked,
        )
        for number, (first, last) in enumerate(own, start=1)
    ]


def spans(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """First and last index of each run of supervised tokens: the answers of a conversation."""
    edges = np.flatnonzero(np.diff(loss_mask.astype(np.int8), prepend=0, append=0))
    return [(int(first), int(end) - 1) for first, end in edges.reshape(-1, 2)]


def walk_span(leading: np.ndarray, first: int, last: int, block_size: int) -> tuple[Cycle, ...]:
    """The cycles of the answer at first..last: from its first token, start += produced.

    `leading` [S] holds, for a block anchored at each position, how many of its drafts from the
    first on equal the text. The answer's first token comes with the prompt and is no cycle.
    """
    cycles: list[Cycle] = []
    start = first
    while start < last:
        cycles.append(judge(int(leading[start]), last - start, block_size))
        start += cycles[-1].produced
    return tuple(cycles)


def packed(samples: Iterable[HeldOutSample], row_tokens: int) -> Iterator[list[HeldOutSample]]:
    """The samples in order, as many in a row as fit."""
    row: list[HeldOutSample] = []
    for sample in samples:
        if sample.row_length > row_tokens:
            raise UserError(
                f"a held-out sample takes {sample.row_length} tokens of a row of {row_tokens}",
                "rows that hold every sample whole",
                f"set rows.row_tokens to {-(-sample.row_length // 128) * 128} or more",
            )
        if row and sum(s.row_length for s in row) + sample.row_length > row_tokens:
            yield row
            row = []
        row.append(sample)
    if row:
        yield row


def draft_row(
    drafter: Drafter,
    embedding: torch.Tensor,
    head: torch.Tensor,
    row: list[HeldOutSample],
    shape: RowShape,
    forward: Callable[..., torch.Tensor],
    counts: SlotCounts | None = None,
) -> list[np.ndarray]:
    """For each sample [S]: leading drafts equal to its text, of a block at each eligible position; else 0."""
    device, spec = embedding.device, drafter.spec
    taps, ids, positions, begins = fill_row(drafter, row, shape)
    results = [np.zeros(len(sample.ids), np.int64) for sample in row]
    reaches = [tokens_ahead(sample.loss_mask) for sample in row]
    where = [(j, int(a)) for j, s in enumerate(row) for a in np.flatnonzero(eligible_anchors(s.loss_mask))]
    slots = torch.arange(shape.stride, device=device)  # [stride]
    for begin in range(0, len(where), shape.anchors):
        chunk = where[begin : begin + shape.anchors]
        spare = shape.anchors - len(chunk)  # spare slots repeat the last anchor and are not looked at
        places = [(a, begins[j], a - row[j].first) for j, a in chunk + [chunk[-1]] * spare]
        local, starts, behind = torch.tensor(places, device=device).unbind(1)  # [A] each; local: sample's positions
        anchors = starts + behind  # [A] row's positions
        block_ids = torch.full((shape.anchors, shape.stride), spec.mask_token_id, device=device)  # [A, stride]
        block_ids[:, 0] = ids[anchors]
        embeds = (embedding[block_ids.flatten()] * spec.embedding_scale).to(taps.dtype)  # [Q, H]
        masks = RowMasks(anchors, starts, shape, spec.kinds).masks
        hidden = forward(taps, embeds, positions, (local[:, None] + slots).flatten(), masks)  # [Q, H]
        hidden = hidden.view(shape.anchors, shape.stride, -1)[: len(chunk), 1 : shape.block_size]  # [<=A, B-1, H]
        require_finite(hidden, "output states")
        labels = ids[anchors[: len(chunk), None] + slots[1 : shape.block_size]]  # [<=A, B-1]
        right = (choose(hidden, head) == labels).cpu().numpy()  # [<=A, B-1]
        for (j, a), count in zip(chunk, np.logical_and.accumulate(right, axis=1).sum(1)):
            results[j][a] = count
        if counts is not None:
            counts.add(right, np.array([reaches[j][a] for j, a in chunk]))
    return results


def tokens_ahead(loss_mask: np.ndarray) -> np.ndarray:
    """For each token [S] how many trained-on ones follow it without a gap."""
    ahead = np.zeros(len(loss_mask), np.int64)
    for first, last in spans(loss_mask):
        ahead[first : last + 1] = last - np.arange(first, last + 1)
    return ahead


def fill_row(
    drafter: Drafter, row: list[HeldOutSample], shape: RowShape
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Taps [T, Lt*H], ids [T+B], local positions [T] of the packed samples, and where each begins.

    Labels behind a sample's end belong to its neighbour and are cut off when its answer is
    walked. Rows without a recorded state are zeros and never visible.
    """
    weight = drafter.fc.weight
    taps = torch.zeros(shape.row_tokens, weight.shape[1], dtype=weight.dtype, device=weight.device)  # [T, Lt*H]
    ids = torch.zeros(shape.row_tokens + shape.block_size, dtype=torch.int64)  # [T+B]
    positions = torch.zeros(shape.row_tokens, dtype=torch.int64)  # [T]
    begins, begin = [], 0
    for sample in row:
        num_recorded, length, first = sample.taps.shape[1], sample.row_length, sample.first
        planes = torch.from_numpy(sample.taps.view(np.int16)).view(torch.bfloat16)  # [Lt, n, H]
        taps[begin : begin + num_recorded] = planes.to(weight).permute(1, 0, 2).flatten(1)
        ids[begin : begin + length] = torch.from_numpy(sample.ids[first : first + length].astype(np.int64))
        positions[begin : begin + length] = torch.arange(first, first + length)
        begins.append(begin)
        begin += length
    return taps, ids.to(weight.device), positions.to(weight.device), begins


def choose(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """The likeliest token of hidden [n, B-1, H], in chunks: [n, B-1]."""
    return torch.cat([choose_tokens(part, head) for part in hidden.split(HEAD_BLOCKS)])
