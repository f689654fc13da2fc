"""Ready token ids, their masks and padding, as lists and as arrays."""

from typing import Any

import numpy as np
import pytest
from dflash_offline.extract.lines.json_lines import LeftOut
from dflash_offline.extract.lines.shapes import Tokens, understand
from dflash_offline.extract.lines.token_lines import tokens_of


def tokens(value: dict[str, Any]) -> tuple[list[int], list[bool]]:
    content = understand(value).content
    assert isinstance(content, Tokens)
    assert (content.ids.dtype, content.mask.dtype) == (np.int64, np.bool_)
    return content.ids.tolist(), content.mask.tolist()


@pytest.mark.parametrize(
    ("value", "mask"),
    [
        ({"loss_mask": [0, 1, 1]}, [False, True, True]),
        ({"loss_mask": [False, True, 1.0]}, [False, True, True]),
        ({"assistant_masks": [0, 0, 1]}, [False, False, True]),
        ({"completion_mask": [0, 1, 0], "loss_mask": [0, 1, 0]}, [False, True, False]),
        ({}, [False, False, False]),
        ({"labels": [-100, 6, 7]}, [False, True, True]),
        ({"labels": [-100, 6, 7], "loss_mask": [0, 1, 1]}, [False, True, True]),
        ({"text": "rendered", "attention_mask": [1, 1, 1]}, [False, False, False]),
        ({"prompt_length": 1}, [False, True, True]),
        ({"prompt_length": 0, "labels": [5, 6, 7]}, [True, True, True]),
        ({"prompt_length": 3}, [False, False, False]),
    ],
)
def test_token_ids(value: dict[str, Any], mask: list[bool]) -> None:
    """As JSON gives them, and as any table does."""
    assert tokens({"input_ids": [5, 6, 7], **value}) == ([5, 6, 7], mask)
    for kind in (np.int64, np.int32, np.uint16, np.uint64, np.int8):
        arrays = {
            key: np.array(item, dtype=np.int64 if key == "labels" else kind if kind != np.int8 else bool)
            for key, item in value.items()
            if isinstance(item, list)
        } | {key: item for key, item in value.items() if isinstance(item, int)}
        assert tokens({"input_ids": np.array([5, 6, 7], dtype=kind), **arrays}) == ([5, 6, 7], mask)


def test_padding_is_cut_off_on_either_side() -> None:
    left = {"input_ids": [0, 0, 5, 6], "loss_mask": [0, 0, 0, 1], "attention_mask": [0, 0, 1, 1]}
    right = {"input_ids": [5, 6, 0], "labels": [-100, 6, -100], "attention_mask": np.array([True, True, False])}
    assert tokens(left) == tokens(right) == ([5, 6], [False, True])


def test_a_prompt_length_counts_ids_and_no_padding_before_them() -> None:
    assert tokens({"input_ids": [5, 6, 7, 0], "prompt_length": 1, "attention_mask": [1, 1, 1, 0]}) == (
        [5, 6, 7],
        [False, True, True],
    )
    for value, reason in [
        ({"prompt_length": 4}, "broken prompt length"),
        ({"prompt_length": -1}, "broken prompt length"),
        ({"prompt_length": True}, "broken prompt length"),
        ({"prompt_length": 1.0}, "broken prompt length"),
        ({"prompt_length": 2, "attention_mask": [0, 1, 1]}, "broken prompt length"),
        ({"prompt_length": 2, "loss_mask": [0, 1, 1]}, "shapes disagree"),
    ]:
        with pytest.raises(LeftOut) as caught:
            tokens({"input_ids": [5, 6, 7], **value})
        assert caught.value.reason == reason


@pytest.mark.parametrize("key", ["loss_mask", "assistant_masks", "completion_mask"])
def test_labels_say_the_same_as_a_mask(key: str) -> None:
    """Of the tokens that are attended to: what padding is trained on, nobody reads."""
    value = {"input_ids": [0, 5, 6], "labels": [-100, -100, 6], key: [1, 0, 1], "attention_mask": [0, 1, 1]}
    assert tokens(value) == ([5, 6], [False, True])
    for other in ({"attention_mask": [1, 1, 1]}, {key: [0, 1, 1]}, {"labels": [0, 5, 6]}, {key: [0, 0, 0]}):
        with pytest.raises(LeftOut) as caught:
            tokens({**value, **other})
        assert caught.value.reason == "shapes disagree"


ROW = {"input_ids": [5, 6, 7, 8, 9, 0], "loss_mask": [0, 0, 1, 1, 1, 0], "attention_mask": [1, 1, 1, 1, 1, 0]}


@pytest.mark.parametrize(
    "beside",
    [
        {"position_ids": [0, 1, 2, 3, 4, 0]},
        {"position_ids": [1, 2, 3, 4, 5, 1]},
        {"seq_idx": [0, 0, 0, 0, 0, -1]},
        {"segment_ids": np.array([1, 1, 1, 1, 1, 0], np.int32)},
        {"cu_seqlens": [0, 5]},
    ],
)
def test_one_text_may_say_that_it_is_one(beside: dict[str, Any]) -> None:
    found = tokens_of(ROW | beside)
    assert found.ids.tolist() == [5, 6, 7, 8, 9]
    assert found.mask.tolist() == [False, False, True, True, True]


@pytest.mark.parametrize(
    "beside, reason",
    [
        ({"position_ids": [0, 1, 0, 1, 2, 0]}, "several texts in one row: position_ids go from 1 to 0 at token 2"),
        ({"position_ids": [0, 0, 0, 0, 0, 0]}, "several texts in one row"),
        ({"seq_idx": [0, 0, 1, 1, 1, 1]}, "several texts in one row: seq_idx holds 2 numbers"),
        ({"document_ids": np.array([0, 0, 0, 0, 2, 2])}, "several texts in one row"),
        ({"cu_seqlens": [0, 2, 5]}, "several texts in one row"),
        ({"position_ids": [0, 1]}, "broken position_ids"),
        ({"seq_idx": "0 0 0"}, "broken seq_idx"),
    ],
)
def test_a_packed_row_is_left_out(beside: dict[str, Any], reason: str) -> None:
    with pytest.raises(LeftOut) as caught:
        tokens_of(ROW | beside)
    assert f"{caught.value.reason}: {caught.value.detail}".startswith(reason)
