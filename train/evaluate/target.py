"""What an exam needs of a target, as protocols; `extract` satisfies them.

Must not know where targets come from: the command line brings the two together.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

PROMPT_CHUNK = 1024  # prompt tokens of one forward; bounds the logits, which are of no use but the last


class Session(Protocol):
    """One growing text inside a target, batch 1, with the target's own cache."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        ...

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Appends ids [m]; gives logits [m, V] fp32 and taps [m, Lt*H]."""
        ...

    def roll_back(self, length: int) -> None:
        """Forgets all tokens from `length` on, recurrent states included."""
        ...


class BatchSession(Protocol):
    """Several growing texts inside a target, each of its own length, in one cache."""

    def add(self, text: int, session: Any) -> None:
        """Takes over the text that one of the target's sessions has read."""
        ...

    def forward(
        self, texts: Sequence[int], starts: Sequence[int], ids: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Cuts every text to its start, appends its ids [m_i]; gives its logits [m_i, V] fp32 and taps [m_i, Lt*H].

        `texts` are all that were added and not closed, in any order.
        """
        ...

    def close(self, text: int) -> None:
        """Forgets a text."""
        ...


class Target(Protocol):
    """A frozen model that an exam can decode with."""

    @property
    def facts(self) -> Any:
        """A dataclass of what identifies the model: name, weights_sha256, hidden_size, eos_ids, ..."""
        ...

    @property
    def tokenizer(self) -> Any:
        """A transformers tokenizer with the model's chat template."""
        ...

    @property
    def single_reason(self) -> str | None:
        """Why texts can be decoded one at a time only, in a few words; None where a batch can be."""
        ...

    def frozen(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors 'embedding' [V, H] and 'head' [V, H] (left out when tied), and facts."""
        ...

    def open(self, tap_layers: Sequence[int]) -> Session:
        """An empty session that gives the outputs of these layers, concatenated in this order."""
        ...

    def open_batch(self, tap_layers: Sequence[int]) -> BatchSession:
        """An empty session of several texts. Raises UserError where it would not compute what `open` does."""
        ...


def read_prompt(session: Session, prompt: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The logits [V] after the prompt and its taps [n, Lt*H], read in chunks from an empty session."""
    assert session.length == 0, f"the session holds {session.length} tokens"
    assert len(prompt) > 0, "the prompt is empty"
    logits, parts = torch.empty(0), []
    for part in torch.tensor(list(prompt)).split(PROMPT_CHUNK):
        logits, taps = session.forward(part)
        parts.append(taps)
    return logits[-1], torch.cat(parts)
