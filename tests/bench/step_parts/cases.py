"""The drafters and rows that are measured: real widths, synthetic rows as the loader hands them over."""

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from dflash_offline.pinned_memory import pinned
from dflash_offline.store.samples import eligible_anchors
from dflash_offline.train.config import DrafterConfig
from dflash_offline.train.loader import LoadedRow
from dflash_offline.train.order import Place, RowCounts
from dflash_offline.train.packing import choose_anchors
from dflash_offline.train.slot import RowArrays, RowShape, RowSlot
from dflash_offline.train.spec import DrafterSpec, make_spec

BLOCK_SIZE = 16
HOST_ROWS = 3  # rows of taps in host memory, as many as the trainer's ring has; the anchors are new in every step


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A drafter of these widths on full rows of samples of one length."""

    hidden: int
    intermediate: int
    vocabulary: int
    row_tokens: int
    anchors: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 5
    taps: int = 5
    sample_tokens: int = 4096
    sliding_layers: int = 0
    window: int = 2048

    @property
    def shape(self) -> RowShape:
        return RowShape(row_tokens=self.row_tokens, anchors=self.anchors, block_size=BLOCK_SIZE)

    @property
    def positions(self) -> int:
        """Draft positions of a row, slot 0 counted."""
        return self.anchors * BLOCK_SIZE

    def spec(self) -> DrafterSpec:
        target = {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "tokenizer_size": self.vocabulary - 1,
            "num_layers": 36,
            "rms_norm_eps": 1e-6,
            "rope": {"rope_theta": 1e6},
            "max_positions": 40_960,
        }
        config = DrafterConfig(num_layers=self.layers, block_size=BLOCK_SIZE, **self.attention())
        return make_spec(config, target, tuple(range(1, 1 + self.taps)))

    def attention(self) -> dict[str, Any]:
        """The first `sliding_layers` layers have the window and are causal in the block; the others see all."""
        if not self.sliding_layers:
            return {}
        names = f"{self.sliding_layers}xsliding", f"{self.layers - self.sliding_layers}xfull"
        return {"layer_types": names, "window": self.window, "causal": "sliding"}

    def halved(self) -> "Case":
        """Half the row, half the anchors."""
        return dataclasses.replace(self, row_tokens=self.row_tokens // 2, anchors=self.anchors // 2)


WIDTHS_8B = {"hidden": 4096, "intermediate": 12_288, "vocabulary": 151_936}
WIDTHS_27B = {"hidden": 5120, "intermediate": 17_408, "vocabulary": 248_320}
WIDTHS_SMALL = {"hidden": 1024, "intermediate": 3072, "vocabulary": 151_936, "heads": 16}
CASES = {
    "8b": Case(**WIDTHS_8B, row_tokens=16_384, anchors=2048),
    "27b": Case(**WIDTHS_27B, row_tokens=12_288, anchors=1536),
    "27b_sliding": Case(**WIDTHS_27B, row_tokens=12_288, anchors=1536, sliding_layers=4),
    "small": Case(**WIDTHS_SMALL, row_tokens=8192, anchors=512),
    "recompiles": Case(
        hidden=256,
        intermediate=512,
        vocabulary=4096,
        heads=4,
        kv_heads=2,
        head_dim=64,
        taps=3,
        row_tokens=4096,
        anchors=256,
    ),
}
TINY = {
    "hidden": 32,
    "intermediate": 48,
    "vocabulary": 160,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "layers": 2,
    "taps": 3,
    "row_tokens": 512,
    "anchors": 32,
    "sample_tokens": 200,
    "window": 64,
}


def tiny(case: Case) -> Case:
    """The case in a size that says only whether the benchmark runs."""
    return dataclasses.replace(case, **{**TINY, "sliding_layers": min(case.sliding_layers, 1)})


class Rows:
    """Full rows in host memory, pinned as the trainer pins the loader's ring; the taps of a few rows in turn.

    It stands where `train.staging.Staged` has the loader, whose rows it hands out without reading any.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        slot = RowSlot(shape=case.shape, num_taps=case.taps, hidden_size=case.hidden, codec_name="raw")
        self.plan = SimpleNamespace(slot=slot, num_own_rows=sys.maxsize)
        self.num_slots, self.free = HOST_ROWS, list(range(HOST_ROWS))
        self.taken: list[RowArrays] = []
        self.memory = np.zeros((HOST_ROWS, slot.size_bytes), np.uint8)
        self.rows = [slot.view(part) for part in self.memory]
        self.eligible = np.zeros(case.row_tokens, np.bool_)  # [T]
        for number, row in enumerate(self.rows):
            self.fill(row, np.random.default_rng(number))
        self.num_drawn = 0

    def fill(self, row: RowArrays, rng: np.random.Generator) -> None:
        """Samples one after another, the last one cut at the end of the row; all tokens are trained on."""
        case = self.case
        place = np.arange(case.row_tokens)
        row.ids[:] = rng.integers(0, case.vocabulary - 1, len(row.ids))
        row.loss_mask[: case.row_tokens] = True
        row.loss_mask[case.row_tokens :] = False
        row.sample_ids[:], row.positions[:] = np.divmod(place, case.sample_tokens)
        for tap in row.taps:  # [T, row_bytes]
            states = torch.randn(case.row_tokens, case.hidden, device=self.device).to(torch.bfloat16)
            tap[:] = states.view(torch.uint8).cpu().numpy()
        ends = np.flatnonzero(np.diff(row.sample_ids, append=-1))
        row.taps[:, ends] = 0
        for number in np.unique(row.sample_ids):
            own = row.sample_ids == number
            self.eligible[own] = eligible_anchors(row.loss_mask[: case.row_tokens][own])

    def draw(self, count: int) -> list[RowArrays]:
        """The next rows, each with anchors of its own."""
        return [self.drawn(self.rows[self.num_drawn % HOST_ROWS]) for _ in range(count)]

    def drawn(self, row: RowArrays) -> RowArrays:
        """The row with the next anchors."""
        shape = self.case.shape
        anchors, keep = choose_anchors(
            self.eligible, row.sample_ids, shape.anchors, unit=shape.unit, seed=0, epoch=0, row=self.num_drawn
        )
        self.num_drawn += 1
        return dataclasses.replace(row, anchors=anchors, keep=keep)

    @property
    def num_ready(self) -> int:
        return len(self.free)

    def take(self) -> LoadedRow:
        """The next row in its slot, as `Loader.take`."""
        number, place = self.free.pop(0), Place(0, self.num_drawn)
        row = self.drawn(self.rows[number])
        self.taken.append(row)
        self.rows[number].anchors[:], self.rows[number].keep[:] = row.anchors, row.keep
        counts = RowCounts(len(np.unique(row.sample_ids)), self.case.row_tokens, int(row.keep.sum()))
        after, samples = Place(0, self.num_drawn), np.unique(row.sample_ids)
        return LoadedRow(number, place, counts, after, samples, self.memory[number], self.rows[number])

    def give_back(self, row: LoadedRow) -> None:
        self.free.append(row.number)


@contextmanager
def rows_of(case: Case, device: torch.device) -> Iterator[Rows]:
    rows = Rows(case, device)
    with pinned(rows.memory.reshape(-1), device):
        yield rows
