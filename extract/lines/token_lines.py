"""Lines of ready token ids: which are trained on, by masks, by labels or by where the prompt ends.

Knows lists of JSON and arrays of Arrow; both give arrays. Knows no tokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .json_lines import LeftOut
from .json_text import short

MASK_KEYS = ("loss_mask", "assistant_masks", "completion_mask")
"""Names of one thing: ours, and those that transformers and TRL write. 1 or true is trained on."""
PROMPT_KEY = "prompt_length"
"""How many ids are the prompt: all after them are trained on."""
TEXT_NUMBER_KEYS = ("seq_idx", "sequence_ids", "segment_ids", "document_ids")
"""Names under which packing tools say of each id to which of the row's texts it belongs."""
PACKING_KEYS = ("position_ids", "cu_seqlens", *TEXT_NUMBER_KEYS)
LABEL_KEY = "label"
"""False marks an answer that is not wanted, as KTO data say it; of token ids and of chats."""
TOKEN_KEYS = frozenset({"input_ids", "labels", "attention_mask", PROMPT_KEY, *MASK_KEYS, *PACKING_KEYS})
BROKEN_IDS = "broken token ids"
BROKEN_MASK = "broken loss mask"
BROKEN_ATTENTION = "broken attention mask"
BROKEN_LABELS = "broken labels"
BROKEN_LENGTH = "broken prompt length"
SEVERAL_TEXTS = "several texts in one row"
REASONS = (BROKEN_IDS, BROKEN_MASK, BROKEN_ATTENTION, BROKEN_LABELS, BROKEN_LENGTH, SEVERAL_TEXTS)
"""Why a row of token ids is left out, whatever the target."""
IGNORED_LABEL = -100  # transformers' and torch's: cross_entropy(ignore_index=-100)


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Ready ids [S] int64 with the mask [S] bool of what is trained on, all False for a prompt alone."""

    ids: np.ndarray
    mask: np.ndarray
    is_wanted: bool = True
    """False where the line's `label` says that its answer is not."""


def tokens_of(value: Mapping[str, Any]) -> Tokens:
    """The ids of a line and their mask, by a mask key, `labels` or `prompt_length`; without any nothing is trained on.

    Raises LeftOut for what is no list of ids, a mask or labels that do not fit them, and masks that disagree.
    """
    ids = integers(value["input_ids"])  # [S]
    if ids is None or not ids.size:
        raise LeftOut(BROKEN_IDS, f"input_ids is {short(value['input_ids'])}")
    masks = {key: mask_of(value[key], len(ids), key) for key in MASK_KEYS if key in value}
    if "labels" in value:
        masks["labels"] = mask_of_labels(ids, value["labels"])
    if PROMPT_KEY in value:
        masks[PROMPT_KEY] = mask_after(value[PROMPT_KEY], len(ids))
    kept = slice(0, len(ids))
    if "attention_mask" in value:
        kept = unpadded(mask_of(value["attention_mask"], len(ids), "attention_mask"))
    require_one_text(value, kept, len(ids))
    if kept.start and PROMPT_KEY in masks:
        raise LeftOut(BROKEN_LENGTH, f"{kept.start} ids of padding come first: does it count them?")
    ids, masks = ids[kept], {key: mask[kept] for key, mask in masks.items()}
    name, mask = next(iter(masks.items()), ("", np.zeros(len(ids), bool)))
    for other, another in masks.items():
        if not np.array_equal(mask, another):
            raise LeftOut("shapes disagree", f"{name} and {other}")
    return Tokens(ids, mask, is_wanted=value.get(LABEL_KEY) is not False)


def require_one_text(value: Mapping[str, Any], kept: slice, length: int) -> None:
    """Raises LeftOut where a row says that it holds several texts: each would see those before it.

    `kept` are its ids without padding. Positions of one text count up by one; from where they start says nothing.
    """
    if "position_ids" in value:
        places = numbers_of_ids(value, "position_ids", length)[kept]
        if (breaks := np.flatnonzero(np.diff(places) != 1)).size:
            place = int(breaks[0])
            detail = f"position_ids go from {places[place]} to {places[place + 1]} at token {place + 1}"
            raise LeftOut(SEVERAL_TEXTS, detail)
    for key in TEXT_NUMBER_KEYS:
        if key in value and len(found := np.unique(numbers_of_ids(value, key, length)[kept])) > 1:
            raise LeftOut(SEVERAL_TEXTS, f"{key} holds {len(found)} numbers")
    if "cu_seqlens" in value and (ends := integers(value["cu_seqlens"])) is not None and len(ends) > 2:
        raise LeftOut(SEVERAL_TEXTS, f"cu_seqlens is {short(value['cu_seqlens'])}")


def numbers_of_ids(value: Mapping[str, Any], key: str, length: int) -> np.ndarray:
    """A whole number for each id [S]."""
    found = integers(value[key])
    if found is None or len(found) != length:
        raise LeftOut(f"broken {key}", f"{key} is {short(value[key])} for {length} ids")
    return found


def integers(given: Any) -> np.ndarray | None:
    """One row of whole numbers as int64 [S]; None for anything else, true and 1.0 too."""
    if isinstance(given, list):
        if not set(map(type, given)) <= {int}:
            return None
        try:
            return np.array(given, dtype=np.int64)
        except OverflowError:
            return None
    if isinstance(given, np.ndarray) and given.ndim == 1 and np.issubdtype(given.dtype, np.integer):
        if given.size and int(given.max()) > np.iinfo(np.int64).max:
            return None
        return given.astype(np.int64)
    return None


def mask_of(given: Any, length: int, key: str) -> np.ndarray:
    """Zeros and ones, as numbers or truth values, as bool [S]."""
    row = np.array(given) if isinstance(given, list) and set(map(type, given)) <= {int, bool, float} else given
    if not isinstance(row, np.ndarray) or row.shape != (length,) or not ((row == 0) | (row == 1)).all():
        reason = BROKEN_ATTENTION if key == "attention_mask" else BROKEN_MASK
        raise LeftOut(reason, f"{key} is {short(given)} for {length} ids")
    return row.astype(bool)


def mask_after(given: Any, length: int) -> np.ndarray:
    """The loss mask [S] of ids that begin with a prompt of so many."""
    if type(given) is not int or not 0 <= given <= length:
        raise LeftOut(BROKEN_LENGTH, f"{PROMPT_KEY} is {short(given)} for {length} ids")
    return np.arange(length) >= given


def mask_of_labels(ids: np.ndarray, given: Any) -> np.ndarray:
    """The loss mask [S] that transformers' `labels` mean: -100 is not trained on, else the id itself."""
    labels = integers(given)
    if labels is None or len(labels) != len(ids):
        raise LeftOut(BROKEN_LABELS, f"labels is {short(given)} for {len(ids)} ids")
    wrong = (labels != ids) & (labels != IGNORED_LABEL)
    if wrong.any():
        place = int(wrong.argmax())
        detail = f"label {labels[place]} at token {place}, expected its id {ids[place]} or {IGNORED_LABEL}"
        raise LeftOut(BROKEN_LABELS, detail)
    return labels != IGNORED_LABEL


def unpadded(attended: np.ndarray) -> slice:
    """Where the tokens lie that are attended to; padding stands before or after them, never between."""
    places = np.flatnonzero(attended)
    if not places.size or places[-1] - places[0] + 1 != places.size:
        raise LeftOut(BROKEN_ATTENTION, f"{places.size} of {attended.size} tokens attended to, not in one piece")
    return slice(int(places[0]), int(places[-1]) + 1)
