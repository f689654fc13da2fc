"""The table of lengths against counting by hand."""

import re

import numpy as np
import pytest
from dflash_offline.extract.lengths_table import COLUMNS, bucket_edges, summary_lines


def numbers(line: str) -> list[float]:
    return [float(text.replace(",", "")) for text in re.findall(r"[\d,]*\d(?:\.\d+)?", line)]


def table_of(lines: list[str]) -> dict[str, list[float]]:
    first = next(i for i, line in enumerate(lines) if line.split() == " ".join(COLUMNS).split())
    last = next(i for i, line in enumerate(lines) if line.split()[0] == "all")
    assert len({len(line) for line in lines[first : last + 1]}) == 1, "the columns are aligned"
    return {line.split()[0]: numbers(line.split(maxsplit=1)[1]) for line in lines[first + 1 : last + 1]}


@pytest.mark.parametrize(
    "longest, edges",
    [(1, [1]), (128, [128]), (129, [128, 129]), (512, [128, 256, 512]), (1000, [128, 256, 512, 1000])],
)
def test_edges_double_up_to_the_longest(longest: int, edges: list[int]) -> None:
    assert bucket_edges(longest) == edges


@pytest.mark.parametrize("longest", [100, 128, 1000, 4096, 8192])
def test_the_table_is_what_counting_gives(longest: int) -> None:
    drawn = np.random.default_rng(longest)
    lengths = np.minimum(drawn.geometric(3 / longest, 700), longest).astype(np.int32)
    lengths[:6] = [1, min(127, longest), min(128, longest), min(129, longest), longest, longest]
    trained = drawn.integers(0, lengths + 1)
    lines = summary_lines(lengths, trained, longest)
    table = table_of(lines)
    samples = list(zip(lengths.tolist(), trained.tolist()))
    low, expected = 1, {}
    for edge in bucket_edges(longest):
        inside = [(n, on) for n, on in samples if low <= n <= edge]
        counts = len(inside), sum(n for n, _ in inside), sum(on for _, on in inside), sum(edge - n for n, _ in inside)
        share = float(f"{100 * len(inside) / len(samples):.1f}")
        expected[f"{low:,}-{edge:,}"] = [counts[0], share, *counts[1:]]
        low = edge + 1
    columns = [sum(column) for column in zip(*expected.values())]
    expected["all"] = [len(samples), 100.0, *columns[2:]]
    assert table == expected
    padded = columns[2] + columns[4]
    assert any(line.startswith(f"padded to these edges they would be {int(padded):,} tokens") for line in lines)
    assert lines[-1] == f"the target will be run over at most {sum(lengths.tolist()):,} tokens"


def test_shares_and_the_forwards_tokens() -> None:
    lengths, trained = np.array([10, 10, 10, 10, 60]), np.array([0, 1, 5, 10, 60])
    lines = summary_lines(lengths, trained, 60, recorded=np.array([0, 0, 9, 9, 59]))
    assert "trained on: 76.0% of all tokens; of one sample 0.0% to 100.0%, quartiles 10.0%, 50.0%, 100.0%" in lines
    assert lines[-1] == "the target will be run over 77 tokens, up to each sample's last anchor"
    assert lines[0] == "samples by their number of tokens"
    assert sum(int(numbers(line.split("#")[0])[-1]) for line in lines[1:] if "#" in line) == 5


def test_a_sample_longer_than_allowed_has_a_bucket() -> None:
    table = table_of(summary_lines(np.array([300]), np.array([300]), 200))
    assert table["257-300"] == [1, 100.0, 300, 300, 0]


def test_large_counts_do_not_overflow() -> None:
    lengths = np.full(100_000, 2**17, dtype=np.int32)
    assert table_of(summary_lines(lengths, lengths, 2**17))["all"][2] == 100_000 * 2**17


def test_no_sample_is_said() -> None:
    assert summary_lines(np.array([], dtype=np.int32), np.array([], dtype=np.int64), 512) == ["no samples"]
