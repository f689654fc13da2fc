"""The arithmetic of the benchmark of the training step: its operations, its time line, its table, and a tiny run."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash_offline.train.flops import step_flops, tokens_behind
from torch.utils.flop_counter import FlopCounterMode

CPU = torch.device("cpu")


@pytest.fixture
def tiny_case() -> Any:
    from step_parts.cases import CASES, tiny

    return tiny(CASES["27b_sliding"])


def test_the_formulas_and_the_list_of_products_are_what_torch_counts(tiny_case: Any) -> None:
    from step_parts.cases import Rows
    from step_parts.flops import step_gemms
    from step_parts.ours import Choices, Ours

    ours = Ours(tiny_case, CPU, Choices(chunk_blocks=8))
    ours.batch.load(Rows(tiny_case, CPU).draw(1)[0])
    with FlopCounterMode(display=False) as counter:
        ours.step.accumulate(ours.batch)
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    flops = step_flops(ours.spec, tiny_case.shape, [0.0] * tiny_case.layers)
    assert flops["attention"] == 0
    assert sum(flops.values()) == counted
    assert sum(gemm.flops for gemm in step_gemms(ours.spec, tiny_case.shape, 8)) == counted


def test_every_product_has_the_shape_that_its_layout_says(tiny_case: Any) -> None:
    from step_parts.bare import gemm_ms
    from step_parts.flops import step_gemms

    gemms = step_gemms(tiny_case.spec(), tiny_case.shape, 8)
    assert {gemm.layout for gemm in gemms} == {"nt", "nn", "tn"}
    assert all(gemm_ms(gemm, CPU, torch.float32) > 0 for gemm in gemms)


def test_the_formulas_give_the_parts_of_the_specification() -> None:
    """dflash-spec 6.2: 8B widths, 6 samples of 8,192, 3,072 anchors, c = 4,700, one head recompute: 552 TFLOP."""
    from step_parts.cases import CASES

    case = dataclasses.replace(CASES["8b"], row_tokens=49_152, anchors=3072)
    flops = step_flops(case.spec(), case.shape, [4700 + 16] * 5)
    with_recompute = sum(flops.values()) + flops["head"] / 2
    assert with_recompute / 1e12 == pytest.approx(552, rel=1e-3)
    assert flops["attention"] / with_recompute == pytest.approx(0.12, abs=0.005)
    assert (flops["head"] * 1.5) / with_recompute == pytest.approx(0.31, abs=0.01)


def test_rows_are_full_of_whole_samples_and_their_anchors_are_new_each_time() -> None:
    from step_parts.cases import CASES, Rows, tiny

    case = tiny(CASES["8b"])
    rows = Rows(case, CPU)
    first, second, _, fourth = rows.draw(4)
    assert first.taps is fourth.taps
    assert not np.array_equal(first.anchors, fourth.anchors)
    for row in (first, second):
        assert row.keep.all()
        assert (np.diff(row.anchors) > 0).all()
        assert row.loss_mask[: case.row_tokens].all()
        assert row.sample_ids.tolist() == [place // 200 for place in range(case.row_tokens)]
        assert tokens_behind(row).tolist() == [anchor % 200 for anchor in row.anchors]
        ends = np.flatnonzero(row.positions == 199).tolist() + [case.row_tokens - 1]
        assert not row.taps[:, ends].any()
        assert not np.isin(row.anchors, ends).any()
    states = torch.from_numpy(first.taps).view(torch.bfloat16).float()
    assert 0.9 < float(states.std()) < 1.1


def test_names_of_kernels_are_sorted_by_what_they_do() -> None:
    from step_parts.kernels import kind_of

    by_kind = {
        "matmul": [
            "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)",
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_segment_k_off_kernel__5x_cublas",
            "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(Params)",
            "triton_tem_fused_mm_t_3",
        ],
        "attention": [
            "triton_tem_fused_flex_attention_2",
            "triton_tem_fused__to_copy_add_flex_attention_backward_mm_7",
            "triton_tem_fused_4",
            "void flash_fwd_kernel<Flash_fwd_kernel_traits<128>>(Flash_fwd_params)",
        ],
        "other": [
            "triton_poi_fused_cat_flex_attention_mul_5",
            "triton_red_fused_mm_sum_1",
            "slot_kernel",
            "gradient_kernel",
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(int, float)",
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>>(float)",
            "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<int>(int*)",
        ],
        "unclassified": ["my_own_kernel"],
    }
    assert {kind: [kind_of(name) for name in names] for kind, names in by_kind.items()} == {
        kind: [kind] * len(names) for kind, names in by_kind.items()
    }


def test_time_without_a_kernel_is_what_the_union_of_all_leaves() -> None:
    from step_parts.kernels import Work, covered_us, idle_share, shares

    work = [
        Work("gemm", 0.0, 10.0),
        Work("gemm", 5.0, 20.0),  # on another stream
        Work("add_elementwise", 6.0, 7.0),
        Work("Memcpy HtoD", 20.0, 30.0, is_kernel=False),
        Work("flash", 40.0, 60.0),
    ]
    assert covered_us(work) == 50
    assert covered_us(reversed(work)) == 50
    assert idle_share(work) == pytest.approx(20 / 60)
    assert idle_share(work, copies_count=True) == pytest.approx(10 / 60)
    assert shares(work) == pytest.approx(
        {"matmul": 25 / 46, "attention": 20 / 46, "other": 1 / 46, "unclassified": 0.0}
    )


def test_the_trace_is_read_for_what_the_device_did() -> None:
    from step_parts.kernels import Work, parsed

    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.5, "dur": 2.0},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "ts": 4.0, "dur": 1.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 9.0},
        {"ph": "i", "name": "Record Window End", "ts": 10.0},
    ]
    assert parsed(events) == [Work("gemm", 1.5, 3.5), Work("Memset (Device)", 4.0, 5.0, is_kernel=False)]


def test_medians_of_a_step_go_from_its_begin_to_the_next_one() -> None:
    from step_parts.ours import StepTime, median_parts

    marks = [[0.0, 0.001, 0.005], [0.010, 0.012, 0.015], [0.030, 0.031, 0.032], [0.037]]
    whole, load, accumulate, update = 10, 1, 3, 5
    assert dataclasses.astuple(median_parts(marks)) == pytest.approx((whole, load, accumulate, update))
    assert StepTime(10.0, 1.0, 3.0, 5.0).without_load == 9.0


def test_a_tiny_step_gives_the_rows_of_its_case(tiny_case: Any, tmp_path: Path) -> None:
    from step_parts.ours import Choices
    from step_parts.speed import measure
    from step_parts.table import Part

    part = Part("27b_sliding")
    measure(part, tiny_case, CPU, Choices(), num_steps=2)
    rows = part.values
    assert all(math.isfinite(value) for value, _ in rows.values())
    step_ms, load_ms = rows["step_ms_27b_sliding"][0], rows["load_ms_27b_sliding"][0]
    assert rows["draft_positions_per_s_27b_sliding"][0] == pytest.approx(tiny_case.anchors * 16 / step_ms * 1e3)
    assert 0 < load_ms < step_ms
    assert 0 < rows["share_of_peak_27b_sliding"][0] < rows["share_of_peak_without_load_27b_sliding"][0]
    part.save(tmp_path)
    assert Part.read(tmp_path / "27b_sliding.json") == part


def test_parts_of_several_runs_are_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    from step_parts.table import BARS, Part, merged
    from store_parts.rows import show

    small = Part("small", {"step_ms_small": (3.14159, "ms")}, {"gpu_idle_small": "no graph"})
    whole = Part("8b", {"peak_gib_8b": (48.0, "GiB"), "share_of_peak_8b": (0.8, "ratio")})
    show("step", *merged([small, whole]))
    *table, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {
        "bench": "step",
        "rows": [
            {"name": "share_of_peak_8b", "value": 0.8, "unit": "ratio"},
            {"name": "step_ms_small", "value": 3.142, "unit": "ms"},
            {"name": "peak_gib_8b", "value": 48.0, "unit": "GiB"},
        ],
    }
    assert table[1].split() == ["share_of_peak_8b", "0.8", "ratio", ">=", "0.79", "PASS"]
    assert "left out: gpu_idle_small: no graph" in table
    assert len([line for line in table if line.startswith("left out")]) == len(BARS) - 1
    with pytest.raises(AssertionError, match="step_ms_small"):
        merged([small, small])


def test_ratios_to_speculators_and_the_error_of_the_plan_come_from_pairs() -> None:
    from step_parts import memory, peer
    from step_parts.table import Part

    part = Part("speculators", {"draft_positions_per_s_ours_beside": (60.0, ""), "peak_gib_ours_beside": (30.0, "")})
    peer.put_ratios(part)
    assert set(part.left_out) == {"vs_speculators_bf16", "peak_memory_vs_speculators"}
    part = Part("speculators", part.values | {"draft_positions_per_s_speculators": (40.0, "")})
    part.put("peak_gib_speculators", 60.0)
    peer.put_ratios(part)
    assert part.values["vs_speculators_bf16"][0] == 1.5
    assert part.values["peak_memory_vs_speculators"][0] == 0.5

    assert len(memory.CONFIGS) == 8
    planned = Part("memory")
    for number, config in enumerate(memory.CONFIGS):
        planned.put(f"peak_gib_memory_{config.name}", 100.0)
        memory.put_error(planned)
        assert "memory_prediction_error" not in planned.values
        planned.put(f"predicted_gib_memory_{config.name}", 97.0 + number)
    memory.put_error(planned)
    assert planned.values["memory_prediction_error"][0] == pytest.approx(0.04)


def test_rows_of_random_lengths_are_packed_as_the_loader_packs_them() -> None:
    from step_parts.cases import CASES, tiny
    from step_parts.frames import random_rows

    case = tiny(CASES["recompiles"])
    lengths = set()
    for row in random_rows(case, 5):
        used = int((row.sample_ids >= 0).sum())
        assert used > 0.9 * case.row_tokens
        assert not row.loss_mask[used:].any()
        assert not row.taps[:, used:].any()
        assert row.keep.any()
        kept = row.anchors[row.keep]
        assert (row.loss_mask[kept] & row.loss_mask[kept + 1]).all()
        assert (row.sample_ids[kept] == row.sample_ids[kept + 1]).all()
        lengths |= set(np.unique(row.sample_ids, return_counts=True)[1].tolist())
    assert len(lengths) > 5
