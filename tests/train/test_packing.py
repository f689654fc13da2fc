"""Rows and anchors are pure, complete, full and fair."""

import numpy as np
import pytest
from dflash_offline import UserError
from dflash_offline.train.packing import FirstFit, choose_anchors, pack_rows
from hypothesis import given, settings
from hypothesis import strategies as st


def lognormal_lengths(count: int, row_tokens: int, mean: float, spread: float) -> np.ndarray:
    draws = np.random.default_rng(0).lognormal(mean, spread, count)
    return np.clip(draws.astype(np.int64), 16, row_tokens)


def segments_of(lengths: np.ndarray, segment_tokens: int) -> np.ndarray:
    return np.cumsum(lengths) // segment_tokens


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 256), max_size=300),
    segment_tokens=st.integers(256, 4000),
    shuffle_segments=st.integers(1, 5),
    seed=st.integers(-(2**40), 2**40),
)
def test_every_sample_is_in_exactly_one_row(lengths, segment_tokens, shuffle_segments, seed) -> None:
    tokens = np.array(lengths, np.int64)
    rows = pack_rows(
        tokens, segments_of(tokens, segment_tokens), 256, seed=seed, epoch=1, shuffle_segments=shuffle_segments
    )
    assert sorted(i for row in rows for i in row.tolist()) == list(range(len(lengths)))
    assert all(0 < tokens[row].sum() <= 256 for row in rows)


@pytest.mark.parametrize(
    ("row_tokens", "mean", "spread"), [(16384, 6.9, 0.8), (16384, 7.6, 0.7), (4096, 6.5, 0.7), (512, 4.0, 0.4)]
)
def test_rows_are_at_least_97_percent_full(row_tokens: int, mean: float, spread: float) -> None:
    lengths = lognormal_lengths(20_000, row_tokens, mean, spread)
    rows = pack_rows(lengths, segments_of(lengths, 41_000), row_tokens, seed=3, epoch=0, shuffle_segments=32)
    assert lengths.sum() / (len(rows) * row_tokens) >= 0.97


def test_rows_depend_on_seed_and_epoch_alone() -> None:
    lengths = lognormal_lengths(2000, 1024, 5.0, 0.6)
    segments = segments_of(lengths, 8192)

    def rows(seed: int, epoch: int) -> list[list[int]]:
        packed = pack_rows(lengths, segments, 1024, seed=seed, epoch=epoch, shuffle_segments=4)
        return [row.tolist() for row in packed]

    assert rows(1, 2) == rows(1, 2)
    assert len({str(rows(1, 2)), str(rows(1, 3)), str(rows(2, 2))}) == 3


def test_a_row_mixes_only_neighbouring_windows() -> None:
    lengths = lognormal_lengths(4000, 1024, 5.0, 0.6)
    segments = segments_of(lengths, 16_384)
    rows = pack_rows(lengths, segments, 1024, seed=0, epoch=0, shuffle_segments=2)
    mixed = [len(set(segments[row].tolist())) for row in rows]
    assert np.mean(mixed) > 1.5  # samples of a window are mixed
    assert np.median(mixed) <= 2  # and a reader still touches few segments
    order = [segments[row[0]] for row in rows]
    assert order != sorted(order)


def test_a_sample_longer_than_a_row_is_named_and_never_dropped() -> None:
    lengths = np.array([100, 700, 300])
    with pytest.raises(UserError) as caught:
        pack_rows(lengths, np.zeros(3, np.int64), 512, seed=0, epoch=0, shuffle_segments=1)
    assert "sample 1 has 700 tokens" in str(caught.value)
    assert "row_tokens = 768" in str(caught.value)


def test_first_fit_is_the_textbook_one_while_few_rows_are_open() -> None:
    rng = np.random.default_rng(5)
    lengths = rng.integers(10, 400, 120)
    rows: list[list[int]] = []
    for sample, tokens in enumerate(lengths.tolist()):
        for row in rows:
            if lengths[row].sum() + tokens <= 1000:
                row.append(sample)
                break
        else:
            rows.append([sample])
    packer = FirstFit(1000)
    packer.add(np.arange(len(lengths)), lengths)
    assert sorted(row.tolist() for row in packer.close_all()) == sorted(rows)


