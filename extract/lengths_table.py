"""The samples in numbers: a histogram of lengths, what is trained on, and what buckets of lengths would pad.

Knows lengths and counts, no folder and no sample.
"""

import numpy as np

from ..store.lengths import text_bars

FIRST_EDGE = 128
COLUMNS = ("tokens of a sample", "samples", "share", "tokens", "trained on", "padding")


def summary_lines(
    lengths: np.ndarray, trained: np.ndarray, longest: int, *, recorded: np.ndarray | None = None
) -> list[str]:
    """Lines for people: lengths [N] and trained [N] are the tokens, and the tokens trained on, of each sample.

    `longest` is the longest length allowed, the last edge of the table. `recorded` [N] are the tokens up to each
    sample's last anchor, after which the target is not run; without them the forward's tokens are a bound.
    """
    lengths, trained = lengths.astype(np.int64), trained.astype(np.int64)
    if not len(lengths):
        return ["no samples"]
    return [
        "samples by their number of tokens",
        *text_bars(lengths),
        trained_line(lengths, trained),
        *bucket_table(lengths, trained, longest),
        forward_line(lengths, recorded),
    ]


def trained_line(lengths: np.ndarray, trained: np.ndarray) -> str:
    """The share of the tokens that is trained on: of all, and how it differs from sample to sample."""
    low, quarter, half, three_quarters, high = np.quantile(trained / lengths, (0, 0.25, 0.5, 0.75, 1)).tolist()
    return (
        f"trained on: {int(trained.sum()) / int(lengths.sum()):.1%} of all tokens; of one sample {low:.1%} to "
        f"{high:.1%}, quartiles {quarter:.1%}, {half:.1%}, {three_quarters:.1%}"
    )


def bucket_edges(longest: int) -> list[int]:
    """128, 256, 512, ... below `longest`, then `longest` itself."""
    edges, edge = [], FIRST_EDGE
    while edge < longest:
        edges.append(edge)
        edge *= 2
    return [*edges, longest]


def bucket_table(lengths: np.ndarray, trained: np.ndarray, longest: int) -> list[str]:
    """What each bucket holds, a line of sums, and what a trainer that pads to the edges would run over."""
    edges = np.array(bucket_edges(max(longest, int(lengths.max()))), dtype=np.int64)
    order = np.argsort(lengths, kind="stable")
    sizes = lengths[order]
    bounds = np.searchsorted(sizes, [0, *edges], side="right")  # [buckets + 1], bucket b is bounds[b]:bounds[b + 1]
    num_samples = np.diff(bounds)
    num_tokens, num_trained = (
        np.diff(np.concatenate([[0], np.cumsum(values)])[bounds]) for values in (sizes, trained[order])
    )
    padding = num_samples * edges - num_tokens
    rows: list[tuple[str, ...]] = [COLUMNS]
    for i, edge in enumerate(edges.tolist()):
        first = int(edges[i - 1]) + 1 if i else 1
        counts = [int(column[i]) for column in (num_samples, num_tokens, num_trained, padding)]
        rows.append(cells(f"{first:,}-{edge:,}", counts, len(lengths)))
    sums = [int(column.sum()) for column in (num_samples, num_tokens, num_trained, padding)]
    rows.append(cells("all", sums, len(lengths)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    padded = sums[1] + sums[3]
    return [
        *("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths)) for row in rows),
        f"padded to these edges they would be {padded:,} tokens, {sums[3] / padded:.1%} of them padding; "
        "rows of whole samples, packed, save that",
    ]


def cells(name: str, counts: list[int], num_samples: int) -> tuple[str, ...]:
    """One line of the table: counts are samples, tokens, trained tokens and padding."""
    return name, f"{counts[0]:,}", f"{counts[0] / num_samples:.1%}", *(f"{count:,}" for count in counts[1:])


def forward_line(lengths: np.ndarray, recorded: np.ndarray | None) -> str:
    if recorded is None:
        return f"the target will be run over at most {int(lengths.sum()):,} tokens"
    num_run = int(recorded.sum(dtype=np.int64))
    return f"the target will be run over {num_run:,} tokens, up to each sample's last anchor"
