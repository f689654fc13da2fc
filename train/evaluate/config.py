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
        "file, of prepare's lines or of a public benchmark's, or 'standard'; default: the store's held-out ones",
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
    temperature: float = setting(
        0.0,
        "of target and drafter; 0 is greedy, above it tokens are drawn, and drafts lose nothing",
        flag="--temperature",
    )
    top_p: float = setting(1.0, "of the likeliest tokens keep the fewest that hold this share; 1 keeps all")
    top_k: int = setting(0, "of the likeliest tokens keep so many; 0 keeps all")
    seed: int = setting(0, "seed of all draws; each prompt has its own, whatever is decoded beside it")
    batch: int | None = setting(None, "prompts decoded together, count; default: 8 on CUDA, 1 on a CPU")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N", flag="--device")
    out: str | None = setting(
        None,
        "JSON file of the result; default: evaluation.json in RUN, evaluation-offline.json with --offline",
        flag="--out",
    )
    compare: tuple[str, str] | None = setting(
        None,
        "print how two results differ, files or runs, over the prompts both have; alone, without RUN",
        flag="--compare",
    )

    def __post_init__(self) -> None:
        require(self.tap_dtype in ("store", "float32"), "tap_dtype", self.tap_dtype, "'store' or 'float32'")
        require(self.dtype in ("auto", "float32", "bfloat16"), "dtype", self.dtype, "auto, float32 or bfloat16")
        new = self.max_new_tokens
        require(new is None or new >= 1, "max_new_tokens", new, "at least 1 token")
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "at least 1 prompt")
        require(0 <= self.temperature <= 100, "temperature", self.temperature, "0 for greedy, or up to 100")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "more than 0, at most 1")
        require(self.top_k >= 0, "top_k", self.top_k, "0 for all tokens, or the number that is kept")
        require(0 <= self.seed < 2**63, "seed", self.seed, "0 or more, below 2**63")
        require(self.batch is None or self.batch >= 1, "batch", self.batch, "at least 1 prompt")
        given = self.compare
        require(given is None or len(given) == 2, "compare", given, "two results: files, or runs")
        self.require_settings_of_its_own()

    def require_settings_of_its_own(self) -> None:
        """Raises UserError for a setting that this exam does not read, and for a store beside prompts."""
        for one in fields(self):
            value = getattr(self, one.name)
            if self.compare is not None and one.name != "compare" and value != one.default:
                raise UserError(
                    f"{one.name} = {value!r} does nothing with --compare",
                    "two results that are there, and nothing else",
                    f"drop {one.name}",
                )
            if self.offline and one.name in OF_DECODING and value != one.default:
                raise UserError(
                    f"{one.name} = {value!r} does nothing with --offline",
                    f"settings that are read there; {one.name} is read by the exam that decodes with the target",
                    f"drop {one.name}, or --offline",
                )
            if self.temperature == 0 and one.name in OF_SAMPLING and value != one.default:
                raise UserError(
                    f"{one.name} = {value!r} does nothing with temperature 0",
                    "settings that are read: at temperature 0 the likeliest token is taken, and nothing is drawn",
                    f"drop {one.name}, or set --temperature",
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


OF_SAMPLING = ("top_p", "top_k", "seed")
"""Settings that nothing reads where no token is drawn."""

OF_DECODING = ("target", "prompts", "max_new_tokens", "dtype", "tap_dtype", "temperature", *OF_SAMPLING, "batch")
"""Settings that the offline exam does not read: it opens no target, and a store's taps are as they were recorded."""
