"""What a drafter is: its shape, taps, mask token and the target's quirks it must repeat.

Knows configs and plain facts of a target; no weights, no torch.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import UserError
from .config import DrafterConfig
from .kinds import FULL, NONE, SLIDING, AttentionKind, Layout, layout_of, named_layers

NUM_LAYERS, BLOCK_SIZE = 5, 16  # where neither the config nor a drafter to start from says otherwise
SLOT_MEANING = "slot k predicts its own position a+k"


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSpec:
    """Everything that fixes a drafter's weights and mathematics; saved with every checkpoint.

    `attention` holds the kind of each layer, the first layer first.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_taps: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    block_size: int
    mask_token_id: int
    tap_layers: tuple[int, ...]
    num_target_layers: int
    max_positions: int
    attention: tuple[AttentionKind, ...]
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    logit_softcap: float | None = None
    slot_meaning: str = SLOT_MEANING

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1:
            raise ValueError(f"num_kv_heads = {self.num_kv_heads}, and there is at least one")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"drafter with {self.num_heads} query heads and {self.num_kv_heads} key/value heads",
                "query heads in equal groups per key/value head",
                "set drafter.num_heads and drafter.num_kv_heads",
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim = {self.head_dim}", "an even number, for the rotary pairs", "set an even one")
        if len(self.tap_layers) != self.num_taps:
            raise ValueError(f"{self.num_taps} taps, but tap_layers = {self.tap_layers}")
        if len(self.attention) != self.num_layers:
            raise ValueError(f"{self.num_layers} layers, but attention = {self.attention}")
        if self.slot_meaning != SLOT_MEANING:
            raise UserError(
                f"slot_meaning = {self.slot_meaning!r}",
                f"{SLOT_MEANING!r}; the other layout accepts next to nothing without an error",
                "use a drafter of this layout",
            )

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """The distinct kinds of attention, in the order in which the layers first have them."""
        return tuple(dict.fromkeys(self.attention))

    @property
    def reach(self) -> int | None:
        """The widest window, tokens; None where a layer reads the full context."""
        windows = [kind.window for kind in self.attention if kind.window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reads it back."""
        values = dataclasses.asdict(self)
        return values | {"tap_layers": list(self.tap_layers), "attention": list(values["attention"])}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "DrafterSpec":
        """The spec that `as_dict` wrote. Raises UserError for unknown or missing fields."""
        fields = {field.name: field for field in dataclasses.fields(DrafterSpec)}
        required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        wrong = sorted((set(values) - set(fields)) | (required - set(values)))
        if wrong:
            raise UserError(
                f"a drafter's facts with wrong fields: {', '.join(wrong)}",
                f"the fields {', '.join(fields)}",
                "read the run with the version that wrote it",
            )
        attention = tuple(AttentionKind(kind["window"], kind["is_causal"]) for kind in values["attention"])
        plain: dict[str, Any] = {**values, "tap_layers": tuple(values["tap_layers"]), "attention": attention}
        return DrafterSpec(**plain)


def make_spec(config: DrafterConfig, target: Mapping[str, Any], tap_layers: Sequence[int]) -> DrafterSpec:
    """The drafter's spec from the run's config, the target's facts and the store's taps.

    `target` is TargetFacts as a plain dict. Raises UserError where a size is known from neither side,
    where the taps are no subset of the store's, and for a mask token that is none.
    """
    rope = target.get("rope") or {}
    if rope.get("rope_theta") is None:
        raise UserError(
            f"the target's rope settings {dict(rope)} hold no rope_theta",
            "the base of its rotary angles, which the drafter shares",
            "record the store again with a target whose config states rope_theta",
        )
    taps = choose_taps(config.taps, tap_layers)
    attention = choose_layout(config).attention()
    return DrafterSpec(
        hidden_size=target["hidden_size"],
        intermediate_size=size_of("intermediate_size", config.intermediate_size, target),
        num_layers=len(attention),
        num_heads=size_of("num_heads", config.num_heads, target),
        num_kv_heads=size_of("num_kv_heads", config.num_kv_heads, target),
        head_dim=size_of("head_dim", config.head_dim, target),
        num_taps=len(taps),
        vocab_size=target["vocab_size"],
        rms_norm_eps=target["rms_norm_eps"],
        rope_theta=float(rope["rope_theta"]),
        block_size=config.block_size or BLOCK_SIZE,
        mask_token_id=choose_mask_token(config.mask_token_id, target),
        tap_layers=taps,
        num_target_layers=target["num_layers"],
        max_positions=target["max_positions"],
        attention=attention,
        embedding_scale=target.get("embedding_scale", 1.0),
        output_multiplier=target.get("output_multiplier", 1.0),
        logit_softcap=target.get("logit_softcap"),
    )


def choose_layout(config: DrafterConfig, start: DrafterSpec | None = None) -> Layout:
    """What each layer sees: the config's settings, else those of the drafter to start from, else the defaults.

    Raises UserError for another number of layers, sliding layers without a window, and a window that no layer has.
    """
    known = layout_of(start.attention) if start is not None else None
    names = named_layers(config.layer_types) if config.layer_types is not None else None
    num_layers = config.num_layers or (start.num_layers if start else len(names or ()) or NUM_LAYERS)
    if names is None and known is not None and (config.window is None or SLIDING in known.layer_types):
        names = known.layer_types
    names = names or (SLIDING if config.window is not None else FULL,) * num_layers
    window = config.window
    if window is None and known is not None and SLIDING in names:
        window = known.window
    shown = ",".join(names)
    if len(names) != num_layers:
        raise UserError(
            f"drafter.layer_types = {shown} for {num_layers} layers",
            f"{num_layers} names, one for each layer",
            "change drafter.layer_types or drafter.num_layers (--layers)",
        )
    if (window is not None) != (SLIDING in names):
        raise UserError(
            f"drafter.window = {'none' if window is None else window} with drafter.layer_types = {shown}",
            "a window where a layer is sliding_attention, and none where no layer is",
            "set both, like --set drafter.window=2048 --set drafter.layer_types=4xsliding,1xfull",
        )
    return Layout(layer_types=names, window=window, causal=config.causal or (known.causal if known else NONE))


def require_recorded(reach: int | None, recorded: int | None, store: str) -> None:
    """Raises UserError where a drafter reads further back (`DrafterSpec.reach`) than a store of window `recorded`."""
    if recorded is not None and (reach is None or reach > recorded):
        own = "none: not all of its layers have one" if reach is None else str(reach)
        raise UserError(
            f"the store {store!r} was recorded with window {recorded}, the drafter's window is {own}",
            f"sliding layers only, drafter.window from 1 to {recorded}: earlier tokens are not in this store",
            f"--set drafter.window={recorded} or less, or take a store with a larger window or none",
        )


def size_of(name: str, own: int | None, target: Mapping[str, Any]) -> int:
    """The config's value, else the target's."""
    value = own if own is not None else target.get(name)
    if value is None:
        raise UserError(f"the target states no {name}", f"a value for drafter.{name}", f"--set drafter.{name}=...")
    return int(value)


def choose_taps(wanted: Sequence[int] | None, stored: Sequence[int]) -> tuple[int, ...]:
    """The taps to train on, in their given order: all stored ones, or a subset without repeats."""
    taps = tuple(stored if wanted is None else wanted)
    if not taps or len(set(taps)) != len(taps) or not set(taps) <= set(stored):
        raise UserError(
            f"drafter.taps = {list(taps)}", f"distinct layers of the store's taps {list(stored)}", "change drafter.taps"
        )
    return taps


def choose_mask_token(requested: int | None, target: Mapping[str, Any]) -> int:
    """Id of the masked slots: a row of the target's embedding that means nothing else.

    Without a request the tokenizer's own mask token, else the first embedding row beyond the tokenizer.
    Raises UserError for an id outside the embedding or with a meaning of its own (pad, begin, end, an
    ordinary token), and where no unused row exists (dflash-spec 1.5). An ordinary token is taken only
    where the tokenizer leaves nothing else. Whether text holds the id, `require_free` decides.
    """
    vocab_size, mask_id, unused = target["vocab_size"], target.get("mask_id"), target["tokenizer_size"]
    if requested is None:
        choice = mask_id if mask_id is not None else unused
        if mask_id is None and unused >= vocab_size:
            raise UserError(
                f"the tokenizer has no mask token and fills all {vocab_size} rows of the embedding",
                "an id that the masked slots can use",
                "set drafter.mask_token_id (--mask-token) to a token that no text contains",
            )
    else:
        choice = requested
    if not 0 <= choice < vocab_size:
        raise UserError(
            f"mask token {choice} lies outside the target's embedding",
            f"an id from 0 to {vocab_size - 1}",
            "set drafter.mask_token_id (--mask-token)",
        )
    meanings = [("the padding token", [target.get("pad_id")]), ("the begin token", [target.get("bos_id")])]
    meanings.append(("an end token", list(target.get("eos_ids") or ())))
    if mask_id is not None or unused < vocab_size:
        special_ids = {mask_id, *(target.get("special_ids") or ())}
        meanings.append(("an ordinary token", [choice] if choice < unused and choice not in special_ids else []))
    for meaning, ids in meanings:
        if choice in ids:
            raise UserError(
                f"mask token {choice} is {meaning} of the target",
                "a reserved row of its embedding, unused otherwise",
                "set drafter.mask_token_id (--mask-token), perhaps to the first row beyond the tokenizer",
            )
    return choice


def require_free(mask_token_id: int, target: Mapping[str, Any], num_holding: int, num_samples: int) -> None:
    """Raises UserError where text uses the mask token, unless the tokenizer declares it as such.

    `num_holding` of `num_samples` samples hold the id.
    """
    if num_holding and mask_token_id != target.get("mask_id"):
        raise UserError(
            f"mask token {mask_token_id} is not free: {num_holding:,} of {num_samples:,} samples hold it",
            "an id that no text holds, like the tokenizer's mask token or a row beyond the tokenizer",
            "set drafter.mask_token_id (--mask-token), or leave it out",
        )
