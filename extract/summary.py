"""What `plan` and `extract` say at their end, as plain text."""

from dataclasses import dataclass
from shlex import quote

from ..store.codecs import get_codec
from ..store.size import human_bytes

ZSTD_OF_RAW = (0.6, 0.75)
"""What zstd leaves of raw states: 0.70 on SmolLM2's (docs/store-format.md); known only once they are written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSummary:
    """What `dflash extract` would do with the same options."""

    data: str
    store: str
    target: str
    dtype: str
    num_samples: int
    num_without_anchor: int
    num_tokens: int
    num_positions: int
    window: int | None
    num_outside_window: int
    """Tokens of the forwards that are not recorded."""
    tap_layers: tuple[int, ...]
    num_layers: int
    has_last: bool
    hidden_size: int
    codec: str
    codec_bytes: dict[str, int]
    """Bytes of the states asked for, by codec; of zstd the most."""
    segment_positions: int
    num_segments: int
    segment_bytes: int
    """The files of a full segment, their indexes included."""
    budget: str | None
    num_asked: int
    """Segments that fit the budget, all without one."""
    num_asked_samples: int
    num_asked_tokens: int
    only: str | None
    num_own: int
    """Segments of this launcher's shards."""
    store_bytes: int
    needed_bytes: int
    free_bytes: int
    num_committed: int
    workers: tuple[str, ...]
    padding_share: float
    time: str
    next_command: str

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.free_bytes

    def text(self) -> str:
        last = " and the last state" if self.has_last else ""
        committed = f", {self.num_committed} of them committed" if self.num_committed else ""
        without = (
            f", {self.num_without_anchor:,} more without an anchor are left out" if self.num_without_anchor else ""
        )
        verdict = "fits" if self.fits else "DOES NOT FIT"
        outside = "" if self.window is None else f" (window {self.window:,} leaves out {self.num_outside_window:,})"
        codec = get_codec(self.codec)
        most = "at most " if codec.is_compressed else ""
        budget = [] if self.budget is None else [self.budget_text()]
        share = "" if self.only is None else f", shards {self.only} here: {self.num_own:,} segments"
        lines = [
            f"data       {self.data}: {self.num_samples:,} samples of {self.num_tokens:,} tokens{without}",
            f"target     {self.target}, {self.dtype}",
            f"taps       {', '.join(map(str, self.tap_layers))} of layers 0-{self.num_layers - 1}{last}, "
            f"{self.hidden_size} values each",
            f"codec      {codec.name}, {most}{codec.bytes_per_value(self.hidden_size):.3g} bytes a value, "
            f"error: {codec.error}",
            f"by codec   {self.codecs_text()}",
            f"positions  {self.num_positions:,} to record{outside}, {self.padding_share:.1%} padding in the forwards",
            f"segments   {self.num_segments:,} of {self.segment_positions:,} positions, "
            f"at most {human_bytes(self.segment_bytes)} each{committed}",
            *budget,
            f"store      {self.store}: {most}{human_bytes(self.store_bytes)} when complete, "
            f"{most}{human_bytes(self.needed_bytes)} still to write, {human_bytes(self.free_bytes)} free: {verdict}",
            f"workers    {len(self.workers)} on {', '.join(dict.fromkeys(self.workers))}{share}",
            f"time       {self.time}",
            f"next: {self.next_command}",
        ]
        return "\n".join(lines)

    def budget_text(self) -> str:
        outside = self.num_samples - self.num_asked_samples
        left = self.num_tokens - self.num_asked_tokens
        estimated = ", reckoned with the most that zstd takes" if get_codec(self.codec).is_compressed else ""
        return (
            f"budget     {self.budget}: {self.num_asked:,} of {self.num_segments:,} segments{estimated}; "
            f"{self.num_asked_samples:,} samples of {self.num_asked_tokens:,} tokens inside, "
            f"{outside:,} of {left:,} tokens outside"
        )

    def codecs_text(self) -> str:
        """Bytes of the states with each codec."""
        shown = []
        for name, size in self.codec_bytes.items():
            text = f"{name} {human_bytes(size)}"
            if get_codec(name).is_compressed:
                low, high = (human_bytes(share * self.codec_bytes["raw"]) for share in ZSTD_OF_RAW)
                text = f"{name} some {low} to {high} (estimated; at most {human_bytes(size)})"
            shown.append(text)
        return ", ".join(shown)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractReport:
    """What is in the store now, and what this run did for it."""

    data: str
    store: str
    num_samples: int
    num_ok: int
    num_non_finite: int
    num_failed: int
    num_without_anchor: int
    num_planned: int
    """Samples of the whole plan, outside a budget too."""
    num_positions: int
    num_segments: int
    num_missing: int
    """Segments that were asked for and are not there yet: other launchers record them."""
    num_kept_segments: int
    num_new_segments: int
    num_new_positions: int
    num_checked_again: int
    """Samples that this run ran a second time, alone."""
    num_checked_tokens: int
    num_checks_failed: int
    halved: tuple[str, ...]
    """Workers that ran out of the device's memory, and the token budget that each went on with."""
    num_shapes: int
    """Shapes that the target was compiled for, by the worker with the most; 0 without `compile`."""
    waited_share: float
    """Of the workers' time: every slot between them and their writers was full, as the disk is slower."""
    store_bytes: int
    workers: tuple[str, ...]
    wall_s: float
    is_finished: bool

    def text(self) -> str:
        rate = self.num_new_positions / self.wall_s if self.wall_s else 0.0
        done = f"{self.num_new_segments:,} recorded now"
        if self.num_new_segments:
            where = ", ".join(dict.fromkeys(self.workers))
            done += f" by {len(self.workers)} worker(s) on {where} in {self.wall_s:.1f} s, {rate:,.0f} positions/s"
        others = self.num_segments - self.num_kept_segments - self.num_new_segments
        done += f", {others:,} by other launchers meanwhile" if others else ""
        outside = self.num_planned - self.num_samples
        lines = [
            f"store      {self.store}: {self.num_positions:,} positions, {human_bytes(self.store_bytes)}",
            f"samples    {self.num_samples:,}: {self.num_ok:,} ok, {self.num_non_finite:,} non-finite, "
            f"{self.num_failed:,} failed; {self.num_without_anchor:,} more had no anchor",
            f"segments   {self.num_segments:,}: {self.num_kept_segments:,} kept from before, {done}",
        ]
        if self.num_checked_again:
            lines.append(
                f"checked    again, alone: {self.num_checked_again:,} samples, {self.num_checked_tokens:,} tokens; "
                f"{self.num_checks_failed:,} of them failed"
            )
        if self.halved:
            lines.append(
                f"memory     {len(self.halved)} of {len(self.workers)} worker(s) ran out of it once and halved "
                f"token_budget: {', '.join(self.halved)}"
            )
        if self.num_shapes:
            lines.append(f"compiled   for {self.num_shapes} shapes of a batch at most")
        if self.num_new_segments and self.waited_share >= 0.01:
            lines.append(f"disk       the workers waited {self.waited_share:.0%} of their time for it")
        if not self.is_finished:
            lines.append(
                f"missing    {self.num_missing:,} segments, for the launchers of other shards; "
                "the last one to finish completes the store"
            )
        elif outside:
            lines.append(f"outside    {outside:,} samples do not fit the budget; a larger --budget goes on from here")
        partial = "" if self.is_finished else " --partial"
        lines.append(f"next: dflash train --store {quote(self.store)}{partial}")
        return "\n".join(lines)
