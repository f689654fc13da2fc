"""Settings of `dflash serve-check`."""

import shlex
from dataclasses import dataclass

from ... import UserError
from ...settings import require, setting

ENGINES = ("auto", "vllm", "sglang")
FORMATS = ("zlab", "speculators")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeCheckConfig:
    """The exported drafter inside a real engine, beside our own decoding."""

    target: str | None = setting(
        None, "target to serve; default: the one the run's store was made with", flag="--target"
    )
    prompts: str | None = setting(
        None, "JSONL of prompts, read as evaluate reads them; default: the store's held-out prompts", flag="--prompts"
    )
    engine: str = setting("auto", "auto (vllm, else sglang, whichever is installed), vllm or sglang", flag="--engine")
    engine_python: str | None = setting(
        None, "interpreter that the engine is installed in; default: this one", flag="--engine-python"
    )
    engine_args: str = setting(
        "",
        "further arguments of the engine's server, like '--tensor-parallel-size 2'; default: none",
        flag="--engine-args",
    )
    export: str | None = setting(
        None, "exported folder to serve; default: a new export, into a temporary folder", flag="--export"
    )
    format: str = setting("zlab", "zlab or speculators, of the new export", flag="--format")
    checkpoint: str = setting("best", "latest, best, or a step number", flag="--checkpoint")
    max_new_tokens: int = setting(192, "longest answer, tokens", flag="--max-new-tokens")
    limit: int = setting(64, "most prompts, count", flag="--limit")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N", flag="--device")
    dtype: str = setting("auto", "number format of target and drafter, here and there: auto, float32, bfloat16")
    tolerance: float = setting(
        0.02, "difference that still agrees: of the acceptance length, relative, and of each position's share"
    )
    compare_folder: bool = setting(
        True, "compare the folder with the run, and serve it only if they are equal; off: look at acceptance alone"
    )
    start_s: float = setting(600.0, "longest wait for the engine to answer after its start, seconds")
    request_s: float = setting(600.0, "longest wait for one answer, seconds")

    def __post_init__(self) -> None:
        require(self.engine in ENGINES, "engine", self.engine, ", ".join(ENGINES))
        require(self.format in FORMATS, "format", self.format, " or ".join(FORMATS))
        require(self.dtype in ("auto", "float32", "bfloat16"), "dtype", self.dtype, "auto, float32 or bfloat16")
        require(self.max_new_tokens >= 2, "max_new_tokens", self.max_new_tokens, "at least 2 tokens: one cycle")
        require(self.limit >= 1, "limit", self.limit, "at least 1 prompt")
        require(0 < self.tolerance < 1, "tolerance", self.tolerance, "a share above 0 and below 1")
        require(self.start_s > 0, "start_s", self.start_s, "seconds above 0")
        require(self.request_s > 0, "request_s", self.request_s, "seconds above 0")
        _ = self.extra_arguments
        if self.export is not None and self.format != "zlab":
            raise UserError(
                f"format = {self.format!r} does nothing with --export {self.export}",
                "one source of the folder; its own config says its format",
                "drop --format or --export",
            )

    @property
    def extra_arguments(self) -> tuple[str, ...]:
        """`engine_args` word by word. Raises UserError where a quote is left open."""
        try:
            return tuple(shlex.split(self.engine_args))
        except ValueError as error:
            raise UserError(
                f"engine_args = {self.engine_args!r}: {error}", "arguments as a shell takes them", "close the quote"
            ) from error
