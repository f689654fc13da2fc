"""What the layers of a drafter see: the kinds of attention, one per layer, and whole layouts in z-lab's words.

Plain facts without torch. A layout is what a config can say; any tuple of kinds is more than that.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from .. import UserError

SLIDING, FULL = "sliding_attention", "full_attention"
CAUSAL_CHOICES = NONE, OF_SLIDING, ALL = ("no", "sliding", "all")
LAYERS = re.compile(r"(?:([1-9]\d{0,3})x)?(sliding|full)(?:_attention)?")


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What the slots of one layer see (dflash-spec 1.7).

    Of the context the tokens less than `window` before the slot (strict, per query), or all with None; of
    their own block all slots, or with `is_causal` those up to themselves.
    """

    window: int | None = None
    is_causal: bool = False

    def __str__(self) -> str:
        reach = "full" if self.window is None else f"sliding {self.window}"
        return f"{reach} causal" if self.is_causal else reach


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All layers as a config says them: SLIDING or FULL for each, one window, and which of them are causal.

    `causal` is one of CAUSAL_CHOICES; OF_SLIDING is z-lab's reading of a config without `is_causal`.
    """

    layer_types: tuple[str, ...]
    window: int | None
    causal: str

    def attention(self) -> tuple[AttentionKind, ...]:
        """The kind of each layer."""
        return tuple(
            AttentionKind(
                self.window if name == SLIDING else None,
                self.causal == ALL or (self.causal == OF_SLIDING and name == SLIDING),
            )
            for name in self.layer_types
        )


def layout_of(attention: Sequence[AttentionKind]) -> Layout | None:
    """The layout whose layers have these kinds; None where no config can say them (two windows, say)."""
    windows = {kind.window for kind in attention} - {None}
    if len(windows) > 1:
        return None
    names = tuple(FULL if kind.window is None else SLIDING for kind in attention)
    for causal in CAUSAL_CHOICES:
        layout = Layout(layer_types=names, window=next(iter(windows), None), causal=causal)
        if layout.attention() == tuple(attention):
            return layout
    return None


def describe(attention: Sequence[AttentionKind]) -> str:
    """The layers in words, like '4 x sliding 2048, 1 x full'."""
    return ", ".join(f"{len(list(run))} x {kind}" for kind, run in groupby(attention))


def named_layers(names: Sequence[str]) -> tuple[str, ...]:
    """SLIDING or FULL for each layer, from those names, short ones and counts, like ('4xsliding', 'full').

    Raises UserError for any other name.
    """
    layers: list[str] = []
    for name in names:
        match = LAYERS.fullmatch(name)
        if match is None:
            raise UserError(
                f"drafter.layer_types holds {name!r}",
                f"{SLIDING} or {FULL} for each layer, or counts like 4xsliding,1xfull",
                "change drafter.layer_types",
            )
        layers += [f"{match[2]}_attention"] * int(match[1] or 1)
    return tuple(layers)
