"""Which samples `recode` takes, and how many of them fit a budget.

Samples are taken in the order of their content, so a smaller subset is the beginning of a larger one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from .. import UserError
from .config import RecodeConfig
from .geometry import states_bytes
from .manifest import Manifest
from .placing import aligned, lay_out
from .recode_sources import Source
from .samples import recorded_range
from .size import COMMIT_BYTES, PLAN_ROW_BYTES, bytes_per_position, human_bytes, parse_size
from .tokens_file import BATCH_SAMPLES, BATCH_TOKENS, MAX_BATCHES

ROWS_PER_FILE = 50_000
TOKEN_BYTES = 5  # id and mask
TOKENS_ROW_BYTES = 64  # the other columns of a token file
TOKENS_FILE_BYTES = 32_768  # head, foot and checksum
DUPLICATE, OTHER_SPLIT = "in an earlier store too", "in another split"
PAST_LIMIT, PAST_BUDGET = "past --limit", "past --budget"


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """The samples of the new store in its order: [N] store, sound sample of it, first recorded token, recorded
    positions, tokens."""

    source: np.ndarray
    number: np.ndarray
    first: np.ndarray
    n: np.ndarray
    num_tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.n)

    def only(self, which: np.ndarray | slice) -> "Taken":
        return Taken(**{field.name: getattr(self, field.name)[which] for field in fields(self)})


def choose(
    config: RecodeConfig, sources: Sequence[Source], shape: Manifest, left_out: dict[str, int]
) -> tuple[Taken, list[str]]:
    """The samples to write, and lines about what the user may not expect; adds to `left_out` what is not taken."""
    taken = by_content(sources, config.window)
    is_repeated, num_moved = repeated(sources, taken)
    left_out[DUPLICATE] = int(is_repeated.sum())
    notes = []
    if num_moved:
        notes.append(f"{num_moved:,} samples lie in different splits of these stores; the split of the first counts")
    taken = taken.only(~is_repeated)
    if config.split is not None:
        is_wanted = of_split(sources, taken, config.split)
        left_out[OTHER_SPLIT] = int((~is_wanted).sum())
        taken = taken.only(is_wanted)
    for reason, count in (
        (PAST_LIMIT, config.limit if config.limit is not None else len(taken)),
        (PAST_BUDGET, num_fitting(config, sources, taken, shape) if config.budget is not None else len(taken)),
    ):
        left_out[reason] = max(0, len(taken) - count)
        taken = taken.only(slice(0, count))
    return taken, notes


def by_content(sources: Sequence[Source], window: int | None) -> Taken:
    """All sound samples in the order of their content, then of the stores, then inside a store."""
    source = np.concatenate([np.full(len(s.rows), k, dtype=np.int32) for k, s in enumerate(sources)])
    number = np.concatenate([np.arange(len(s.rows)) for s in sources])
    order = np.lexsort((number, source, np.concatenate([s.content for s in sources])))
    ranges = np.concatenate([recorded_ranges(s, window) for s in sources])  # [N, 2]
    num_tokens = np.concatenate([s.num_tokens for s in sources])
    taken = Taken(source=source, number=number, first=ranges[:, 0], n=ranges[:, 1], num_tokens=num_tokens)
    return taken.only(order)


def recorded_ranges(source: Source, window: int | None) -> np.ndarray:
    """First token and positions [N, 2] i64 of a store's samples, as they are or cut to `window` by their masks."""
    if window is None or window == source.manifest.window:
        return np.stack([source.column("first"), source.column("n")], axis=1).astype(np.int64)
    masks = (source.tokens(number)[1] for number in range(len(source.rows)))
    return np.array([recorded_range(mask, window) for mask in masks], dtype=np.int64).reshape(-1, 2)


