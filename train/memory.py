"""The most device memory that a training run takes, in bytes, from its shapes: before anything is allocated.

Plain arithmetic; knows no device, no tensor and no store. The peak is that of the largest moment: the loss of a row,
its backward, the update, or an exam, beside what is held from the first update to the last. Letters are those of the
project: T row tokens, A anchors, Q query slots, H, I, V widths, L layers, w bytes of a number in the run's dtype.

What a compiled forward and backward have at once was read off the code that torch's compiler makes for an H200 (torch
2.11, 40 shapes, its allocations added up on a CPU, 2026-11). Where a backward was the peak that
`tests/bench/step.py --part memory` measured there, the sum was right to 0.01 GiB. Torch 2.13 takes the same or, with
checkpointing, up to 5 % less (six shapes).
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

WORKSPACE_BYTES = 64 * 2**20  # matrix libraries: 32 MiB a stream on an H100, one stream more inside a graph
EXAM_BLOCKS = 64  # blocks whose logits an exam makes at once (train/evaluate/walk.py)
WIDE_LOGITS = {  # float32 copies of a chunk's logits in the compiled loss: without and with a soft cap (torch 2.13)
    "kl": (1, 3),
    "tv": (1, 2),
    "lk": (1, 2),
    "lk_hybrid": (1, 4),
}
DEAD_QUERIES = 2.5  # buffers that nobody reads any more, in [nq, Q, d], see `computed_again`
MANY_LAYERS = 7  # from here on a checkpointed backward computes some of all layers again at once, see `kept_below`


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
    sample_tokens: int | None = None,
) -> Plan:
    """The plan of a run with these settings on CUDA.

    No sample is longer than `sample_tokens`, or than a row. A CUDA graph keeps all that a row ever has at once, so the
    moments outside of a row come on top of it; torch counts that memory as reserved then, not as allocated.
    """
    sizes = RowSizes(spec, shape, WIDTHS[dtype])
    has_last = objective not in TOKEN_OBJECTIVES
    row = (loss_moment(sizes, chunk_blocks, objective, is_checkpointed), backward_moment(sizes, is_checkpointed))
    others = [loading(sizes, codec), update(sizes, optimizer), exam(sizes, is_checkpointed, sample_tokens)]
    if has_graph:
        pool = Part("CUDA graph of a row", max(moment.size_bytes for moment in row), "as a row; cuda_graph")
        others = [Moment(moment.name, (*moment.parts, pool)) for moment in others]
    held = held_parts(sizes, optimizer=optimizer, has_last=has_last, head_is_tied=head_is_tied, codec=codec)
    return Plan(held, (*row, *others))


def throughout(sizes: RowSizes) -> tuple[Part, ...]:
    """What lives through loss and backward: the drafter's output and the loss's gradient by it, and rotary angles."""
    return (
        Part("hidden states and their gradient", 2 * sizes.blocks, "rows.anchors"),
        Part("rotary angles", rotary_angles(sizes), "rows.row_tokens, rows.anchors"),
    )


def rotary_angles(sizes: RowSizes) -> int:
    """Cosines and sines of the context's and of the blocks' positions: [T, d/2] and [Q, d/2] of each, fp32."""
    return WIDE * sizes.shape.num_keys * sizes.spec.head_dim


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
    return Moment("loss", (kept, *throughout(sizes), Part("logits of a chunk", chunk, "loss.chunk_blocks, target")))


def backward_moment(sizes: RowSizes, is_checkpointed: bool) -> Moment:
    """The largest moment of the backward, which goes from the last layer to the first."""
    kept, gradients, temporary = max(backward_moments(sizes, is_checkpointed), key=sum)
    parts = (
        Part("activations", kept, "rows.anchors, rows.row_tokens, checkpointing"),
        *throughout(sizes),
        Part("gradients of a row", gradients, "drafter, dtype"),
        Part("backward's temporaries", temporary, "rows.anchors, rows.row_tokens"),
    )
    return Moment("backward", parts)


def backward_moments(sizes: RowSizes, is_checkpointed: bool) -> list[tuple[int, int, int]]:
    """Activations, gradients of weights, and temporaries at every moment of the backward that may be its largest.

    A layer has two, see `kept_before` and `computed_again`. What lies below it is still kept; what lies above has its
    weights' gradients, and two gradients by the fused taps [T, H], by way of keys and of values, which are summed at
    the end alone. The end has all of these, the first layer's input and the fused taps.
    """
    spec = sizes.spec
    layer_weights = weight_bytes(sizes, mlp_matrices(spec) + attention_matrices(spec))
    found: list[tuple[int, int, int]] = []
    for layer in range(spec.num_layers):
        above = spec.num_layers - 1 - layer
        below = sizes.fused_taps + layer * kept_below(sizes, is_checkpointed)
        own = computed_again(sizes, layer) if is_checkpointed else kept_before(sizes)
        for kept, weights, temporary in own:
            found.append((below + kept, above * layer_weights + weights, temporary + 2 * above * sizes.context))
    first = sizes.fused_taps + sizes.blocks
    return [*found, (first, sizes.width * num_weights(spec), 2 * spec.num_layers * sizes.context)]


def weight_bytes(sizes: RowSizes, shapes: list[tuple[int, int]]) -> int:
    return sizes.width * sum(map(prod, shapes))


def kept_below(sizes: RowSizes, is_checkpointed: bool) -> int:
    """Of a layer that the backward has not come to.

    With checkpointing its input, up to six layers. The gradients by the fused taps of more of them are too many for one
    kernel of the compiler; in the order that it then finds, normed inputs, queries, keys and values of all layers are
    computed again before the first layer's turn.
    """
    if not is_checkpointed:
        return sizes.attention + sizes.mlp
    return sizes.blocks if sizes.spec.num_layers < MANY_LAYERS else sizes.attention - sizes.queries


def kept_before(sizes: RowSizes) -> list[tuple[int, int, int]]:
    """A layer's own activations, gradients of weights and temporaries in its MLP and its attention.

    Everywhere the gradient of the residual stream is on its way. MLP: the product is free by then, its gradient and
    that of gate or up are there, the other one's takes its place. Attention: gradients of queries, keys and values,
    the output's in its place; two gradients of the normed input; flex attention's fp32 row sums.
    """
    down, out = (weight_bytes(sizes, of(sizes.spec)[-1:]) for of in (mlp_matrices, attention_matrices))
    attention = 3 * sizes.blocks + sizes.queries + 2 * sizes.keys + row_sums(sizes)
    return [
        (sizes.attention + sizes.mlp, down, sizes.gated + sizes.blocks),
        (sizes.attention, weight_bytes(sizes, mlp_matrices(sizes.spec)) + out, attention),
    ]


def computed_again(sizes: RowSizes, layer: int) -> list[tuple[int, int, int]]:
    """The same with checkpointing, of layer 0, 1, ...: all that it did is computed again.

    MLP: one kernel reads gate, up and their product's gradient, and writes the product and the gradients of gate and
    up. In the last layer the product is there before, for the final norm, and one gradient is written over what is
    read.

    Attention, at the gradient of the queries, in fp32: there are the gradient of the residual stream, what the MLP read
    and its two gradients, and those of the normed input by way of keys and values. The kernel that makes it rotates
    the queries of the layer below as well, which read the same angles: these before and after, and their normed
    input. In the last layer its MLP is still there, too, since the gradients of weights come late. Beside all that are
    buffers that nobody reads any more, which the compiler keeps for others of their size; where this moment was the
    largest they were 2.2 to 2.7 times the queries (in small rows 0.9 to 3.6).
    """
    spec, top = sizes.spec, sizes.spec.num_layers - 1
    down, out = (weight_bytes(sizes, of(spec)[-1:]) for of in (mlp_matrices, attention_matrices))
    wide_queries = WIDE * sizes.queries // sizes.width
    way = 6 * sizes.blocks + wide_queries + int(DEAD_QUERIES * sizes.queries) + row_sums(sizes)
    if layer and spec.num_layers < MANY_LAYERS:
        way += sizes.blocks + 2 * sizes.queries
    both = sizes.attention + sizes.mlp
    attention = (sizes.attention, weight_bytes(sizes, mlp_matrices(spec)) + out, way)
    if layer < top:
        return [(both, 0, 3 * sizes.gated + sizes.blocks), attention]
    last_mlp = (both, down, 2 * sizes.gated + 2 * sizes.blocks)
    return [last_mlp, (both, 0, way + sizes.blocks) if top else attention]


def row_sums(sizes: RowSizes) -> int:
    """[nq, Q] fp32."""
    return WIDE * sizes.shape.num_queries * sizes.spec.num_heads


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


def exam(sizes: RowSizes, is_checkpointed: bool, sample_tokens: int | None) -> Moment:
    """An exam's row: taps of its own, made from two copies of a sample's, then the frame of training, then its drafts.

    The frame is the one of training, so it keeps the same activations until it returns. Its output and the blocks'
    embeddings are left, first beside what tells whether the output is finite (two more of them), then beside logits.
    """
    longest = min(sample_tokens or sizes.shape.row_tokens, sizes.shape.row_tokens)
    copies = 2 * sizes.taps * longest // sizes.shape.row_tokens
    rows = EXAM_BLOCKS * (sizes.shape.block_size - 1)
    logits = rows * (sizes.spec.vocab_size + sizes.spec.hidden_size) * sizes.width
    drafts = 2 * sizes.blocks + max(2 * sizes.blocks, logits)
    most = max(copies, forward_peak(sizes, is_checkpointed), drafts)
    own = Part("an exam's row", sizes.taps, "rows.row_tokens, taps")
    return Moment("exam", (own, Part("an exam's forward", most, "rows.anchors, rows.row_tokens, checkpointing")))


def forward_peak(sizes: RowSizes, is_checkpointed: bool) -> int:
    """The most that a forward has at once.

    At its end what it keeps and its output. With checkpointing it has more in the last layer: the attention's, or
    gate, up and what the MLP read.
    """
    kept = sizes.kept(is_checkpointed) + rotary_angles(sizes)
    if not is_checkpointed:
        return kept + sizes.blocks
    return kept + sizes.blocks + max(sizes.attention, 2 * sizes.gated + sizes.blocks)
