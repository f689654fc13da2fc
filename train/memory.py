"""The most device memory that a training run takes, in bytes, from its shapes: before anything is allocated.

Plain arithmetic; knows no device, no tensor and no store. The peak is that of the largest moment: the loss of a row,
its backward, the update, or an exam, beside what is held from the first update to the last. Letters are those of the
project: T row tokens, A anchors, Q query slots, H, I, V widths, L layers, w bytes of a number in the run's dtype.

The constants below are estimates that tests/bench/step.py --part memory is to confirm on a device.
"""

from dataclasses import dataclass
from math import prod

from ..store.codecs import get_codec
from .config import TOKEN_OBJECTIVES
from .row_memory import (
    WIDE,
    WIDTHS,
    RowSizes,
    attention_matrices,
    matrices,
    mlp_matrices,
    num_norm_weights,
    num_weights,
    row_buffers,
)
from .slot import RowShape, RowSlot, equal_chunk
from .spec import DrafterSpec

# Estimates, to be fitted to tests/bench/step.py --part memory.
WORKSPACE_BYTES = 64 * 2**20  # matrix libraries: 32 MiB a stream on an H100, one stream more inside a graph
EXAM_BLOCKS = 64  # blocks whose logits an exam makes at once (train/evaluate/walk.py)
WIDE_LOGITS = {  # float32 copies of a chunk's logits in the compiled loss: without and with a soft cap (torch 2.13)
    "kl": (1, 3),
    "tv": (1, 2),
    "lk": (1, 2),
    "lk_hybrid": (1, 4),
}


@dataclass(frozen=True, slots=True)
class Part:
    """A share of the memory, and the settings that it grows with."""

    name: str
    size_bytes: int
    grows_with: str


@dataclass(frozen=True, slots=True)
class Moment:
    """What a moment of the run takes beside what is held."""

    name: str
    parts: tuple[Part, ...]

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """A run's memory: what is held all the time, and the moments that come and go."""

    held: tuple[Part, ...]
    moments: tuple[Moment, ...]

    @property
    def held_bytes(self) -> int:
        return sum(part.size_bytes for part in self.held)

    @property
    def largest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.size_bytes)

    @property
    def peak_bytes(self) -> int:
        """The run's peak, exams included."""
        return self.held_bytes + self.largest.size_bytes

    @property
    def step_bytes(self) -> int:
        """The peak of the steps alone."""
        return self.held_bytes + max(moment.size_bytes for moment in self.moments if moment.name != "exam")


def held_parts(sizes: RowSizes, *, optimizer: str, has_last: bool, head_is_tied: bool, codec: str) -> tuple[Part, ...]:
    """What lives from the first update to the last.

    Gradients are one flat fp32 sum; an fp32 weight is its own master. AdamW has two fp32 moments of every weight, Muon
    one of every matrix and AdamW's two of the rest.
    """
    spec, width = sizes.spec, sizes.width
    num_all = num_weights(spec)
    state = 2 * num_all if optimizer == "adamw" else num_all + num_norm_weights(spec)
    tables = (1 if head_is_tied else 2) * spec.vocab_size * spec.hidden_size * width
    return (
        Part("weights", num_all * width, "drafter, dtype"),
        Part("gradient sum, float32", num_all * WIDE, "drafter"),
        Part("masters, float32", num_all * WIDE if width != WIDE else 0, "drafter, dtype"),
        Part("optimizer state, float32", state * WIDE, "drafter, optim.name"),
        Part("target's embedding and head", tables + WIDE * spec.hidden_size, "target"),
        Part("row buffers", row_buffers(sizes, has_last), "rows.row_tokens, taps, rows.anchors"),
        Part("the next row, staged", staged_bytes(sizes, has_last, codec), "rows.row_tokens, taps, codec"),
        Part("libraries' workspaces", WORKSPACE_BYTES, "nothing"),
    )


def staged_bytes(sizes: RowSizes, has_last: bool, codec: str) -> int:
    """A row as the loader's slot holds it."""
    spec = sizes.spec
    slot = RowSlot(
        shape=sizes.shape, num_taps=spec.num_taps, hidden_size=spec.hidden_size, codec_name=codec, has_last=has_last
    )
    return slot.size_bytes


def predict_peak(
    spec: DrafterSpec,
    shape: RowShape,
    *,
    optimizer: str,
    chunk_blocks: int,
    is_checkpointed: bool,
    objective: str = "ce",
    dtype: str = "bfloat16",
    head_is_tied: bool = False,
    codec: str = "raw",
    has_graph: bool = False,
) -> Plan:
    """The plan of a run with these settings on CUDA.

    A CUDA graph keeps all that a row ever has at once, so the moments outside of a row come on top of it.
    """
    sizes = RowSizes(spec, shape, WIDTHS[dtype])
    has_last = objective not in TOKEN_OBJECTIVES
    row = (loss_moment(sizes, chunk_blocks, objective, is_checkpointed), backward_moment(sizes, is_checkpointed))
    others = [loading(sizes, codec), update(sizes, optimizer), exam(sizes, is_checkpointed)]
    if has_graph:
        pool = Part("CUDA graph of a row", max(moment.size_bytes for moment in row), "as a row; cuda_graph")
        others = [Moment(moment.name, (*moment.parts, pool)) for moment in others]
    held = held_parts(sizes, optimizer=optimizer, has_last=has_last, head_is_tied=head_is_tied, codec=codec)
    return Plan(held, (*row, *others))


def both_ends(sizes: RowSizes) -> Part:
    """The drafter's output and the loss's gradient by it: they live through loss and backward."""
    return Part("hidden states and their gradient", 2 * sizes.blocks, "rows.anchors")


