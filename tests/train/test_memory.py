"""The predicted memory against what torch allocates, and what its partitioner keeps for the backward."""

from collections.abc import Callable, Iterable

import pytest
import torch
from dflash_offline.train.batch import RowBatch
from dflash_offline.train.blocks import RowMasks
from dflash_offline.train.config import OBJECTIVE_NAMES, TOKEN_OBJECTIVES, LossConfig, OptimConfig
from dflash_offline.train.drafter import Drafter, Rotation, run_layer
from dflash_offline.train.evaluate import walk
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.memory import EXAM_BLOCKS, WIDE_LOGITS, Plan, predict_peak
from dflash_offline.train.optim import MasterOptimizer
from dflash_offline.train.row_memory import RowSizes, matrices, num_weights, row_buffers
from dflash_offline.train.slot import RowShape, RowSlot
from dflash_offline.train.spec import DrafterSpec
from dflash_offline.train.step import TrainStep
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")
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


def kept_by_torch(spec: DrafterSpec, shape: RowShape, is_checkpointed: bool) -> int:
    """Bytes that torch's partitioner hands from the forward graph to the backward one, in bfloat16.

    Inputs are not counted; tensors have no memory here.
    """
    kept: list[int] = []

    def partition(graph, inputs, **keywords):
        from functorch.compile import min_cut_rematerialization_partition

        joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, inputs, **{**keywords, "compiler": "inductor"})

    def compile_forward(graph, _):
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        saved = [node for node in output.args[0][1:] if isinstance(node, torch.fx.Node) and node.op != "placeholder"]
        kept.append(sum(node.meta["val"].nbytes for node in saved if isinstance(node.meta["val"], Tensor)))
        return graph

    backend = aot_autograd(
        fw_compiler=compile_forward,
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
    (found,) = kept
    return found


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_activations_are_what_torch_keeps(
    tiny_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch, is_checkpointed: bool
) -> None:
    """At the widths of a 27B target, with grouped heads of which all together are not the hidden size."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # it refuses gradients on a CPU
    wide = {"hidden_size": 5120, "intermediate_size": 17_408, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    spec = tiny_spec(**wide, num_layers=3, block_size=16)
    shape = RowShape(row_tokens=12_288, anchors=1536, block_size=16)
    sizes = RowSizes(spec, shape, 2)
    own = sizes.kept(is_checkpointed) - sizes.blocks  # the embeddings are an input
    assert own == pytest.approx(kept_by_torch(spec, shape, is_checkpointed), rel=0.002)


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


def test_numbers_that_other_files_own() -> None:
    assert walk.HEAD_BLOCKS == EXAM_BLOCKS
    assert set(WIDE_LOGITS) == set(OBJECTIVE_NAMES) - set(TOKEN_OBJECTIVES)
