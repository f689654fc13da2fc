"""What every target states about itself, and which of its layers may be recorded.

Knows numbers and rules only: no torch, no transformers, no file of a target. The facts
travel as a plain dict through the store's manifest, so that training never loads a target.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ... import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetFacts:
    """One target as the rest of the project sees it; plain JSON types after `as_plain`."""

    name: str
    """As the user may type it again: a packaged name, a hub id, or an absolute folder."""
    revision: str | None = None
    """Commit of a hub snapshot; None for a folder."""
    weights_sha256: str
    """Fingerprint of the tensor files, see `fingerprint.weights_sha256`."""
    config_sha256: str | None = None
    """Fingerprint of config.json, see `configs.config_sha256`; None for a GGUF. Older stores have none."""
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    """Rows of the embedding, often more than the tokenizer has ids."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: dict[str, Any] = field(default_factory=dict)
    """Rotary settings, at least rope_theta and rope_type."""
    max_positions: int
    is_tied: bool
    """True when the output head is the embedding."""
    is_recurrent: bool = False
    """True when some layer keeps a running state (Gated DeltaNet, Mamba) that cannot be cropped."""
    embedding_scale: float = 1.0
    """Factor between an embedding row and the input of layer 0."""
    output_multiplier: float = 1.0
    """Factor between head(norm(last)) and the logits."""
    logit_softcap: float | None = None
    """c in logits = c * tanh(logits / c), applied after the multiplier."""
    dtype: str
    """Number format of the forward: float32 or bfloat16."""
    tokenizer_sha256: str
    template_sha256: str
    tokenizer_size: int
    """One more than the tokenizer's highest id."""
    special_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    """Every id that ends an answer: of the tokenizer, the config and the generation config."""
    mask_id: int | None = None

    def as_plain(self) -> dict[str, Any]:
        """The facts as a dict of JSON types; tuples become lists."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def default_taps(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """The layers to record when the user names none, ascending and distinct.

    From 8 layers on round(1 + i*(N-4)/(n-1)) with Python's half-to-even rounding, the rule of
    the DFlash reference (dflash-spec 1.3); below, or when `count` does not fit between layer 1
    and N-3, evenly spaced layers of 0..N-2, fewer than `count` if there are fewer.
    Raises UserError when the target has a single layer.
    """
    if num_layers < 2:
        raise UserError(
            f"the target has {num_layers} decoder layer(s)",
            "at least 2: the last layer is never a tap",
            "choose another target",
        )
    if count == 1:
        return (min(num_layers // 2, num_layers - 2),)
    if num_layers >= 8 and count <= num_layers - 3:
        return tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
    count = min(count, num_layers - 1)
    if count == 1:
        return (0,)
    return tuple(round(i * (num_layers - 2) / (count - 1)) for i in range(count))


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Raises UserError for an empty list, a repeat, a layer out of range, or the last layer.

    The order is the user's: it is the order of the features, and it is kept.
    """
    allowed = f"distinct layers of 0..{num_layers - 2}"
    given = ",".join(str(tap) for tap in taps)
    if not taps:
        raise UserError("the tap list is empty", allowed, "name at least one layer, or drop the option")
    repeated = sorted({tap for tap in taps if list(taps).count(tap) > 1})
    if repeated:
        raise UserError(f"taps {given} name layer {repeated[0]} more than once", allowed, "name each layer once")
    outside = [tap for tap in taps if not 0 <= tap < num_layers]
    if outside:
        raise UserError(f"tap {outside[0]} of {given}: the target has {num_layers} layers", allowed, "correct the list")
    if num_layers - 1 in taps:
        raise UserError(
            f"tap {num_layers - 1} of {given} is the last layer",
            f"{allowed}; the last layer's state is recorded by `--last`, before the final norm",
            "take an earlier layer",
        )


def length_bound(rope: Mapping[str, Any]) -> int | None:
    """Up to how many tokens the longest text of a batch leaves all its angles as they are; None for any number.

    Beyond it longrope has other factors for all texts of the batch (transformers, modeling_rope_utils), and `dynamic`
    angles of its own for every length: no sample is as long as that, since the bound is what the target can take.
    """
    return int(rope["original_max_position_embeddings"]) if rope.get("rope_type") == "longrope" else None
