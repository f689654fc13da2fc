"""Batches: pure, complete, within the budget; groups small enough for every worker."""

import numpy as np
import pytest
from dflash_offline.extract.batching import LEAST_FILL, in_turns, make_batches, padded_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = st.lists(st.integers(1, 9000), max_size=200)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 20_000))
def test_every_sample_is_in_one_batch_within_the_budget(lengths: list[int], token_budget: int) -> None:
    batches = make_batches(lengths, token_budget)
    assert sorted(np.concatenate([*batches, []]).astype(int).tolist()) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[i] for i in batch)
        assert len(batch) * longest <= token_budget or len(batch) == 1
        assert min(lengths[i] for i in batch) >= LEAST_FILL * longest
    flat = [lengths[i] for batch in batches for i in batch]
    assert flat == sorted(lengths, reverse=True)
    again = make_batches(np.array(lengths, dtype=np.int32), token_budget)
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in again]


def test_batches_are_as_large_as_the_budget_allows() -> None:
    lengths = [5, 3, 3, 3, 9, 2, 7]
    assert [batch.tolist() for batch in make_batches(lengths, 9)] == [[4], [6], [0], [1, 2, 3], [5]]
    assert [batch.tolist() for batch in make_batches(lengths, 20)] == [[4, 6], [0], [1, 2, 3], [5]]
    assert make_batches([], 9) == []


@pytest.mark.parametrize("seed", [0, 1])
def test_padding_over_a_full_group_is_small(seed: int) -> None:
    """Lengths as of long chats (lognormal), 32 segments of a dozen samples each."""
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(np.log(1500), 0.8, size=32 * 12), 50, 8192).astype(int)

    def padding_share(part: np.ndarray) -> float:
        return 1 - part.sum() / padded_tokens(part, make_batches(part, 16_384))

    assert 0 < padding_share(lengths) < 0.05
    assert padding_share(lengths) < np.mean([padding_share(part) for part in np.split(lengths, 32)]) / 2


@pytest.mark.parametrize("seed", range(3))
def test_a_bound_parts_batches_and_changes_nothing_else(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 300, 200)
    batches = make_batches(lengths, 1000, bound=128)
    assert sorted(np.concatenate(batches).tolist()) == list(range(200))
    assert all(len(set((lengths[batch] > 128).tolist())) == 1 for batch in batches)
    assert any(len(set((lengths[batch] > 128).tolist())) == 2 for batch in make_batches(lengths, 1000)), (
        "without it some batch has both"
    )
    above, below = (make_batches(lengths[part], 1000) for part in (lengths > 128, lengths <= 128))
    assert len(batches) == len(above) + len(below)


def test_padded_tokens() -> None:
    assert padded_tokens([5, 3, 3, 3, 9, 2], make_batches([5, 3, 3, 3, 9, 2], 9)) == 9 + 5 + 9 + 2
    assert padded_tokens([], []) == 0


@pytest.mark.parametrize("count", range(7))
def test_small_batches_are_run_between_large_ones(count: int) -> None:
    batches = make_batches(np.arange(count, 0, -1) * 10, 10)
    order = [int(batch[0]) for batch in in_turns(batches)]
    assert order == [[], [0], [0, 1], [0, 2, 1], [0, 3, 1, 2], [0, 4, 1, 3, 2], [0, 5, 1, 4, 2, 3]][count]
