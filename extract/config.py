"""The settings of `prepare`, `plan` and `extract`. Light: imports nothing heavy."""

import re
from dataclasses import dataclass, field, fields
from datetime import date
from typing import Any

from .. import UserError
from ..settings import require, require_wait, setting
from .devices import own_shards
from .origins import ELSEWHERE, ORIGINS, is_origin


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareConfig:
    """From chats or token ids to samples."""

    target: str = setting("tiny", "target: a folder, a hub id, or a packaged one ('tiny')", flag="--target")
    out: str = setting("./data", "folder to write the samples to (DATA)", flag="--out")
    responses: str = setting(
        "given", "'given': answers stand in the input; 'target': the target writes them here", flag="--responses"
    )
    max_length: int = setting(
        8192, "longest sample, tokens; what becomes of longer ones is said by 'long'", flag="--max-length"
    )
    max_new_tokens: int | None = setting(
        None, "longest answer with --responses target, tokens; default: 512", flag="--max-new-tokens"
    )
    split: float = setting(
        0.98, "share of samples to train on, by content hash; a 'split' field in the input wins", flag="--split"
    )
    limit: int | None = setting(None, "take only the first input lines, count", flag="--limit")
    sample: float | None = setting(None, "take only this share of the lines, chosen by content hash", flag="--sample")
    turns: str = setting(
        "auto",
        "'auto': turns share a sample unless the template rewrites history; 'each': one sample a turn; 'last'",
        flag="--turns",
    )
    strict: bool = setting(False, "end at the first line that cannot be used", flag="--strict/--no-strict")
    show: int = setting(0, "print this many samples with what is trained on in colour, count", flag="--show")
    html: str | None = setting(None, "write the samples of --show (default 20) to this file", flag="--html")
    long: str = setting("end", "longer samples: cut at max_length ('end'), at the last 'turn' that fits, or 'drop'")
    min_trained: int = setting(32, "fewest tokens of a sample to train on, count; two blocks of 16 by default")
    duplicates: str = setting("drop", "samples of the same ids and mask as one before: 'drop' or 'keep'")
    origin: str = setting(
        ELSEWHERE, f"where given answers come from unless a line says so in 'response_origin': {ORIGINS}"
    )
    date: str | None = setting(None, "date for chat templates that print one, like 2026-01-31; default: today")
    processes: int | None = setting(None, "processes that render and tokenize, count; default: one per core, up to 32")
    stall_s: float = setting(600.0, "longest silence of such a process before everything is stopped, seconds")
    device: str = setting("auto", "device for --responses target: auto, cpu, cuda, cuda:N")
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
        new = self.max_new_tokens
        require(new is None or new >= 1, "max_new_tokens", new, "at least 1 token")
        require(0 < self.split <= 1, "split", self.split, "a share above 0, up to 1")
        require(self.sample is None or 0 < self.sample <= 1, "sample", self.sample, "a share above 0, up to 1")
        require(self.turns in ("auto", "each", "last"), "turns", self.turns, "'auto', 'each' or 'last'")
        require(self.long in ("end", "turn", "drop"), "long", self.long, "'end', 'turn' or 'drop'")
        require(self.duplicates in ("drop", "keep"), "duplicates", self.duplicates, "'drop' or 'keep'")
        require(is_origin(self.origin), "origin", self.origin, ORIGINS)
        require(self.show >= 0, "show", self.show, "0 or more samples")
        require(is_date(self.date), "date", self.date, "a date like 2026-01-31")
        require(self.processes is None or self.processes >= 1, "processes", self.processes, "at least 1 process")
        require_wait("stall_s", self.stall_s)
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "at least 1 input line")
        require(self.min_trained >= 1, "min_trained", self.min_trained, "at least 1 token")
        require(self.token_budget >= 1, "token_budget", self.token_budget, "at least 1 token")
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        self.require_settings_of_its_own()

    def require_settings_of_its_own(self) -> None:
        """Raises UserError for a setting that only the other kind of responses reads."""
        other = "target" if self.responses == "given" else "given"
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in READ_WITH[other] and value != one.default:
                raise UserError(
                    f"{one.name} = {value!r} does nothing with --responses {self.responses}",
                    f"settings that are read there; {one.name} is read with --responses {other}",
                    f"drop {one.name}, or give --responses {other}",
                )

    @property
    def answer_tokens(self) -> int:
        """Most tokens of an answer that the target writes."""
        return 512 if self.max_new_tokens is None else self.max_new_tokens


READ_WITH = {
    "given": ("turns", "long", "origin"),
    "target": ("max_new_tokens", "device", "dtype", "token_budget"),
}
"""Settings that one kind of responses reads alone: the target answers the last question of a line, within max_length;
given answers need no target. How many processes work is nobody's result, so `processes` may always be given."""


