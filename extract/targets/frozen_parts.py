"""A target's embedding, final norm and head as plain tensors, proved on the target itself.

Training uses these in place of the target: a scale that nobody knew of would spoil every
loss without an error, so the parts must reproduce the target's own logits here.
"""

from typing import Any

import torch

from ... import UserError
from .base import TargetFacts


def frozen_parts(model: Any, decoder: Any, norm_module: Any, facts: TargetFacts) -> dict[str, torch.Tensor]:
    """embedding [V, H], norm [H] fp32, head [V, H]; no head when it is the embedding. They give the model's logits."""
    ids = torch.arange(min(4, facts.vocab_size), device=model.get_input_embeddings().weight.device)  # [4]
    states = short_forward(model, decoder, ids)
    require_finite(model, facts, states)
    parts = parts_of(model, norm_module, facts)
    check_logits(facts, parts, ids, states)
    return parts


def parts_of(model: Any, norm_module: Any, facts: TargetFacts) -> dict[str, torch.Tensor]:
    """The same parts, not yet compared with the model's logits; shares the model's memory."""
    embedding = model.get_input_embeddings().weight  # [V, H]
    head_module = model.get_output_embeddings()
    head = head_module.weight  # [V, H]
    shape = (facts.vocab_size, facts.hidden_size)
    if tuple(embedding.shape) != shape or tuple(head.shape) != shape or getattr(head_module, "bias", None) is not None:
        raise not_understood(
            facts, f"embedding {tuple(embedding.shape)}, head {tuple(head.shape)}", f"{shape} and no bias"
        )
    is_same = head.data_ptr() == embedding.data_ptr()
    if is_same != facts.is_tied:
        raise UserError(
            f"target {facts.name!r}: tie_word_embeddings is {facts.is_tied}, and its head is "
            f"{'the embedding' if is_same else 'a matrix of its own'}",
            "a config.json that says what the tensor files hold",
            f"set tie_word_embeddings to {str(is_same).lower()} in config.json (and in its text_config)",
        )
    parts = {"embedding": embedding, "norm": effective_norm(norm_module, facts)}
    return parts if is_same else parts | {"head": head}


def logits_from(parts: dict[str, torch.Tensor], facts: TargetFacts, last: torch.Tensor) -> torch.Tensor:
    """Logits [n, V] fp32 of states before the final norm [n, H]: norm, head, multiplier, soft cap.

    The states and the parts may lie on several devices; the logits lie where the head is.
    """
    head = parts.get("head", parts["embedding"])
    state, norm = last.to(head.device).float(), parts["norm"].to(head.device)
    normed = state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + facts.rms_norm_eps) * norm
    logits = (normed.to(head.dtype) @ head.T).float() * facts.output_multiplier  # [n, V]
    return facts.logit_softcap * torch.tanh(logits / facts.logit_softcap) if facts.logit_softcap else logits


def effective_norm(norm: Any, facts: TargetFacts) -> torch.Tensor:
    """The factor [H] of the final RMSNorm in fp32: its weight, or 1 + weight for Gemma and Qwen3.5."""
    if getattr(norm, "weight", None) is None:
        raise not_understood(facts, f"its final norm {type(norm).__name__} has no weight", "RMSNorm with a weight")
    weight = norm.weight.float()  # [H]
    ones = torch.ones(1, facts.hidden_size, dtype=norm.weight.dtype, device=weight.device)
    shown = norm(ones)[0].float()  # [H]
    for candidate in (weight, 1 + weight):
        if torch.allclose(shown, candidate, rtol=2e-2, atol=1e-3):
            return candidate
    raise not_understood(
        facts, f"its final norm {type(norm).__name__} is no RMSNorm", "RMSNorm with weight or 1+weight"
    )


def short_forward(model: Any, decoder: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of ids [n] the `first` layer's input and the `last` one's output [n, H], and the model's `logits` [n, V] fp32."""
    seen: dict[str, torch.Tensor] = {}

    def before_first(module: Any, args: Any, kwargs: Any) -> None:
        seen["first"] = (args[0] if args else kwargs["hidden_states"])[0]

    def after_last(module: Any, args: Any, output: Any) -> None:
        seen["last"] = (output[0] if isinstance(output, tuple) else output)[0]

    handles = [
        decoder.layers[0].register_forward_pre_hook(before_first, with_kwargs=True),
        decoder.layers[-1].register_forward_hook(after_last),
    ]
    try:
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()  # [n, V]
    finally:
        for handle in handles:
            handle.remove()
    return seen | {"logits": logits}


def require_finite(model: Any, facts: TargetFacts, states: dict[str, torch.Tensor]) -> None:
    """Raises UserError for logits with NaN or infinity, naming the weight that holds one."""
    if bool(torch.isfinite(states["logits"]).all()):
        return
    weights = ((name, weight) for name, weight in model.named_parameters() if weight.dtype.itemsize > 1)
    spoilt = next((name for name, weight in weights if not bool(torch.isfinite(weight).all())), None)
    if spoilt is None:
        raise UserError(
            f"target {facts.name!r} gives logits that are not finite, and its weights are",
            f"finite logits in {facts.dtype}",
            "give another --set dtype, or choose another target",
        )
    raise UserError(
        f"target {facts.name!r}: its weights hold NaN or infinity, first in {spoilt!r}",
        "finite weights",
        "copy or download the tensor files again, or record a checkpoint from before the training broke",
    )


def check_logits(
    facts: TargetFacts, parts: dict[str, torch.Tensor], ids: torch.Tensor, states: dict[str, torch.Tensor]
) -> None:
    """Compares embedding rows and logits of ids [n] with what the model really computes, see `short_forward`."""
    embedding, real = parts["embedding"], states["logits"]
    ours = logits_from(parts, facts, states["last"])  # [n, V]
    tolerance = 1e-3 if embedding.dtype == torch.float32 else 5e-2
    for what, got, want in (
        ("layer 0 input", embedding[ids].float() * facts.embedding_scale, states["first"].float()),
        ("logits", ours, real),
    ):
        error = ((got - want).abs().max() / want.abs().max().clamp_min(1e-6)).item()
        if not error <= tolerance:
            raise not_understood(
                facts, f"its {what} differ from our parts by {error:.3g} of the maximum", f"at most {tolerance}"
            )


def not_understood(facts: TargetFacts, happened: str, expected: str) -> UserError:
    return UserError(
        f"target {facts.name!r} ({facts.architecture}): {happened}",
        expected,
        "choose another target, or report this architecture",
    )
