"""The drafter: z-lab's names and shapes, the formulas by loops, the context cache, the one path per device."""

import pytest
import torch
from dflash_offline.train.blocks import RowMasks
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.kinds import AttentionKind
from dflash_offline.train.slot import RowShape
from dflash_offline.train.spec import DrafterSpec
from torch.nn.attention import SDPBackend, sdpa_kernel

KINDS = [
    {},
    *({"attention": (kind, kind)} for kind in (AttentionKind(None, True), AttentionKind(9), AttentionKind(9, True))),
    {"attention": (AttentionKind(9, True), AttentionKind())},
    {"attention": (AttentionKind(), AttentionKind(9), AttentionKind(5, True), AttentionKind()), "num_layers": 4},
    {"block_size": 6, "attention": (AttentionKind(5), AttentionKind(5))},
    {"num_kv_heads": 4, "num_layers": 1},
]


def test_weights_have_the_names_and_shapes_of_the_format(tiny_spec) -> None:
    spec = tiny_spec()
    hidden, inner, q, kv, d = 32, 48, 32, 16, 8
    expected = {"fc.weight": (hidden, 3 * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(2):
        expected |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"layers.{i}.self_attn.q_proj.weight": (q, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (kv, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (kv, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, q),
            f"layers.{i}.self_attn.q_norm.weight": (d,),
            f"layers.{i}.self_attn.k_norm.weight": (d,),
            f"layers.{i}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
        }
    state = Drafter(spec).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected
    assert len(state) == 11 * 2 + 3


@pytest.mark.parametrize(
    ("hidden", "inner", "heads", "kv_heads", "width", "vocabulary", "parameters"),
    [
        (4096, 12288, 32, 8, 128, 151_936, 1_048_626_432),
        (5120, 17408, 32, 8, 128, 248_320, 1_730_213_120),
        (6144, 12288, 64, 16, 64, 154_880, 1_635_852_928),
    ],
)
def test_parameter_counts_of_published_sizes(
    tiny_spec, hidden, inner, heads, kv_heads, width, vocabulary, parameters
) -> None:
    spec = tiny_spec(
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        vocab_size=vocabulary,
        num_layers=5,
        num_taps=5,
        tap_layers=(1, 9, 17, 25, 33),
    )
    with torch.device("meta"):
        drafter = Drafter(spec)
    assert sum(p.numel() for p in drafter.parameters()) == parameters


def forward_case(spec: DrafterSpec, seed: int = 0):
    """Random inputs of a row of 128 tokens whose sample starts at row 20: everything a forward takes."""
    rng = torch.Generator().manual_seed(seed)
    shape = RowShape(row_tokens=128, anchors=16, block_size=spec.block_size)
    taps = torch.randn(128, spec.num_taps * spec.hidden_size, generator=rng)
    embeds = torch.randn(shape.num_queries, spec.hidden_size, generator=rng)
    anchors = torch.cat([torch.tensor([20, 21]), torch.randint(22, 120, (14,), generator=rng).sort().values])
    positions = torch.arange(128) - 20
    block_positions = (positions[anchors][:, None] + torch.arange(shape.stride)).flatten()
    return shape, anchors, taps, embeds, positions, block_positions


def run_forward(drafter: Drafter, seed: int = 0) -> torch.Tensor:
    spec = drafter.spec
    shape, anchors, taps, embeds, positions, block_positions = forward_case(spec, seed)
    masks = RowMasks(anchors, torch.full_like(anchors, 20), shape, spec.kinds).masks
    return drafter(taps, embeds, positions, block_positions, masks)


@pytest.mark.parametrize("kind", KINDS)
def test_forward_equals_the_formulas_by_loops(kind, tiny_spec, tiny_drafter, slow_block) -> None:
    spec = tiny_spec(**kind)
    drafter = tiny_drafter(spec)
    out = run_forward(drafter).view(16, -1, spec.hidden_size)
    shape, anchors, taps, embeds, positions, block_positions = forward_case(spec)
    for block in (0, 1, 9):
        anchor, size = int(anchors[block]), spec.block_size
        begin = block * shape.stride
        expected = slow_block(
            drafter,
            taps[20:anchor],
            embeds[begin : begin + size],
            positions[20:anchor].tolist(),
            block_positions[begin : begin + size].tolist(),
        )
        torch.testing.assert_close(out[block, :size], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("chunks", [[40], [1] * 40, [13, 1, 26], [39, 1]])
def test_context_may_come_in_any_chunks(chunks: list[int], tiny_spec, tiny_drafter, slow_block) -> None:
    drafter = tiny_drafter(tiny_spec())
    rng = torch.Generator().manual_seed(1)
    taps, embeds = torch.randn(40, 96, generator=rng), torch.randn(8, 32, generator=rng)
    cache = drafter.new_cache()
    done = 0
    for size in chunks:
        drafter.extend(cache, taps[done : done + size], torch.arange(done, done + size))
        done += size
    out = drafter.propose(cache, embeds, torch.arange(40, 48))
    expected = slow_block(drafter, taps, embeds, range(40), range(40, 48))
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_proposing_leaves_the_cache_as_it_was(kind, tiny_spec, tiny_drafter) -> None:
    drafter = tiny_drafter(tiny_spec(**kind))
    rng = torch.Generator().manual_seed(1)
    taps, embeds = torch.randn(40, 96, generator=rng), torch.randn(6, 32, generator=rng)
    cache = drafter.new_cache()
    drafter.extend(cache, taps[:30], torch.arange(30))
    first = drafter.propose(cache, embeds, torch.arange(30, 36))
    assert torch.equal(first, drafter.propose(cache, embeds, torch.arange(30, 36)))
    drafter.propose(cache, embeds * 2, torch.arange(30, 36))
    drafter.extend(cache, taps[30:], torch.arange(30, 40))
    whole = drafter.new_cache()
    drafter.extend(whole, taps, torch.arange(40))
    later = drafter.propose(cache, embeds, torch.arange(40, 46))
    torch.testing.assert_close(later, drafter.propose(whole, embeds, torch.arange(40, 46)), atol=1e-6, rtol=1e-6)
    assert cache.length == whole.length == 40


def test_rotary_frequencies_stay_fp32(tiny_spec) -> None:
    drafter = Drafter(tiny_spec()).to(torch.bfloat16)
    expected = torch.tensor([10000.0 ** (-2 * i / 8) for i in range(4)])
    assert drafter.inv_freq.dtype == torch.float32
    torch.testing.assert_close(drafter.inv_freq, expected)
    assert drafter.rotation(torch.tensor([4097]))[0].dtype == torch.float32
    assert drafter.half().inv_freq.dtype == torch.float32
    assert {p.dtype for p in drafter.parameters()} == {torch.float16}


def test_bf16_forward_is_near_fp32(tiny_spec, tiny_drafter) -> None:
    drafter = tiny_drafter(tiny_spec())
    exact = run_forward(drafter)
    shape, anchors, taps, embeds, positions, block_positions = forward_case(drafter.spec)
    masks = RowMasks(anchors, torch.full_like(anchors, 20), shape, drafter.spec.kinds).masks
    rounded = drafter.to(torch.bfloat16)(taps.bfloat16(), embeds.bfloat16(), positions, block_positions, masks)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() / exact.norm() < 0.03


def test_backward_through_fused_attention_equals_the_plain_one(tiny_spec, tiny_drafter) -> None:
    drafter = tiny_drafter(tiny_spec(attention=(AttentionKind(30), AttentionKind())))
    push = torch.randn(128, 32, generator=torch.Generator().manual_seed(9))

    def gradients(backend: SDPBackend) -> list[torch.Tensor]:
        drafter.zero_grad()
        with sdpa_kernel(backend):
            (run_forward(drafter) * push).sum().backward()
        return [p.grad.clone() for p in drafter.parameters() if p.grad is not None]

    fast, slow = gradients(SDPBackend.FLASH_ATTENTION), gradients(SDPBackend.MATH)
    assert len(fast) == len(slow) == 25
    for one, other in zip(fast, slow):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_initial_weights_are_a_function_of_the_seed(tiny_spec) -> None:
    def initial(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        drafter = Drafter(tiny_spec()).to(dtype)
        drafter.init_weights(seed)
        return drafter.state_dict()

    first, again, other, rounded = initial(1), initial(1), initial(2), initial(1, torch.bfloat16)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor.bfloat16(), rounded[name])
        if tensor.dim() == 1:
            assert (tensor == 1).all()
        else:
            assert not torch.equal(tensor, other[name])
            assert 0.015 < tensor.std() < 0.025


def test_a_block_mask_on_a_cpu_is_refused(tiny_spec) -> None:
    drafter = Drafter(tiny_spec())
    shape, anchors, taps, embeds, positions, block_positions = forward_case(drafter.spec)
    masks = RowMasks(anchors, torch.full_like(anchors, 20), shape, drafter.spec.kinds, is_tiled=True).masks
    with pytest.raises(RuntimeError, match="dense mask"):
        drafter(taps, embeds, positions, block_positions, masks)


def test_a_mask_for_each_kind_is_wanted(tiny_spec) -> None:
    drafter = Drafter(tiny_spec(attention=(AttentionKind(9), AttentionKind())))
    shape, anchors, taps, embeds, positions, block_positions = forward_case(drafter.spec)
    masks = RowMasks(anchors, torch.full_like(anchors, 20), shape, drafter.spec.kinds[:1]).masks
    with pytest.raises(ValueError, match=r"1 masks for the kinds of attention \['sliding 9', 'full'\]"):
        drafter(taps, embeds, positions, block_positions, masks)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_layers_give_the_same_gradients_and_run_twice(kind, tiny_spec, tiny_drafter) -> None:
    spec = tiny_spec(**kind)
    push = torch.randn(128, 32, generator=torch.Generator().manual_seed(9))
    found = []
    for is_checkpointed in (False, True):
        drafter = tiny_drafter(spec)
        drafter.is_checkpointed = is_checkpointed
        calls: list[int] = []
        for number, layer in enumerate(drafter.layers):
            layer.register_forward_pre_hook(lambda *_, number=number, calls=calls: calls.append(number))
        out = run_forward(drafter)
        (out * push).sum().backward()
        forward, backward = calls[: spec.num_layers], calls[spec.num_layers :]
        assert forward == list(range(spec.num_layers))
        assert backward == (forward[::-1] if is_checkpointed else [])
        with torch.no_grad():
            assert torch.equal(run_forward(drafter), out)
        assert len(calls) == spec.num_layers * (3 if is_checkpointed else 2), "without gradients nothing is kept"
        found.append([out, *(p.grad for p in drafter.parameters())])
    assert Drafter(spec, is_checkpointed=True).is_checkpointed
    assert not Drafter(spec).is_checkpointed
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
