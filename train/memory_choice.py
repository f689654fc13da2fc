"""What a run chooses for the memory of its card, the table that says so, and what it refuses.

Chooses the chunk of the loss, activation checkpointing and the CUDA graph; none of them changes a result beyond
rounding. Plain arithmetic; knows no device and no store.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .. import UserError
from .config import CHUNK_BLOCKS, TrainConfig
from .facts import RunFacts
from .memory import Plan, predict_peak
from .slot import TILE, RowShape, default_anchors, equal_chunk
from .spec import DrafterSpec

HEAD_ROWS_MOST = 8192  # rows of the head in one chunk: more gain nothing
HEAD_ROWS_FEW = 1024  # fewer cost more than checkpointing does
ANCHOR_STEP = 64  # suggested anchors are a multiple, so that chunks can divide them

# Estimates, to be fitted to tests/bench/step.py --part memory: what a card has beside the tensors.
CONTEXT_BYTES = 2**30  # CUDA's context, loaded kernels
LOST_SHARE = 0.04  # of the card, to gaps between the allocator's blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a run is to do, and what of its memory the user has settled: None and 'auto' are chosen."""

    spec: DrafterSpec
    shape: RowShape
    optimizer: str
    objective: str
    dtype: str
    codec: str
    head_is_tied: bool
    least_row_tokens: int  # of a row that holds the longest sample
    has_default_anchors: bool = False  # they follow the row's tokens
    chunk_blocks: int | None = None
    checkpointing: str = "auto"
    cuda_graph: str = "auto"

    def plan(self, chunk_blocks: int, is_checkpointed: bool, has_graph: bool) -> Plan:
        return predict_peak(
            self.spec,
            self.shape,
            optimizer=self.optimizer,
            chunk_blocks=chunk_blocks,
            is_checkpointed=is_checkpointed,
            objective=self.objective,
            dtype=self.dtype,
            head_is_tied=self.head_is_tied,
            codec=self.codec,
            has_graph=has_graph,
            sample_tokens=self.least_row_tokens,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, or settled before, and the memory that it takes."""

    chunk_blocks: int
    is_checkpointed: bool
    has_graph: bool
    plan: Plan
    card_bytes: int


def room_bytes(card_bytes: int) -> int:
    """What tensors may take on a card with this much memory."""
    return int(card_bytes * (1.0 - LOST_SHARE)) - CONTEXT_BYTES


def choose(demand: Demand, card_bytes: int) -> Choice | None:
    """The fastest choice that fits the card, None where none does.

    First without checkpointing and with the largest chunk, then smaller chunks while they stay efficient, then with
    checkpointing, at last chunks of any size; a graph is added where it fits beside an exam, and first of all where
    it was asked for.
    """
    room, found = room_bytes(card_bytes), list(candidates(demand))
    if demand.plan(*found[-1], demand.cuda_graph == "on").peak_bytes > room:
        return None
    for chunk_blocks, is_checkpointed in found:
        for has_graph in {"auto": (True, False), "on": (True,), "off": (False,)}[demand.cuda_graph]:
            plan = demand.plan(chunk_blocks, is_checkpointed, has_graph)
            if plan.peak_bytes <= room:
                return Choice(chunk_blocks, is_checkpointed, has_graph, plan, card_bytes)
    return None


def candidates(demand: Demand) -> Iterator[tuple[int, bool]]:
    """Chunk sizes with and without checkpointing, the fastest first."""
    settled = demand.chunk_blocks
    sizes = chunk_sizes(demand.shape) if settled is None else [equal_chunk(demand.shape.anchors, settled)]
    few = [size for size in sizes if size * (demand.shape.block_size - 1) < HEAD_ROWS_FEW and size != sizes[0]]
    good = [size for size in sizes if size not in few]
    choices = {"auto": (False, True), "off": (False,), "on": (True,)}[demand.checkpointing]
    for is_checkpointed in choices:
        yield from ((size, is_checkpointed) for size in good)
    yield from ((size, choices[-1]) for size in few)


def chunk_sizes(shape: RowShape) -> list[int]:
    """Blocks of a chunk that divide the anchors and give at most 8,192 rows of the head, the largest first."""
    most = max(HEAD_ROWS_MOST // (shape.block_size - 1), 1)
    return [size for size in range(min(most, shape.anchors), 0, -1) if shape.anchors % size == 0]


def fitted(
    config: TrainConfig,
    facts: RunFacts,
    old: RunFacts | None,
    *,
    card_bytes: int | None,
    head_is_tied: bool,
    least_row_tokens: int,
) -> tuple[RunFacts, Choice | None]:
    """The facts with chunk and checkpointing settled, and the choice for a card of `card_bytes`; None: on a CPU.

    What the config leaves open a resumed run takes from its `old` facts, so that it goes on bit for bit. Raises
    UserError where nothing fits.
    """
    chunk_blocks, checkpointing = config.loss.chunk_blocks, config.checkpointing
    if old is not None:
        chunk_blocks = chunk_blocks or old.chunk_blocks
        checkpointing = on_off(old.is_checkpointed) if checkpointing == "auto" else checkpointing
    if card_bytes is None:
        settled = {"chunk_blocks": chunk_blocks or CHUNK_BLOCKS, "is_checkpointed": checkpointing == "on"}
        return replace(facts, **settled), None
    demand = Demand(
        spec=facts.spec,
        shape=facts.shape,
        optimizer=config.optim.name,
        objective=config.loss.objective,
        dtype=facts.dtype,
        codec=facts.codec_name,
        head_is_tied=head_is_tied,
        least_row_tokens=least_row_tokens,
        has_default_anchors=config.rows.anchors is None,
        chunk_blocks=chunk_blocks,
        checkpointing=checkpointing,
        cuda_graph=config.cuda_graph,
    )
    choice = require_room(demand, card_bytes, is_new=old is None)
    kept = choice.chunk_blocks if chunk_blocks is None else chunk_blocks
    return replace(facts, chunk_blocks=kept, is_checkpointed=choice.is_checkpointed), choice


def require_room(demand: Demand, card_bytes: int, *, is_new: bool) -> Choice:
    """The choice for the card. Raises UserError where nothing fits, naming the smallest change that would.

    The rows of a run that is resumed stay as they are.
    """
    choice = choose(demand, card_bytes)
    if choice is not None:
        return choice
    chunk_blocks, is_checkpointed = list(candidates(demand))[-1]
    plan = demand.plan(chunk_blocks, is_checkpointed, demand.cuda_graph == "on")
    change = next(
        (f"--set {setting}" for setting, changed in changes(demand, is_new) if choose(changed, card_bytes)),
        "train a smaller drafter (--layers, drafter.intermediate_size), or take a card with more memory",
    )
    raise UserError(
        f"the run needs {gib(plan.peak_bytes)} GiB of device memory at its peak ({plan.largest.name}), with "
        f"loss.chunk_blocks = {chunk_blocks} and checkpointing {on_off(is_checkpointed)}",
        f"at most {gib(room_bytes(card_bytes))} GiB: the card has {gib(card_bytes)}, some of which CUDA takes",
        change,
    )


def changes(demand: Demand, is_new: bool) -> Iterator[tuple[str, Demand]]:
    """Settings that take less memory, the least costly first, each with what the run would then be."""
    if demand.cuda_graph == "on":
        yield "cuda_graph=off", replace(demand, cuda_graph="off")
    if demand.checkpointing == "off":
        yield "checkpointing=on", replace(demand, checkpointing="on")
    if is_new:
        shape = demand.shape
        step = max(ANCHOR_STEP, shape.unit) if shape.anchors > ANCHOR_STEP else shape.unit
        for anchors in range((shape.anchors - 1) // step * step, 0, -step):
            yield f"rows.anchors={anchors}", replace(demand, shape=replace(shape, anchors=anchors))
        for tokens in range(shape.row_tokens - TILE, demand.least_row_tokens - 1, -TILE):
            own = default_anchors(tokens, shape.block_size) if demand.has_default_anchors else shape.anchors
            yield f"rows.row_tokens={tokens}", replace(demand, shape=replace(shape, row_tokens=tokens, anchors=own))
    if demand.chunk_blocks is not None:
        for size in chunk_sizes(demand.shape):
            if size < demand.chunk_blocks:
                yield f"loss.chunk_blocks={size}", replace(demand, chunk_blocks=size)


def memory_table(choice: Choice) -> str:
    """The plan as lines: part, GiB, and the settings that it grows with."""
    plan = choice.plan
    parts = [*plan.held, *plan.largest.parts]
    width = max(len(part.name) for part in parts)
    peak = f"{gib(plan.peak_bytes)} of {gib(choice.card_bytes)} GiB at its peak ({plan.largest.name})"
    lines = [f"device memory, predicted: {peak}"]
    lines += [
        f"  {part.name:{width}} {gib(part.size_bytes):>7}  {part.grows_with}" for part in parts if part.size_bytes
    ]
    return "\n".join(
        [
            *lines,
            f"  loss.chunk_blocks = {choice.chunk_blocks}, checkpointing {on_off(choice.is_checkpointed)}, "
            f"CUDA graph {on_off(choice.has_graph)}",
        ]
    )


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f}"


def on_off(is_on: bool) -> str:
    return "on" if is_on else "off"