def loss_moment(sizes: RowSizes, chunk_blocks: int, objective: str, is_checkpointed: bool) -> Moment:
    """The loss of one chunk: n rows of the head, B-1 of each of its blocks.

    Inputs [n, H]; products [n, V], over which an objective on tokens alone writes the gradient by them. With the
    target's distribution that gradient beside them, the target's products and inputs, the compiled loss's fp32 copies,
    and the row's normed last states [T, H], which three fp32 temporaries make before the first chunk.
    """
    spec, width = sizes.spec, sizes.width
    num_rows = equal_chunk(sizes.shape.anchors, chunk_blocks) * (sizes.shape.block_size - 1)
    has_last = objective not in TOKEN_OBJECTIVES
    logits = num_rows * spec.vocab_size * width
    if has_last:
        copies = WIDE_LOGITS[objective][spec.logit_softcap is not None]
        logits = num_rows * spec.vocab_size * (3 * width + copies * WIDE)
    chunk = logits + (2 if has_last else 1) * num_rows * spec.hidden_size * width
    if has_last:
        normed = 3 * WIDE * sizes.context // width
        chunk = sizes.context + max(chunk, normed)
    kept = Part("activations", sizes.kept(is_checkpointed), "rows.anchors, rows.row_tokens, checkpointing")
    return Moment("loss", (kept, both_ends(sizes), Part("logits of a chunk", chunk, "loss.chunk_blocks, target")))


def backward_moment(sizes: RowSizes, is_checkpointed: bool) -> Moment:
    """The largest moment of the backward, which goes from the last layer to the first."""
    kept, gradients, temporary = max(backward_moments(sizes, is_checkpointed), key=sum)
    parts = (
        Part("activations", kept, "rows.anchors, rows.row_tokens, checkpointing"),
        both_ends(sizes),
        Part("gradients of a row", gradients, "drafter, dtype"),
        Part("backward's temporaries", temporary, "rows.anchors, rows.row_tokens"),
    )
    return Moment("backward", parts)


def backward_moments(sizes: RowSizes, is_checkpointed: bool) -> list[tuple[int, int, int]]:
    """Activations, gradients of weights, and temporaries while each layer's MLP and attention are gone through.

    What lies below a layer is still kept, what lies above has its weights' gradients. Everywhere two gradients are on
    their way, of the residual stream and (from the first attention on) of the fused taps. MLP: gradients of gate and
    up, less the product, which is free by then, and the one of the normed input. Attention: gradients of the output,
    twice (flex attention takes a copy), of queries, keys and values, and flex attention's fp32 row sums. At the end
    come all weights' gradients, the first layer's input, and the fused taps with the gradients by them before and
    after the norm.
    """
    spec, width = sizes.spec, sizes.width
    inner, heads = (width * sum(map(prod, shapes)) for shapes in (mlp_matrices(spec), attention_matrices(spec)))
    down, out = width * prod(mlp_matrices(spec)[-1]), width * prod(attention_matrices(spec)[-1])
    mlp_way = sizes.gated + 2 * sizes.blocks + sizes.context
    sums = WIDE * sizes.shape.num_queries * spec.num_heads
    attention_way = sizes.blocks + 3 * sizes.queries + 2 * sizes.keys + sums + sizes.context
    found: list[tuple[int, int, int]] = []
    for layer in range(spec.num_layers):
        below = sizes.fused_taps + layer * (sizes.blocks if is_checkpointed else sizes.attention + sizes.mlp)
        above = (spec.num_layers - 1 - layer) * (inner + heads)
        found.append((below + sizes.attention + sizes.mlp, above + 2 * down, mlp_way))
        found.append((below + sizes.attention, above + inner + out, attention_way))
    return [*found, (sizes.fused_taps + sizes.blocks, width * num_weights(spec), 2 * sizes.context)]


def loading(sizes: RowSizes, codec: str) -> Moment:
    """One encoded plane of a row beside its buffer; an fp32 run decodes int8 to bfloat16 first."""
    tokens, hidden = sizes.shape.row_tokens, sizes.spec.hidden_size
    encoded = get_codec(codec)
    decoded = 2 * tokens * hidden if encoded.outliers is not None and sizes.width == WIDE else 0
    plane = tokens * encoded.row_bytes(hidden) + decoded
    return Moment("loading", (Part("an encoded tap", plane, "rows.row_tokens, codec"),))


def update(sizes: RowSizes, optimizer: str) -> Moment:
    """The optimizer's temporaries.

    The fused AdamW has none. Muon goes through one matrix [m, n] at a time: its update in fp32, in bfloat16, and in
    bfloat16 once more, and two bfloat16 products [k, k] with k the smaller side.
    """
    matrix = max((WIDE + 2 * 2) * prod(shape) + 2 * 2 * min(shape) ** 2 for shape in matrices(sizes.spec))
    size = matrix if optimizer == "muon" else 0
    return Moment("update", (Part("optimizer's temporaries", size, "drafter, optim.name"),))


def exam(sizes: RowSizes, is_checkpointed: bool) -> Moment:
    """An exam's row: taps of its own, made from two copies of a sample's, then the frame of training, then logits.

    The frame is the one of training, so it keeps the same activations until it returns.
    """
    rows = EXAM_BLOCKS * (sizes.shape.block_size - 1)
    logits = rows * (sizes.spec.vocab_size + sizes.spec.hidden_size) * sizes.width
    forward = sizes.kept(is_checkpointed) + sizes.blocks
    most = max(forward, 2 * sizes.taps, 2 * sizes.blocks + logits)
    own = Part("an exam's row", sizes.taps, "rows.row_tokens, taps")
    return Moment("exam", (own, Part("an exam's forward", most, "rows.anchors, rows.row_tokens, checkpointing")))
