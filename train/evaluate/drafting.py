"""The drafter's side of decoding: blocks for one text or for several together."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ... import UserError
from ..drafter import Drafter
from .steps import Draft


class DrafterProposer:
    """The drafter with the contexts of the texts that are being decoded, and the frozen ends of the target.

    embedding, head [V, H] are on the drafter's device in its dtype. `tap_dtype` is 'store' (taps are rounded to
    bfloat16, as a store holds them) or 'float32'. The target's `output_multiplier` and `softcap` matter where drafts
    are drawn from the logits; the largest logit is the same without them.
    """

    def __init__(
        self,
        drafter: Drafter,
        embedding: Tensor,
        head: Tensor,
        tap_dtype: str,
        *,
        output_multiplier: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        self.drafter, self.embedding, self.head, self.tap_dtype = drafter, embedding, head, tap_dtype
        self.output_multiplier, self.softcap = output_multiplier, softcap
        self.context = drafter.new_rows()
        self.rows: dict[int, int] = {}  # of the texts, by their number

    @torch.no_grad()
    def propose(self, asked: Mapping[int, Draft]) -> list[Tensor]:
        """The logits [B-1, V] fp32 of each text's next block.

        Raises UserError where one is not finite: greedy drafts would all be refused, and others cannot be drawn.
        """
        spec, embedding = self.drafter.spec, self.embedding
        rows = [self.row(text) for text in asked]
        self.drafter.extend_rows(self.context, rows, [self.rounded(request.taps) for request in asked.values()])
        for row, request in zip(rows, asked.values()):
            assert self.context.lengths[row] == request.start, f"{self.context.lengths[row]} taps, not {request.start}"
        ids = torch.full((len(asked), spec.block_size), spec.mask_token_id)  # [n, B]
        ids[:, 0] = torch.tensor([request.anchor for request in asked.values()])
        embeds = embedding[ids.to(embedding.device)] * spec.embedding_scale  # [n, B, H]
        hidden = self.drafter.propose_rows(self.context, rows, embeds)[:, 1:]  # [n, B-1, H]
        logits = self.scaled((hidden.to(self.head.dtype) @ self.head.T).float())  # [n, B-1, V]
        require_finite(logits, "logits")
        return list(logits)

    def close(self, text: int) -> None:
        """Forgets a text; one that never drafted has nothing to forget."""
        if text in self.rows:
            self.context.drop(self.rows.pop(text))

    def row(self, text: int) -> int:
        if text not in self.rows:
            self.rows[text] = self.context.add()
        return self.rows[text]

    def rounded(self, taps: Tensor) -> Tensor:
        """The taps as the drafter was trained on them."""
        return (taps.to(torch.bfloat16) if self.tap_dtype == "store" else taps).to(self.embedding)

    def scaled(self, logits: Tensor) -> Tensor:
        """The target's own scale and soft cap on logits of its head."""
        logits = logits * self.output_multiplier
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class NotFinite(UserError):
    """Output of a drafter that is no number: its `happened` says which."""


def require_finite(found: Tensor, name: str) -> None:
    """Raises NotFinite unless all numbers of the drafter's output are finite; a NaN would pass for a wrong draft."""
    if not bool(found.isfinite().all()):
        raise NotFinite(
            f"the drafter's {name} are not all finite",
            "a drafter whose weights and states are numbers",
            "examine another checkpoint with --checkpoint, and look at the run's losses",
        )


def choose_tokens(hidden: Tensor, head: Tensor) -> Tensor:
    """The likeliest token of each hidden state [..., H]: ids [...].

    The target's output multiplier and soft cap are left out: both are increasing functions of
    a logit and cannot change which one is largest.
    """
    return (hidden.to(head.dtype) @ head.T).argmax(-1)
