"""The settings of `prepare`, `plan` and `extract`. Light: imports nothing heavy."""

import re
from dataclasses import dataclass, field
from typing import Any

from ..settings import require, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareConfig:
    """From chats or token ids to samples."""

    target: str = setting("tiny", "target: a folder, a hub id, or a packaged one ('tiny')", flag="--target")
    out: str = setting("./data", "folder to write the samples to (DATA)", flag="--out")
    responses: str = setting(
        "given", "'given': answers stand in the input; 'target': the target writes them here", flag="--responses"
    )
    max_length: int = setting(8192, "longest sample, tokens; longer ones are cut and counted", flag="--max-length")
    max_new_tokens: int = setting(512, "longest answer with --responses target, tokens", flag="--max-new-tokens")
    held_out: float = setting(
        0.01,
        "share of samples kept for the exam, by content hash; a 'split' field in the input wins",
        flag="--held-out",
    )
    limit: int | None = setting(None, "take only the first input lines, count", flag="--limit")
    device: str = setting("auto", "device for --responses target: auto, cpu, cuda, cuda:N", flag="--device")
    min_anchors: int = setting(1, "fewest eligible anchors of a sample that is kept, count")
    dtype: str = setting("auto", "number format of the target's forward: auto, float32, bfloat16")
    token_budget: int = setting(32768, "padded tokens of one generation batch, count")
    template: dict[str, Any] = field(
        default_factory=dict,
        metadata={"text": "options handed to the chat template, like enable_thinking", "flag": None},
    )

    def __post_init__(self) -> None:
        require(self.responses in ("given", "target"), "responses", self.responses, "'given' or 'target'")
        require(
            re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", self.device) is not None,
            "device",
            self.device,
            "auto, cpu, cuda or cuda:N",
        )
        require(self.max_length >= 2, "max_length", self.max_length, "at least 2 tokens")
        require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1 token")
        require(0 <= self.held_out < 1, "held_out", self.held_out, "a share from 0 to below 1")
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "at least 1 input line")
        require(self.min_anchors >= 1, "min_anchors", self.min_anchors, "at least 1 anchor")
        require(self.token_budget >= 1, "token_budget", self.token_budget, "at least 1 token")
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")


DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractConfig:
    """From samples to a filled store. The first block decides what the store holds (its identity)."""

    data: str = setting("./data", "folder made by `dflash prepare` (DATA)", flag="--data")
    store: str = setting("./store", "folder of the store", flag="--store")
    target: str | None = setting(None, "target; default: the one DATA was prepared for", flag="--target")
    taps: tuple[int, ...] | None = setting(
        None, "target layers to record, like 1,9,17; default: five, evenly spaced", flag="--taps"
    )
    last: bool = setting(False, "also record the last hidden state, for soft targets", flag="--last")
    codec: str = setting(
        "raw",
        "how states are stored: raw (bfloat16), zstd (lossless), int8 or int8:K (K exact values a row)",
        flag="--codec",
    )
    window: int | None = setting(
        None,
        "leave out tokens more than this many before a sample's first eligible anchor; only drafters with "
        "drafter.window up to it can be trained then; default: record them",
        flag="--window",
    )
    segment_positions: int | None = setting(None, "positions of one segment, a power of two; default: chosen")
    dtype: str = setting("auto", "number format of the target's forward: auto, float32, bfloat16")

    shards: int | None = setting(None, "worker processes; default: one per device", flag="--shards")
    devices: str | None = setting(
        None, "like 0-5, 0,2 or cpu; default: the first six GPUs, all on a smaller machine, else cpu", flag="--devices"
    )
    token_budget: int = setting(8192, "padded tokens of one forward, count", flag="--token-budget")
    slow_kernels: bool = setting(
        False,
        "record a hybrid target on CUDA although its recurrent layers run in plain torch",
        flag="--slow-kernels/--no-slow-kernels",
    )
    space_check: bool = setting(
        True, "refuse to start when the disk is too small for the plan", flag="--space-check/--no-space-check"
    )
    cpu_threads: int = setting(1, "torch threads of one worker on a CPU; more shards use more cores, count")
    stall_s: float = setting(600.0, "longest silence of a worker before everything is stopped, seconds")

    def __post_init__(self) -> None:
        require(self.shards is None or self.shards >= 1, "shards", self.shards, "at least 1 worker")
        require_codec(self.codec)
        require(self.window is None or self.window >= 1, "window", self.window, "at least 1 token")
        require(self.token_budget >= 1, "token_budget", self.token_budget, "at least 1 token")
        require(self.cpu_threads >= 1, "cpu_threads", self.cpu_threads, "at least 1 thread")
        require(self.stall_s > 0, "stall_s", self.stall_s, "more than 0 seconds")
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        n = self.segment_positions
        require(n is None or (n >= 64 and n & (n - 1) == 0), "segment_positions", n, "a power of two from 64")


def require_codec(name: str) -> None:
    """Raises UserError where there is no codec of that name."""
    from ..store.codecs import get_codec  # here, because it loads numpy

    get_codec(name)
