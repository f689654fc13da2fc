"""The planner beside peaks that were measured, and beside what compiled code allocates at other shapes."""

from dataclasses import replace
from typing import Any

import pytest
from dflash_offline.train.memory import backward_moment
from dflash_offline.train.row_memory import RowSizes

# GiB, one H200, torch 2.11, triton 3.6, 2026-11, `python tests/bench/step.py --part memory --out DIR`.
MEASURED = {
    "8b": 44.536,
    "8b_chunk_512": 45.984,
    "8b_half_muon": 28.495,
    "8b_few_anchors": 27.665,
    "27b": 57.443,
    "27b_checkpointing": 45.756,
    "8b_double_checkpointing": 41.714,
    "small_muon": 5.042,
}

# What is there in a backward beside all that lives longer than a row, in GiB: allocations of the code that torch 2.11
# makes for an H200, added up on a CPU, 2026-11. Changes of a case, checkpointing, GiB.
COMPILED: list[tuple[str, dict[str, int], bool, float]] = [
    ("8b", {}, False, 23.321),
    ("8b", {"row_tokens": 65_536, "anchors": 512}, False, 8.817),
    ("8b", {"row_tokens": 65_536, "anchors": 512}, True, 7.636),
    ("8b", {"row_tokens": 32_768, "anchors": 4096, "layers": 3}, True, 18.241),
    ("8b", {"row_tokens": 32_768, "anchors": 4096, "layers": 6}, True, 19.749),
    ("8b", {"row_tokens": 32_768, "anchors": 4096, "layers": 7}, True, 27.926),
    ("8b", {"row_tokens": 32_768, "anchors": 4096, "layers": 12}, True, 45.367),
    ("27b", {}, False, 22.462),
    ("27b", {"row_tokens": 49_152, "anchors": 3072}, False, 45.945),
    ("27b", {"row_tokens": 49_152, "anchors": 3072}, True, 21.664),
    ("27b", {"row_tokens": 49_152, "anchors": 1024}, True, 12.139),
    ("27b", {"layers": 8}, True, 15.335),
    ("small", {"row_tokens": 16_384, "anchors": 2048}, False, 7.866),
    ("small", {"row_tokens": 16_384, "anchors": 2048}, True, 3.247),
    ("8b", {"hidden": 2048, "intermediate": 6144, "kv_heads": 4}, False, 13.544),
    ("8b", {"hidden": 2048, "intermediate": 6144, "kv_heads": 4}, True, 5.954),
    ("8b", {"hidden": 2048, "intermediate": 6144, "kv_heads": 4, "layers": 8}, True, 10.044),
    ("8b", {"hidden": 2560, "intermediate": 9728}, True, 7.365),
]


def test_predictions_are_the_measured_peaks() -> None:
    """Never less by more than 1 %: less ends a run out of memory."""
    from step_parts.memory import CONFIGS, predicted_gib

    assert [config.name for config in CONFIGS] == list(MEASURED)
    for config in CONFIGS:
        assert -0.01 < predicted_gib(config) / MEASURED[config.name] - 1 < 0.04, config.name


@pytest.mark.parametrize("name, changes, is_checkpointed, gib", COMPILED)
def test_backwards_are_those_of_compiled_code(
    name: str, changes: dict[str, Any], is_checkpointed: bool, gib: float
) -> None:
    """More than it takes is planned where the compiler finds a better order, with few anchors or with seven layers."""
    from step_parts.cases import CASES

    case = replace(CASES[name], **changes)
    predicted = backward_moment(RowSizes(case.spec(), case.shape, 2), is_checkpointed).size_bytes / 2**30
    assert -0.04 < predicted / gib - 1 < (0.14 if is_checkpointed else 0.01)