def row_of(sizes: list[tuple[int, int]], tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """eligible and sample ids of samples given as (prompt, eligible) lengths, one plain token after each."""
    eligible, ids = np.zeros(tokens, np.bool_), np.full(tokens, -1, np.int32)
    place = 0
    for number, (prompt, answer) in enumerate(sizes):
        ids[place : place + prompt + answer + 1] = number
        eligible[place + prompt : place + prompt + answer] = True
        place += prompt + answer + 1
    return eligible, ids


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), min_size=1, max_size=14),
    tiles=st.integers(1, 12),
    unit=st.sampled_from([1, 4, 8, 16]),
    row=st.integers(0, 1000),
)
def test_anchors_are_sorted_eligible_and_without_repeats(sizes, tiles, unit, row) -> None:
    eligible, ids = row_of(sizes, 1024)
    anchors, keep = choose_anchors(eligible, ids, tiles * unit, unit=unit, seed=7, epoch=2, row=row)
    assert anchors.shape == keep.shape == (tiles * unit,)
    assert (np.diff(anchors) >= 0).all()
    kept = anchors[keep]
    assert len(set(kept.tolist())) == len(kept)
    assert eligible[kept].all()
    if eligible.sum() <= tiles * unit:
        assert keep.sum() == eligible.sum()
    elif eligible.any():
        assert keep.any()
        assert (anchors[1:][~keep[1:]] == anchors[:-1][~keep[1:]]).all()  # a spare slot repeats its neighbour


def test_slots_are_dealt_in_proportion_to_eligible_tokens() -> None:
    eligible, ids = row_of([(5, 300), (50, 100), (0, 20), (9, 400)], 1024)
    anchors, keep = choose_anchors(eligible, ids, 82, unit=1, seed=0, epoch=0, row=0)
    assert np.bincount(ids[anchors[keep]]).tolist() == [30, 10, 2, 40]


def test_whole_tiles_belong_to_one_sample_where_each_gets_several() -> None:
    sizes = [(5, 900), (50, 500), (3, 333), (9, 1500)]
    eligible, ids = row_of(sizes, 4096)
    anchors, keep = choose_anchors(eligible, ids, 512, unit=8, seed=0, epoch=0, row=0)
    owners = ids[anchors].reshape(-1, 8)
    assert (owners == owners[:, :1]).all()
    shares = np.bincount(ids[anchors[keep]]) / 512
    wanted = np.array([answer for _, answer in sizes]) / eligible.sum()
    assert np.abs(shares - wanted).max() <= 8 / 512


def test_anchors_are_uniform_inside_a_sample() -> None:
    eligible, ids = row_of([(4, 40), (2, 10)], 128)
    counts = np.zeros(128)
    rounds = 2000
    for row in range(rounds):
        anchors, keep = choose_anchors(eligible, ids, 10, unit=1, seed=1, epoch=0, row=row)
        counts[anchors[keep]] += 1
    expected = rounds * 10 / 50
    spread = np.sqrt(rounds * 0.2 * 0.8)
    assert np.abs(counts[eligible] - expected).max() < 4.5 * spread
    assert counts[~eligible].sum() == 0


@pytest.mark.parametrize(
    ("answers", "tokens", "anchors", "unit"),
    [((2000, 2000, 3900, 20), 8192, 1024, 8), ((200, 205, 40, 20), 512, 64, 16), ((900, 70, 8), 1024, 128, 1)],
)
def test_every_eligible_token_is_as_likely_as_any_other(answers, tokens, anchors, unit) -> None:
    """Also those of a short answer beside long ones, whose share is less than a slot or a tile."""
    eligible, ids = row_of([(3, answer) for answer in answers], tokens)
    counts, rounds = np.zeros(tokens), 1000
    for row in range(rounds):
        chosen, keep = choose_anchors(eligible, ids, anchors, unit=unit, seed=5, epoch=0, row=row)
        counts[chosen[keep]] += 1
    share = anchors / sum(answers)
    assert np.abs(counts[eligible] - rounds * share).max() < 5 * np.sqrt(rounds * share * (1 - share))
    for number, answer in enumerate(answers):  # the slots of a sample differ by one, or a tile, from row to row
        own = counts[ids == number].sum() / rounds
        assert abs(own - share * answer) < 4.5 * unit / 2 / np.sqrt(rounds)


def test_anchors_depend_on_seed_epoch_and_row_alone() -> None:
    eligible, ids = row_of([(5, 300), (50, 100)], 512)

    def drawn(seed: int, epoch: int, row: int) -> list[int]:
        return choose_anchors(eligible, ids, 32, unit=16, seed=seed, epoch=epoch, row=row)[0].tolist()

    assert drawn(1, 2, 3) == drawn(1, 2, 3)
    assert len({str(drawn(*key)) for key in [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (3, 2, 1)]}) == 5


def test_a_row_without_eligible_tokens_keeps_no_anchor() -> None:
    eligible, ids = row_of([(5, 0)], 128)
    anchors, keep = choose_anchors(eligible, ids, 16, unit=16, seed=0, epoch=0, row=0)
    assert not keep.any()
    assert anchors.tolist() == [0] * 16
