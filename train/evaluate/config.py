"""Settings of `dflash evaluate`."""

from dataclasses import dataclass, fields

from ... import UserError
from ...settings import require, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """The drafter's exam, with the target or from the store alone."""

    target: str | None = setting(
        None, "target to decode with; default: the one the run's store was made with", flag="--target"
    )
    prompts: str | None = setting(
        None,
        "JSONL of prompts, read as prepare reads lines, perhaps with 'answer'; default: the store's held-out prompts",
        flag="--prompts",
    )
    offline: bool = setting(False, "walk the store's held-out completions; no target is loaded", flag="--offline")
    store: str | None = setting(
        None, "store of --offline and of the default prompts; default: the run's", flag="--store"
    )
    checkpoint: str = setting("latest", "latest, best, or a step number", flag="--checkpoint")
    max_new_tokens: int | None = setting(None, "longest answer, tokens; default: 512", flag="--max-new-tokens")
    limit: int | None = setting(None, "most prompts, count", flag="--limit")
    dtype: str = setting("auto", "number format of the target's forward: auto, float32, bfloat16")
    tap_dtype: str = setting(
        "store",
        "how the target's taps reach the drafter: 'store' (rounded to bfloat16 as recorded) or 'float32', drafter too",
        flag="--tap-dtype",
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N", flag="--device")
    out: str | None = setting(
        None,
        "JSON file of the result; default: evaluation.json in RUN, evaluation-offline.json with --offline",
        flag="--out",
    )

    def __post_init__(self) -> None:
        require(self.tap_dtype in ("store", "float32"), "tap_dtype", self.tap_dtype, "'store' or 'float32'")
        require(self.dtype in ("auto", "float32", "bfloat16"), "dtype", self.dtype, "auto, float32 or bfloat16")
        new = self.max_new_tokens
        require(new is None or new >= 1, "max_new_tokens", new, "at least 1 token")
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "at least 1 prompt")
        self.require_settings_of_its_own()

    def require_settings_of_its_own(self) -> None:
        """Raises UserError for a setting that only the other exam reads, and for a store beside prompts."""
        for one in fields(self):
            value = getattr(self, one.name)
            if self.offline and one.name in OF_DECODING and value != one.default:
                raise UserError(
                    f"{one.name} = {value!r} does nothing with --offline",
                    f"settings that are read there; {one.name} is read by the exam that decodes with the target",
                    f"drop {one.name}, or --offline",
                )
        if self.store is not None and self.prompts is not None:
            raise UserError(
                f"store = {self.store!r} does nothing with --prompts {self.prompts}",
                "one source of prompts: a file, or a store's held-out samples",
                "drop --store or --prompts",
            )

    @property
    def answer_tokens(self) -> int:
        """Most tokens of a decoded answer."""
        return 512 if self.max_new_tokens is None else self.max_new_tokens


OF_DECODING = ("target", "prompts", "max_new_tokens", "dtype", "tap_dtype")
"""Settings that the offline exam does not read: it opens no target, and a store's taps are as they were recorded."""