def repeated(sources: Sequence[Source], taken: Taken) -> tuple[np.ndarray, int]:
    """True [N] where an earlier store holds the same tokens and mask; how many of these lie in another split there.

    A sample that one store holds twice stays twice: that is what was prepared.
    """
    content = np.empty(len(taken), dtype=np.uint64)
    split = np.empty(len(taken), dtype=object)
    for k, source in enumerate(sources):
        own = taken.source == k
        content[own], split[own] = source.content[taken.number[own]], source.column("split")[taken.number[own]]
    is_new = np.concatenate([[True], content[1:] != content[:-1]])[: len(taken)]
    first = np.maximum.accumulate(np.where(is_new, np.arange(len(taken)), 0))
    is_repeated = taken.source != taken.source[first]
    for i in np.flatnonzero(is_repeated).tolist():  # 64 bits of a hash say they are the same; the tokens decide
        one, other = ((sources[taken.source[at]], int(taken.number[at])) for at in (i, int(first[i])))
        pairs = zip(one[0].tokens(one[1]), other[0].tokens(other[1]))
        is_repeated[i] = all(np.array_equal(a, b) for a, b in pairs)
    return is_repeated, int((split != split[first])[is_repeated].sum())


def of_split(sources: Sequence[Source], taken: Taken, split: str) -> np.ndarray:
    """True [N] for the samples of a split. Raises UserError where no store has it."""
    known = sorted({name for source in sources for name in source.column("split").tolist()})
    if split not in known:
        raise UserError(f"split {split!r} is in none of these stores", f"one of {', '.join(known)}", "correct --split")
    is_wanted = np.zeros(len(taken), dtype=bool)
    for k, source in enumerate(sources):
        own = taken.source == k
        is_wanted[own] = source.column("split")[taken.number[own]] == split
    return is_wanted


def num_fitting(config: RecodeConfig, sources: Sequence[Source], taken: Taken, shape: Manifest) -> int:
    """How many of the first samples fit the budget, everything beside the states included."""
    budget = parse_size(config.budget or "")
    width = bytes_per_position(len(shape.tap_layers), shape.hidden_size, has_last=shape.has_last, codec=shape.codec)

    def needed_bytes(count: int) -> int:
        samples = taken.only(slice(0, count))
        segment_positions, segments, _ = lay_out(aligned(samples.n), width, config.segment_positions)
        placed = replace(shape, segment_positions=segment_positions, num_segments=int(segments[-1]) + 1)
        return whole_bytes(sources[0], placed, samples)

    if not len(taken) or needed_bytes(len(taken)) <= budget:
        return len(taken)
    fits, too_many = 0, len(taken)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if needed_bytes(middle) <= budget else (fits, middle)
    if not fits:
        raise UserError(
            f"--budget {config.budget} is less than a store of one sample takes, "
            f"{human_bytes(needed_bytes(1))} ({needed_bytes(1)} bytes)",
            "room for the target's frozen parts and at least one sample",
            "raise --budget",
        )
    return fits


def whole_bytes(source: Source, manifest: Manifest, taken: Taken) -> int:
    """Bytes of a whole store: exact for states (zstd takes less), an upper bound for the small rest."""
    return states_bytes(manifest, taken.n, manifest.num_segments) + rest_bytes(source, manifest, taken)


def rest_bytes(source: Source, manifest: Manifest, taken: Taken) -> int:
    """Plan, tokens, commits, metadata and frozen parts."""
    num_files = -(-len(taken) // rows_per_file(taken))
    tokens = TOKEN_BYTES * int(taken.num_tokens.sum()) + TOKENS_ROW_BYTES * len(taken) + TOKENS_FILE_BYTES * num_files
    frozen = sum(path.stat().st_size for path in (source.store_dir / "frozen").glob("*"))
    return tokens + frozen + COMMIT_BYTES * (manifest.num_segments + 4) + PLAN_ROW_BYTES * len(taken)


def rows_per_file(taken: Taken) -> int:
    """Samples of one token file, so few that none is ended earlier for its number of batches."""
    batches_a_row = 1 / BATCH_SAMPLES + int(taken.num_tokens.max(initial=1)) / BATCH_TOKENS
    return max(1, min(ROWS_PER_FILE, int((MAX_BATCHES - 2) / batches_a_row)))
