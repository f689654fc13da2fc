"""What `plan` and `extract` say at their end, as plain text."""

from dataclasses import dataclass
from shlex import quote

from ..store.codecs import get_codec
from ..store.size import human_bytes


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
    segment_positions: int
    num_segments: int
    segment_bytes: int
    """The files of a full segment, their indexes included."""
    store_bytes: int
    needed_bytes: int
    free_bytes: int
    num_committed: int
    workers: tuple[str, ...]
    padding_share: float
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
        lines = [
            f"data       {self.data}: {self.num_samples:,} samples of {self.num_tokens:,} tokens{without}",
            f"target     {self.target}, {self.dtype}",
            f"taps       {', '.join(map(str, self.tap_layers))} of layers 0-{self.num_layers - 1}{last}, "
            f"{self.hidden_size} values each",
            f"codec      {codec.name}, {most}{codec.bytes_per_value(self.hidden_size):.3g} bytes a value, "
            f"error: {codec.error}",
            f"positions  {self.num_positions:,} to record{outside}, {self.padding_share:.1%} padding in the forwards",
            f"segments   {self.num_segments:,} of {self.segment_positions:,} positions, "
            f"at most {human_bytes(self.segment_bytes)} each{committed}",
            f"store      {self.store}: {most}{human_bytes(self.store_bytes)} when complete, "
            f"{most}{human_bytes(self.needed_bytes)} still to write, {human_bytes(self.free_bytes)} free: {verdict}",
            f"workers    {len(self.workers)} on {', '.join(dict.fromkeys(self.workers))}",
            f"next: {self.next_command}",
        ]
        return "\n".join(lines)


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
    num_positions: int
    num_segments: int
    num_kept_segments: int
    num_new_positions: int
    store_bytes: int
    workers: tuple[str, ...]
    wall_s: float

    @property
    def num_new_segments(self) -> int:
        return self.num_segments - self.num_kept_segments

    def text(self) -> str:
        rate = self.num_new_positions / self.wall_s if self.wall_s else 0.0
        done = f"{self.num_new_segments:,} recorded now"
        if self.num_new_segments:
            where = ", ".join(dict.fromkeys(self.workers))
            done += f" by {len(self.workers)} worker(s) on {where} in {self.wall_s:.1f} s, {rate:,.0f} positions/s"
        lines = [
            f"store      {self.store}: {self.num_positions:,} positions, {human_bytes(self.store_bytes)}",
            f"samples    {self.num_samples:,}: {self.num_ok:,} ok, {self.num_non_finite:,} non-finite, "
            f"{self.num_failed:,} failed; {self.num_without_anchor:,} more had no anchor",
            f"segments   {self.num_segments:,}: {self.num_kept_segments:,} kept from before, {done}",
            f"next: dflash train --store {quote(self.store)}",
        ]
        return "\n".join(lines)
