"""Settings of `dflash export`."""

from dataclasses import dataclass

from ...settings import require, setting

FORMATS = ZLAB, SGLANG, VLLM, SPECULATORS = ("zlab", "sglang", "vllm", "speculators")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """A served folder from a checkpoint, or from another drafter's folder."""

    out: str = setting("./export", "folder to write", flag="--out")
    format: str = setting(
        ZLAB,
        "zlab (z-lab's runtime, SGLang, vLLM), sglang or vllm (the same, checked for that engine), "
        "speculators (vLLM with one argument)",
        flag="--format",
    )
    checkpoint: str = setting("best", "latest, best, or a step number", flag="--checkpoint")
    target: str | None = setting(
        None,
        "name of the target in the speculators format, default: that of the run's store; "
        "of a folder: the target to read what the folder does not say",
        flag="--target",
    )
    dtype: str = setting(
        "auto", "number format of the weights: auto (bfloat16, of a folder its own), " + ", ".join(DTYPES[1:])
    )

    def __post_init__(self) -> None:
        require(self.format in FORMATS, "format", self.format, ", ".join(FORMATS))
        require(self.dtype in DTYPES, "dtype", self.dtype, ", ".join(DTYPES))