def is_date(text: object) -> bool:
    """True for None and for a date as ISO 8601 writes it."""
    try:
        return text is None or (isinstance(text, str) and date.fromisoformat(text).isoformat() == text)
    except ValueError:
        return False


DTYPES = ("auto", "float32", "bfloat16")
MOST_SHARDS = 100_000  # of all nodes: more than there are GPUs anywhere, few enough to be listed
MOST_TOKENS = 2**31 - 1  # of a sample: a store counts them in 32 bits
MOST_THREADS = 1024  # of a worker: torch ends the process somewhere beyond


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractConfig:
    """From samples to a filled store. The first block decides what the store holds (its identity)."""

    data: str = setting(
        "./data",
        "folder made by `dflash prepare` (DATA); or one with token ids of your own, which is prepared beside the store",
        flag="--data",
    )
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
        is_shown=False,
    )
    segment_positions: int | None = setting(None, "positions of one segment, a power of two; default: chosen")
    dtype: str = setting("auto", "number format of the target's forward: auto, float32, bfloat16")

    budget: str | None = setting(
        None,
        "like 20TB: record only as many samples, by content hash, as fit; give a larger one later to go on",
        flag="--budget",
    )
    shards: int | None = setting(None, "worker processes; default: one per device", flag="--shards")
    only: str | None = setting(
        None, "like 0-5: run these of the shards here, other nodes the others, on one store", flag="--only"
    )
    devices: str | None = setting(
        None, "like 0-5, 0,2 or cpu; default: the first six GPUs, all on a smaller machine, else cpu", flag="--devices"
    )
    gpus_per_shard: int = setting(1, "GPUs that hold one target together, count", flag="--gpus-per-shard")
    token_budget: int = setting(8192, "padded tokens of one forward, count", flag="--token-budget", is_shown=False)
    slow_kernels: bool = setting(
        False,
        "record a hybrid target on CUDA although its recurrent layers run in plain torch",
        flag="--slow-kernels/--no-slow-kernels",
        is_shown=False,
    )
    space_check: bool = setting(
        True,
        "refuse to start when the disk is too small for the plan",
        flag="--space-check/--no-space-check",
        is_shown=False,
    )
    compile: bool = setting(
        False, "run the target's layers through torch.compile, batches padded up to a few shapes; for long runs"
    )
    cpu_threads: int = setting(1, "torch threads of one worker on a CPU; more shards use more cores, count")
    stall_s: float = setting(600.0, "longest silence of a worker before everything is stopped, seconds")

    def __post_init__(self) -> None:
        require(self.data.strip() != "", "data", self.data, "a folder, `.` for this one")
        require(self.store.strip() != "", "store", self.store, "a folder, `.` for this one")
        shards = self.shards
        require(shards is None or 1 <= shards <= MOST_SHARDS, "shards", shards, f"1 to {MOST_SHARDS} workers")
        require(self.gpus_per_shard >= 1, "gpus_per_shard", self.gpus_per_shard, "at least 1 GPU")
        if self.only is not None:
            require(self.shards is not None, "only", self.only, "--shards beside it: how many there are on all nodes")
            own_shards(self.only, self.shards or 1)
        if self.budget is not None:
            require_size(self.budget)
        require_codec(self.codec)
        window = self.window
        require(window is None or 1 <= window <= MOST_TOKENS, "window", window, f"1 to {MOST_TOKENS} tokens")
        require(self.token_budget >= 1, "token_budget", self.token_budget, "at least 1 token")
        threads = self.cpu_threads
        require(1 <= threads <= MOST_THREADS, "cpu_threads", threads, f"1 to {MOST_THREADS} threads")
        require_wait("stall_s", self.stall_s)
        require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        n = self.segment_positions
        require(n is None or (n >= 64 and n & (n - 1) == 0), "segment_positions", n, "a power of two from 64")

    @property
    def own_shards(self) -> tuple[int, ...] | None:
        """The shards that run here; None for all of them."""
        return None if self.only is None else own_shards(self.only, self.shards or 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig(ExtractConfig):
    """What `plan` reads: the settings of `extract`, and a speed to reckon with."""

    rate: float | None = setting(
        None, "tokens/s of one worker, to foretell the hours; default: as measured in this store", flag="--rate"
    )

    def __post_init__(self) -> None:
        ExtractConfig.__post_init__(self)
        require(self.rate is None or self.rate > 0, "rate", self.rate, "more than 0 tokens/s")

    def of_extract(self) -> ExtractConfig:
        """The config of the extract that is planned."""
        return ExtractConfig(**{one.name: getattr(self, one.name) for one in fields(ExtractConfig)})


def require_size(text: str) -> None:
    """Raises UserError where the text is no size."""
    from ..store.size import parse_size  # here, because it loads numpy

    parse_size(text)


def require_codec(name: str) -> None:
    """Raises UserError where there is no codec of that name."""
    from ..store.codecs import get_codec  # here, because it loads numpy

    get_codec(name)
