"""The settings of `recode`. Light: imports nothing heavy."""

from dataclasses import dataclass

from ..settings import require, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class RecodeConfig:
    """From finished stores to another one. The first block decides what the new store holds (its identity)."""

    out: str = setting("./recoded", "folder of the new store", flag="--out")
    codec: str | None = setting(
        None, "how states are stored: raw, zstd, int8 or int8:K; default: as in the stores read", flag="--codec"
    )
    taps: tuple[int, ...] | None = setting(
        None, "target layers to keep, like 1,17,33, in this order; default: all", flag="--taps"
    )
    last: bool = setting(True, "keep the last hidden state where it is stored", flag="--last/--no-last")
    window: int | None = setting(
        None,
        "drop tokens more than this many before a sample's first eligible anchor; default: as in the stores read",
        flag="--window",
    )
    split: str | None = setting(None, "keep this split only, like train; default: all", flag="--split")
    limit: int | None = setting(None, "keep the first samples in order of content hash, count", flag="--limit")
    budget: str | None = setting(
        None,
        "keep as many samples, in order of content hash, as surely fit a size like 2TB (zstd counts uncompressed)",
        flag="--budget",
    )
    partial: bool = setting(False, "read stores that are not complete, as of the first start", flag="--partial")
    segment_positions: int | None = setting(None, "positions of one segment, a power of two; default: chosen")

    workers: int | None = setting(None, "worker processes; default: one per core, at most 4", flag="--workers")
    space_check: bool = setting(
        True, "refuse to start when the disk is too small for the new store", flag="--space-check/--no-space-check"
    )
    stall_s: float = setting(600.0, "longest silence of a worker before everything is stopped, seconds")

    def __post_init__(self) -> None:
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "at least 1 sample")
        require(self.taps is None or len(set(self.taps)) == len(self.taps) > 0, "taps", self.taps, "distinct layers")
        require(self.window is None or self.window >= 1, "window", self.window, "at least 1 token")
        require(self.workers is None or self.workers >= 1, "workers", self.workers, "at least 1 worker")
        require(self.stall_s > 0, "stall_s", self.stall_s, "more than 0 seconds")
        n = self.segment_positions
        require(n is None or (n >= 64 and n & (n - 1) == 0), "segment_positions", n, "a power of two from 64")
