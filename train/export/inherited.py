"""What a target has that its drafter takes over, and what it leaves: rotary kinds, scales, caps.

The drafter turns all of a head's width by the target's base and nothing else: a scaled rotation (yarn, M-RoPE) breaks
serving and teaches nothing (dflash-spec 1.4). Knows plain facts of a target.
"""

from collections.abc import Mapping
from typing import Any

from ... import UserError
from ..spec import DrafterSpec

PLAIN_ROPE = "default"
LEFT_ROPES = ("linear", "dynamic", "yarn", "longrope", "su", "llama3", "mrope", "proportional")
ROPE_KEYS = {
    *("rope_theta", "rope_type", "type", "factor", "partial_rotary_factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "short_factor", "long_factor", "low_freq_factor"),
    *("high_freq_factor", "mscale", "mscale_all_dim", "truncate", "mrope_section", "mrope_interleaved"),
}


def require_known(target: Mapping[str, Any]) -> None:
    """Raises UserError, naming it, for a rotary setting of the target that nobody has looked at."""
    rope = target.get("rope") or {}
    kind, unknown = rope.get("rope_type", PLAIN_ROPE), sorted(set(rope) - ROPE_KEYS)
    if kind == PLAIN_ROPE or kind in LEFT_ROPES:
        if not unknown:
            return
        happened = f"the target's rotary settings hold {unknown[0]} = {rope[unknown[0]]!r}"
    else:
        happened = f"the target's rotary embedding is of the unknown kind {kind!r}"
    raise UserError(
        happened,
        f"{PLAIN_ROPE}, {', '.join(LEFT_ROPES)}, with the settings {', '.join(sorted(ROPE_KEYS))}",
        "report it with the target's config.json: whether a drafter can leave it out must be tried first",
    )


def inherited_rows(spec: DrafterSpec, target: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Lines of the model card: the rotary base and what was left of the target's, its scales and caps."""
    rope = target.get("rope") or {}
    told = f"plain, theta {spec.rope_theta:g}, over the whole head"
    left = [rope["rope_type"]] if rope.get("rope_type", PLAIN_ROPE) != PLAIN_ROPE else []
    left += ["mrope"] if rope.get("mrope_section") and "mrope" not in left else []
    left += ["partial rotation"] if rope.get("partial_rotary_factor", 1.0) != 1.0 else []
    rows = [("rotary embedding", f"{told}; the target's {' and '.join(left)} is not inherited" if left else told)]
    if spec.embedding_scale != 1.0:
        rows.append(("embedding", f"rows times {spec.embedding_scale:g}, as in the target"))
    if spec.output_multiplier != 1.0:
        rows.append(("logits", f"times {spec.output_multiplier:g}, as in the target"))
    if spec.logit_softcap is not None:
        rows.append(("logit softcap", f"{spec.logit_softcap:g}, as in the target"))
    return rows
