"""Settings of `dflash export`."""

from dataclasses import dataclass

from ...settings import require, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """A served folder from a checkpoint."""

    out: str = setting("./export", "folder to write", flag="--out")
    format: str = setting("zlab", "zlab (also read by SGLang and vLLM)", flag="--format")
    checkpoint: str = setting("best", "latest, best, or a step number", flag="--checkpoint")

    def __post_init__(self) -> None:
        require(self.format == "zlab", "format", self.format, "zlab (speculators comes later)")
