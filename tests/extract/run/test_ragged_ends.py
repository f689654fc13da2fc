"""The handed situation c29: ragged ends, few rows, and rows without an anchor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.extract.config import ExtractConfig, PrepareConfig
from dflash_offline.extract.prepare import prepare
from dflash_offline.extract.rejected import LINE, read_rejected
from dflash_offline.extract.survey import Survey, survey
from dflash_offline.store.integrity import verify
from dflash_offline.store.reader import StoreReader

MakeConfig = Callable[..., ExtractConfig]


def ragged_rows(lengths: list[int], answer: int = 24) -> list[dict[str, Any]]:
    rows = []
    for i, n in enumerate(lengths):
        a = min(answer, n - 1)
        ids = [6 + (i + j) % 200 for j in range(n)]
        rows.append({"id": i, "input_ids": ids, "loss_mask": [0] * (n - a) + [1] * a})
    return rows


RAGGED = {
    "one-row": [64],
    "one-less-than-a-batch": [64] * 3,
    "one-more-than-a-batch": [64] * 5,
    "one-bucket-empty": [64] * 4 + [256] * 4,
    "one-row-per-bucket": [64, 128, 256],
    "longest-first": [256] * 4 + [128] * 4 + [64] * 4,
    "short-rows": [8] * 8,
    "some-rows-without-anchor": [8, 1, 2, 8, 2],
}


@pytest.mark.parametrize("case", RAGGED)
def test_case_c29_ragged_ends(
    tmp_path: Path, case_target: Any, make_config: MakeConfig, extract_here: Callable[..., Survey], case: str
) -> None:
    """A batch of four rows of 64 tokens; every row is a sample or named as left out."""
    lines = ragged_rows(RAGGED[case])
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = PrepareConfig(
        target=str(case_target()), out=str(tmp_path / "data"), split=0.7, min_trained=2, duplicates="keep"
    )
    prepare(settings, [str(source)])
    left_out = read_rejected(tmp_path / "data", LINE)
    extract_here(make_config(tmp_path / "data", tmp_path / "store", token_budget=256))
    reader = StoreReader(tmp_path / "store")
    assert len(reader) + len(left_out) == len(lines)
    assert len(left_out) == sum(n <= 2 for n in RAGGED[case])
    train, held_out = set(reader.rows("train").tolist()), set(reader.rows("heldout").tolist())
    assert not train & held_out
    assert len(train | held_out) == len(reader)
    assert not verify(tmp_path / "store").faults


def test_case_c29_no_rows_and_no_anchors(tmp_path: Path, case_target: Any, make_data: Any) -> None:
    with pytest.raises(UserError, match="holds no input line"):
        make_data([], case_target())
    with pytest.raises(UserError, match="none of 3 input lines gives a sample"):
        make_data(ragged_rows([1, 2, 2]), case_target())


def test_case_c29_12501_rows_are_planned_once_each(
    tmp_path: Path, case_target: Any, make_data: Any, make_config: MakeConfig
) -> None:
    data = make_data(ragged_rows([32] * 12_501), case_target(), split=0.8)
    plan = survey(make_config(data, tmp_path / "store")).plan
    assert (plan.num_samples, plan.num_without_anchor) == (12_501, 0)
    assert len(np.unique(plan.column("sample_id"))) == 12_501
    splits = plan.table.column("split").to_pylist()
    assert splits.count("train") + splits.count("heldout") == 12_501
