"""Drafts along a finished text, cycle by cycle, as greedy speculative decoding would make them.

Decoding accepts a draft where it is the target's greedy token, and the text is made of exactly these. So this gives
`decode`'s cycles without the target. Knows the drafter and its frozen ends; a `Drafting` may have facts altered.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..drafter import Drafter
from ..evaluate.drafting import choose_tokens
from .profile import Profile
from .texts import Text

EMBEDDING_LAYER = -1  # the tap "before layer 0": the target's embedded tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafting:
    """How drafts are made: a drafter, the embedding and head [V, H] it uses, and the target layers it reads.

    `reader` makes the keys and values of the context; it is the drafter itself, unless that is altered. `scale`
    multiplies the embedded block. `first_slot` is the slot of the first draft: 1, or 0 where slot k is taken to predict
    position a+k+1.
    """

    drafter: Drafter
    reader: Drafter
    embedding: Tensor
    head: Tensor
    tap_layers: tuple[int, ...]
    mask_token_id: int
    scale: float
    first_slot: int = 1

    @staticmethod
    def of(drafter: Drafter, embedding: Tensor, head: Tensor) -> "Drafting":
        """As the drafter's own spec has it."""
        spec = drafter.spec
        return Drafting(
            drafter=drafter,
            reader=drafter,
            embedding=embedding,
            head=head,
            tap_layers=spec.tap_layers,
            mask_token_id=spec.mask_token_id,
            scale=spec.embedding_scale,
        )

    def taps_of(self, text: Text) -> Tensor:
        """What the drafter reads of a text: [end, Lt*H] on its device, in its dtype."""
        ids = torch.tensor(text.ids[: text.end], device=self.embedding.device)
        planes = [
            self.embedding[ids] * self.drafter.spec.embedding_scale if layer == EMBEDDING_LAYER else text.taps[layer]
            for layer in self.tap_layers
        ]
        return torch.cat([plane.to(self.embedding) for plane in planes], dim=-1)


@torch.no_grad()
def replay(drafting: Drafting, text: Text) -> list[int]:
    """The accepted drafts of each cycle; those behind the end of the text count, as far as it is known."""
    drafter, block_size = drafting.drafter, drafting.drafter.spec.block_size
    taps, cache, device = drafting.taps_of(text), drafter.new_cache(), drafting.embedding.device
    block = torch.full((block_size,), drafting.mask_token_id, device=device)  # [B]
    cycles: list[int] = []
    anchor, known = text.first, 0
    while anchor < text.end - 1:
        drafting.reader.extend(cache, taps[known:anchor], torch.arange(known, anchor, device=device))
        known = anchor
        block[0] = text.ids[anchor]
        positions = torch.arange(anchor, anchor + block_size, device=device)
        hidden = drafter.propose(cache, drafting.embedding[block] * drafting.scale, positions)  # [B, H]
        slots = hidden[drafting.first_slot : drafting.first_slot + block_size - 1]
        drafts = choose_tokens(slots, drafting.head).tolist()
        pairs = zip(drafts, text.ids[anchor + 1 :])
        leading = next((k for k, (draft, token) in enumerate(pairs) if draft != token), block_size - 1)
        cycles.append(leading)
        anchor += leading + 1
    return cycles


def profile_of(drafting: Drafting, texts: Iterable[Text]) -> Profile:
    """The cycles of all texts."""
    cycles = [leading for text in texts for leading in replay(drafting, text)]
    return Profile.of(cycles, drafting.drafter.spec.block_size - 1)
