"""The predicted memory against what torch allocates, and what its partitioner keeps for the backward."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from operator import getitem

import pytest
import torch
from dflash_offline.train.batch import RowBatch
from dflash_offline.train.blocks import RowMasks
from dflash_offline.train.config import OBJECTIVE_NAMES, TOKEN_OBJECTIVES, LossConfig, OptimConfig
from dflash_offline.train.drafter import Drafter, Rotation, run_layer
from dflash_offline.train.evaluate import walk
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.memory import EXAM_BLOCKS, WIDE_LOGITS, Plan, backward_moments, predict_peak
from dflash_offline.train.optim import MasterOptimizer
from dflash_offline.train.row_memory import RowSizes, matrices, num_weights, row_buffers
from dflash_offline.train.slot import RowShape, RowSlot
from dflash_offline.train.spec import DrafterSpec
from dflash_offline.train.step import TrainStep
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.nn.attention import flex_attention
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")
aten = torch.ops.aten
VIEWS = (getitem, aten._unsafe_view.default, aten.reshape.default)  # beside those that say so themselves
SHAPE = RowShape(row_tokens=256, anchors=32, block_size=8)
MakeSpec = Callable[..., DrafterSpec]


def size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def plan_of(spec: DrafterSpec, shape: RowShape = SHAPE, **changes) -> Plan:
    settings = {"optimizer": "adamw", "chunk_blocks": 8, "is_checkpointed": False}
    return predict_peak(spec, shape, **{**settings, **changes})


def held(plan: Plan, start: str) -> int:
    (part,) = (part for part in plan.held if part.name.startswith(start))
    return part.size_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_is_held_is_what_torch_allocates(tiny_spec: MakeSpec, optimizer: str, dtype: str) -> None:
    spec = tiny_spec()
    plan = plan_of(spec, optimizer=optimizer, dtype=dtype)
    drafter = Drafter(spec).to(getattr(torch, dtype))
    table = torch.randn(spec.vocab_size, spec.hidden_size)
    step = TrainStep(drafter, table, table.clone(), SHAPE, LossConfig(), norm=torch.ones(spec.hidden_size))
    update = MasterOptimizer(drafter.named_parameters(), OptimConfig(name=optimizer), total_steps=2)
    for master, gradient in zip(update.masters, step.gradients, strict=True):
        master.grad = gradient.normal_()
    for part, _ in update.parts:
        part.step()
    states = [state for part, _ in update.parts for state in part.state.values()]
    moments = [value for state in states for value in state.values() if value.dim()]
    assert step.norm is not None
    masters = [master for master in update.masters if dtype == "bfloat16"]
    assert held(plan, "weights") == size(drafter.parameters())
    assert held(plan, "gradient sum") == step.gradient_sum.nbytes
    assert held(plan, "masters") == size(masters)
    assert held(plan, "optimizer state") == size(moments)
    assert held(plan, "target's") == size([step.embedding, step.head.weight]) + step.norm.nbytes
    assert held(plan_of(spec, dtype=dtype, head_is_tied=True), "target's") == step.embedding.nbytes + step.norm.nbytes


def test_matrices_are_the_drafters(tiny_spec: MakeSpec) -> None:
    drafter = Drafter(tiny_spec(num_layers=3))
    own = [tuple(parameter.shape) for parameter in drafter.parameters() if parameter.dim() == 2]
    assert sorted(matrices(drafter.spec)) == sorted(own)
    assert num_weights(drafter.spec) == sum(parameter.numel() for parameter in drafter.parameters())


@pytest.mark.parametrize("has_last", [False, True])
@pytest.mark.parametrize("block_size", [8, 10])
def test_row_buffers_are_those_of_a_batch(tiny_spec: MakeSpec, block_size: int, has_last: bool) -> None:
    kinds = (AttentionKind(), AttentionKind(window=40, is_causal=True))
    spec = tiny_spec(block_size=block_size, attention=kinds)
    shape = RowShape(row_tokens=384, anchors=48, block_size=block_size)
    batch = RowBatch(spec, shape, CPU, torch.bfloat16, has_last=has_last)
    tiled = RowMasks(batch.anchors, batch.starts, shape, kinds, is_tiled=True)
    own = [value for value in vars(batch).values() if isinstance(value, Tensor)]
    masks = [tensor for tensor in tiled.tensors() if tensor is not batch.anchors and tensor is not batch.starts]
    assert row_buffers(RowSizes(spec, shape, 2), has_last) == size(own) + size(masks)


@pytest.mark.parametrize("codec", ["raw", "int8:4"])
@pytest.mark.parametrize("objective", ["ce", "kl"])
def test_the_staged_row_is_a_slot_of_the_loader(tiny_spec: MakeSpec, objective: str, codec: str) -> None:
    spec = tiny_spec()
    slot = RowSlot(shape=SHAPE, num_taps=3, hidden_size=spec.hidden_size, codec_name=codec, has_last=objective == "kl")
    assert held(plan_of(spec, objective=objective, codec=codec), "the next row") == slot.size_bytes


def forward(
    drafter: Drafter, taps: Tensor, embeds: Tensor, rotation: Rotation, block_rotation: Rotation, masks: tuple
) -> Tensor:
    """What Drafter.rotated does on CUDA, where the device is not looked at."""
    context = drafter.hidden_norm(drafter.fc(taps))
    x = embeds
    for layer, kind in zip(drafter.layers, drafter.layer_kinds):
        inputs = layer, x, context, block_rotation, rotation, masks[kind]
        if drafter.is_checkpointed:
            x = checkpoint(run_layer, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            x = run_layer(*inputs)
    return drafter.norm(x)


@cache
def graphs_of_torch(spec: DrafterSpec, shape: RowShape, is_checkpointed: bool) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward graph that torch's partitioner makes in bfloat16; tensors have no memory here."""
    found: list[tuple[GraphModule, GraphModule]] = []

    def partition(graph, inputs, **keywords):
        from functorch.compile import min_cut_rematerialization_partition

        joint_graph_passes(graph)
        found.append(min_cut_rematerialization_partition(graph, inputs, **{**keywords, "compiler": "inductor"}))
        return found[-1]

    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph,
        bw_compiler=lambda graph, _: graph,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        try:
            drafter = Drafter(spec, is_checkpointed=is_checkpointed)
        finally:
            torch.set_default_dtype(torch.float32)
        drafter.inv_freq = torch.empty(spec.head_dim // 2)
        anchors, starts = (torch.zeros(shape.anchors, dtype=torch.int64) for _ in range(2))
        masks = RowMasks(anchors, starts, shape, spec.kinds, is_tiled=True).masks
        tokens, queries = shape.row_tokens, shape.num_queries
        taps = torch.empty(tokens, spec.num_taps * spec.hidden_size, dtype=torch.bfloat16)
        embeds = torch.empty(queries, spec.hidden_size, dtype=torch.bfloat16)
        rotation, block_rotation = (
            drafter.rotation(torch.empty(count, dtype=torch.int64)) for count in (tokens, queries)
        )
        compiled = torch.compile(forward, backend=backend, fullgraph=True, dynamic=False)
        compiled(drafter, taps, embeds, rotation, block_rotation, masks)
    torch._dynamo.reset()
    ((forward_graph, backward_graph),) = found
    return forward_graph, backward_graph


def kept_by_torch(graph: GraphModule) -> int:
    """Bytes that the forward graph hands to the backward one; inputs are not counted."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    saved = [node for node in output.args[0][1:] if isinstance(node, Node) and node.op != "placeholder"]
    return sum(size_of(node) for node in saved)


def size_of(node: Node) -> int:
    """Bytes of what a node gives; outputs of it that nobody reads count as well."""
    return sum(value.nbytes for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor))


def is_product(node: Node) -> bool:
    """Matrix products and flex attention: kernels of their own, which read and write memory."""
    return node.target in (aten.mm.default, aten.addmm.default) or isinstance(node.target, HigherOrderOperator)


def memory_of(node: Node) -> Node:
    """The node whose memory this one looks at."""
    while node.target in VIEWS or getattr(node.target, "is_view", False):
        node = node.all_input_nodes[0]
    return node


def size_counted(node: Node) -> int:
    """Bytes of a node, but for weights, a row's inputs and the gradient by the drafter's output."""
    return 0 if node.name.startswith(("primals", "tangents")) else size_of(node)


class Kernels:
    """The kernels of a graph, in an order that they can run in.

    Products are kernels of their own. What else a product or the caller reads is formed out of memory in one go;
    values that read the same memory are formed together, where neither waits for the other, and one takes the place of
    what it alone reads. So inductor fuses within a layer; that it does so across layers as well is left out.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        nodes = list(graph.nodes)
        readers = [node for node in nodes if is_product(node) or node.op == "output"]
        self.results = {memory_of(node) for node in readers[-1].all_input_nodes}
        has_memory = {memory_of(node) for reader in readers for node in reader.all_input_nodes} | set(readers[:-1])
        self.reads: dict[Node, set[Node]] = {}  # memory that a node is formed out of
        self.kernel_of: dict[Node, list[Node]] = {}
        for node in nodes:
            inputs = [memory_of(source) for source in node.all_input_nodes]
            formed = [{one} if one in has_memory or not self.reads[one] else self.reads[one] for one in inputs]
            self.reads[node] = set().union(*formed)
            if node in has_memory and node.op == "call_function":
                self.kernel_of[node] = [] if is_product(node) else self.shared(node)
                self.kernel_of[node].append(node)

    def shared(self, node: Node) -> list[Node]:
        """The kernel that the node can join; a new one where there is none."""
        before: set[Node] = set()
        self.collect(node, before)
        for other, kernel in self.kernel_of.items():
            has_same = any(size_counted(read) for read in self.reads[node] & self.reads[other])
            if has_same and other not in before and not is_product(other):
                return kernel
        return []

    def collect(self, node: Node, before: set[Node]) -> None:
        """Adds to `before` all that must have run before the node; kernels run as a whole."""
        for read in self.reads[node]:
            for member in self.kernel_of.get(read, []):
                if member not in before:
                    before.add(member)
                    self.collect(member, before)

    def ordered(self) -> list[list[Node]]:
        """As the graph begins them, each behind all that it waits for."""
        done: list[list[Node]] = []

        def visit(kernel: list[Node]) -> None:
            if kernel not in done:
                reads = set().union(*(self.reads[node] for node in kernel))
                for read in (node for node in self.kernel_of if node in reads):
                    visit(self.kernel_of[read])
                done.append(kernel)

        for kernel in self.kernel_of.values():
            visit(kernel)
        return done

    def taken(self, kernel: list[Node]) -> int:
        """Bytes of the memory that the kernel writes over what it reads."""
        readers = Counter(read for node in self.kernel_of for read in self.reads[node])
        free = [{size_counted(read) for read in self.reads[node] if readers[read] == 1} for node in kernel]
        return sum(
            size_of(node) for node, sizes in zip(kernel, free) if not is_product(node) and size_of(node) in sizes
        )

    def peak(self) -> int:
        """The most bytes that there are at once: all that a kernel reads and writes, and what is read later on."""
        order = self.ordered()
        last = {read: step for step, kernel in enumerate(order) for node in kernel for read in self.reads[node]}
        now = sum(size_counted(read) for read in last if read.op == "placeholder")
        peak = now
        for step, kernel in enumerate(order):
            taken = self.taken(kernel)
            now += sum(map(size_of, kernel)) - taken
            peak = max(peak, now)
            gone = {read for read, end in last.items() if end == step} | {node for node in kernel if node not in last}
            now -= sum(map(size_counted, gone - self.results)) - taken
        return peak


@pytest.fixture
def wide_spec(tiny_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> DrafterSpec:
    """At the widths of a 27B target, with grouped heads of which all together are not the hidden size."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # it refuses gradients on a CPU
    wide = {"hidden_size": 5120, "intermediate_size": 17_408, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    return tiny_spec(**wide, num_layers=3, block_size=16)


WIDE_SHAPE = RowShape(row_tokens=12_288, anchors=1536, block_size=16)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_activations_are_what_torch_keeps(wide_spec: DrafterSpec, is_checkpointed: bool) -> None:
    sizes = RowSizes(wide_spec, WIDE_SHAPE, 2)
    forward_graph, _ = graphs_of_torch(wide_spec, WIDE_SHAPE, is_checkpointed)
    own = sizes.kept(is_checkpointed) - sizes.blocks  # the embeddings are an input
    assert own == pytest.approx(kept_by_torch(forward_graph), rel=0.002)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_backward_is_that_of_torchs_graph(wide_spec: DrafterSpec, is_checkpointed: bool) -> None:
    """At widths where a layer's MLP takes the most, with and without all of the layer computed again."""
    sizes = RowSizes(wide_spec, WIDE_SHAPE, 2)
    _, backward_graph = graphs_of_torch(wide_spec, WIDE_SHAPE, is_checkpointed)
    own = max(map(sum, backward_moments(sizes, is_checkpointed))) - sizes.blocks
    assert own == pytest.approx(Kernels(backward_graph.graph).peak(), rel=0.002)


def test_more_never_takes_less(tiny_spec: MakeSpec) -> None:
    """In each of the settings that a plan names."""

    def peak(num_layers: int = 2, row_tokens: int = 512, anchors: int = 64, **settings) -> int:
        spec = tiny_spec(num_layers=num_layers, vocab_size=500)
        shape = RowShape(row_tokens=row_tokens, anchors=anchors, block_size=8)
        return plan_of(spec, shape, **settings).peak_bytes

    for name, values in {
        "num_layers": (1, 2, 5),
        "row_tokens": (128, 512, 4096),
        "anchors": (16, 64, 96, 512),
        "chunk_blocks": (8, 16, 32, 64),
    }.items():
        peaks = [peak(**{name: value}) for value in values]
        assert peaks == sorted(peaks), name
        assert peaks[0] < peaks[-1], name
    assert peak(has_graph=True) > peak()
    assert peak(is_checkpointed=True) < peak()
    assert peak(objective="kl", chunk_blocks=64) > peak(chunk_blocks=64)
    assert peak(dtype="float32") > peak()
    assert peak(optimizer="muon") < peak()


def test_a_chunk_takes_its_logits_once_in_bfloat16(tiny_spec: MakeSpec) -> None:
    """Products, over which the gradient by them goes, and the chunk's inputs; the chunk is a divisor of the anchors."""
    spec = tiny_spec(vocab_size=3000)
    (loss,) = (moment for moment in plan_of(spec, chunk_blocks=15).moments if moment.name == "loss")
    rows = 8 * (spec.block_size - 1)
    assert loss.parts[-1].size_bytes == rows * (3000 + spec.hidden_size) * 2


def test_an_exam_has_taps_and_copies_of_a_sample_or_the_frame_of_training(tiny_spec: MakeSpec) -> None:
    spec, shape = tiny_spec(), RowShape(row_tokens=4096, anchors=16, block_size=8)
    sizes = RowSizes(spec, shape, 2)

    def beside_taps(**settings) -> int:
        (exam,) = (moment for moment in plan_of(spec, shape, **settings).moments if moment.name == "exam")
        return exam.size_bytes - sizes.taps

    assert beside_taps(is_checkpointed=True) == 2 * sizes.taps
    assert beside_taps(is_checkpointed=True, sample_tokens=4000) == 2 * 4000 * 3 * spec.hidden_size * 2
    angles = 4 * (4096 + 128) * spec.head_dim
    assert beside_taps() == sizes.kept(False) + sizes.blocks + angles


def test_numbers_that_other_files_own() -> None:
    assert walk.HEAD_BLOCKS == EXAM_BLOCKS
    assert set(WIDE_LOGITS) == set(OBJECTIVE_NAMES) - set(TOKEN_OBJECTIVES)
