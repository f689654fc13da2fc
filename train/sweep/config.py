"""Settings of `dflash sweep`. Light: imports nothing heavy."""

import itertools
from dataclasses import dataclass
from typing import Any

from ... import UserError
from ...settings import require, section, setting
from ..rank import named_devices

GRID, LIST, RANDOM = "grid", "list", "random"
STRATEGIES = (GRID, LIST, RANDOM)
KEEP = 0.5
COUNT = 10  # runs that are drawn where nobody says how many


@dataclass(frozen=True, kw_only=True, slots=True)
class HalvingConfig:
    """Successive halving: at each rung the best share of the runs goes on, the others stop there."""

    steps: tuple[int, ...] = setting((), "the rungs: steps at which runs are compared; default: none, all runs end")
    keep: float = setting(KEEP, "share of the runs of a rung that goes on, rounded up")

    def __post_init__(self) -> None:
        steps = self.steps
        is_rising = all(before < after for before, after in itertools.pairwise(steps))
        require(is_rising and all(step >= 1 for step in steps), "halving.steps", steps, "rising steps from 1 on")
        require(
            bool(steps) or self.keep == KEEP,
            "halving.keep",
            self.keep,
            f"{KEEP}, as long as halving.steps names no rung",
        )
        require(0 < self.keep < 1, "halving.keep", self.keep, "a share above 0 and below 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepConfig:
    """Many runs on one store, each an ordinary run of `dflash train` with settings of its own."""

    store: str = setting("./store", "folder of the store, the same for all runs", flag="--store")
    out: str = setting("./sweep", "folder of the sweep (DIR)", flag="--out")
    devices: str = setting(
        "auto",
        "like 6,7, 0-3, cuda:0 or cpu, one run at a time on each; auto: of eight GPUs those behind the first six, of "
        "fewer all",
        flag="--devices",
    )
    confirm: int = setting(0, "the best K runs decode with the target at the end, count", flag="--confirm")
    target: str | None = setting(None, "target of --confirm; default: the one the store was made with", flag="--target")
    confirm_limit: int | None = setting(None, "most prompts that --confirm decodes for each run, count")
    strategy: str = setting(
        GRID,
        "grid: every combination of the values of `fields`; random: `count` draws from them; list: the runs of `runs`",
        flag="--strategy",
    )
    count: int = setting(COUNT, "runs of strategy random, count", flag="--count")
    seed: int = setting(0, "seed of the draws of strategy random", flag="--seed")
    fields: dict[str, Any] = setting(
        {}, "what differs between the runs: a field of train to a list of its values, or with random to a range"
    )
    runs: tuple[dict[str, Any], ...] = setting((), "strategy list: for each run the fields that it sets")
    halving: HalvingConfig = section(HalvingConfig, "runs that stop early")

    def __post_init__(self) -> None:
        named_devices("cpu" if self.devices == "auto" else self.devices)  # raises for text that names none
        require(self.strategy in STRATEGIES, "strategy", self.strategy, "grid, list or random")
        require(1 <= self.count <= 100_000, "count", self.count, "1 to 100,000 runs")
        require(self.confirm >= 0, "confirm", self.confirm, "0 or more runs")
        limit = self.confirm_limit
        require(limit is None or limit >= 1, "confirm_limit", limit, "at least 1 prompt")
        self.require_settings_of_its_own()

    def require_settings_of_its_own(self) -> None:
        """Raises UserError for a setting that only another strategy reads, or that needs --confirm."""
        is_drawn, defaults = self.strategy == RANDOM, {"count": COUNT, "seed": 0}
        others = {"runs": self.runs and self.strategy != LIST, "fields": self.fields and self.strategy == LIST}
        others |= {name: not is_drawn and getattr(self, name) != value for name, value in defaults.items()}
        readers = {"runs": LIST, "fields": "grid or random", "count": RANDOM, "seed": RANDOM}
        for name, is_idle in others.items():
            if is_idle:
                raise UserError(
                    f"{name} = {getattr(self, name)!r} does nothing with strategy = {self.strategy!r}",
                    f"settings that are read there; {name} is read with strategy = {readers[name]}",
                    f"drop {name}, or choose another strategy",
                )
        for name in ("target", "confirm_limit"):
            if getattr(self, name) is not None and not self.confirm:
                raise UserError(
                    f"{name} = {getattr(self, name)!r} does nothing without --confirm",
                    "a target for the runs that decode at the end",
                    f"drop {name}, or add --confirm 1",
                )
