"""Decoding several texts in one forward, each of its own length and rolled back on its own.

The rows of the cache end together: a row holds its own tokens at the end and nothing of use before them. What is
used is told to the model by an attention mask over the cache and by position ids; the model makes its own masks from
them, one for each kind of its layers. Tokens of a row then keep their distances, so that sliding windows see what
they see in a text alone. A roll-back moves a row's tokens to the right, over those that it forgets.

Knows transformers' DynamicLayer, which keeps every token. Layers that keep less cannot be rolled back row by row.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import UserError
from .session import CACHE_TOLERANCE, Session, new_cache, run

if TYPE_CHECKING:
    from .hf import HfTarget

MOVED_LAYERS = {"DynamicLayer", "DummyLayer"}  # the latter holds nothing: it reads another layer's
LENGTH_BOUND_ROPES = {"dynamic", "longrope"}  # their angles depend on the longest text of a batch


class BatchSession:
    """Texts by number, in one cache; see the protocol of the same name where they are decoded."""

    def __init__(self, target: "HfTarget", tap_layers: tuple[int, ...]) -> None:
        self.target, self.tap_layers = target, tap_layers
        self.texts: list[int] = []  # of the rows, in order
        self.firsts: list[int] = []  # column of each row's first token
        self.cache: Any = None

    def add(self, text: int, session: Session) -> None:
        """Takes over the text that a session has read; the session must not be used any more."""
        assert text not in self.texts, f"text {text} is there already"
        if not self.texts:
            self.cache, self.texts, self.firsts = session.cache, [text], [0]
            return
        held, new = self.cache.get_seq_length(), session.length
        width = max(held, new)
        for mine, other in zip(self.cache.layers, session.cache.layers, strict=True):
            if other.keys is not None:
                mine.keys = torch.cat([at_end(mine.keys, width), at_end(other.keys, width)])
                mine.values = torch.cat([at_end(mine.values, width), at_end(other.values, width)])
        self.firsts = [first + width - held for first in self.firsts] + [width - new]
        self.texts.append(text)

    def close(self, text: int) -> None:
        """Forgets a text."""
        row = self.texts.index(text)
        del self.texts[row], self.firsts[row]
        if self.texts:
            self.cache.batch_select_indices([i for i in range(len(self.texts) + 1) if i != row])

    @torch.no_grad()
    def forward(
        self, texts: Sequence[int], starts: Sequence[int], ids: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """Cuts each text to its start, appends its ids [m_i]; gives logits [m_i, V] fp32 and taps [m_i, Lt*H].

        `texts` are all that were added and not closed, in any order. Shorter ids are padded on the right, where no
        token sees the padding; it is rolled back with the next forward, as refused drafts are.
        """
        assert sorted(texts) == sorted(self.texts), f"texts {list(texts)}, open are {self.texts}"
        order = [self.texts.index(text) for text in texts]
        self.cut(order, starts)
        self.texts = list(texts)
        counts, width, device = [len(part) for part in ids], max(starts), self.target.device
        padded = nn.utils.rnn.pad_sequence(list(ids), batch_first=True).to(device)  # [n, m]
        kept, new = torch.tensor([list(starts), counts], device=device).unsqueeze(-1)  # [n, 1] each
        columns = torch.arange(width + padded.shape[1], device=device)
        mask = (columns >= width - kept).long()  # [n, width + m], 1 = of this row
        positions = kept + torch.minimum(columns[: padded.shape[1]], new - 1)  # [n, m]
        caught: dict[int, Tensor] = {}
        layers = self.target.decoder.layers
        handles = [layers[layer].register_forward_hook(rows_catcher(caught, layer)) for layer in self.tap_layers]
        try:
            output = run(self.target.model, padded, self.cache, attention_mask=mask, position_ids=positions)
        finally:
            for handle in handles:
                handle.remove()
        taps = torch.cat([caught[layer] for layer in self.tap_layers], dim=-1)  # [n, m, Lt*H]
        return [(output.logits[row, :count].float(), taps[row, :count]) for row, count in enumerate(counts)]

    def cut(self, order: Sequence[int], starts: Sequence[int]) -> None:
        """Puts the rows in this order, each with its first starts[i] tokens at the end of the cache."""
        held, width = self.cache.get_seq_length(), max(starts)
        firsts = [self.firsts[row] for row in order]
        self.firsts = [width - start for start in starts]
        if list(order) == list(range(len(order))) and all(f + s == held for f, s in zip(firsts, starts)):
            gap = held - width  # nothing is forgotten; columns that no row uses go
            self.move(lambda states: states[:, :, gap:])
            return
        device = self.target.device
        rows = torch.tensor(list(order), device=device)
        begins = torch.tensor([f - new for f, new in zip(firsts, self.firsts)], device=device)[:, None]  # [n, 1]
        columns = (torch.arange(width, device=device) + begins).clamp(0, held - 1)[:, None, :, None]  # [n, 1, width, 1]

        def moved(states: Tensor) -> Tensor:
            picked = states[rows.to(states.device)]  # [n, heads, held, d]
            return picked.gather(2, columns.to(states.device).expand(*picked.shape[:2], width, picked.shape[3]))

        self.move(moved)

    def move(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Replaces keys and values [n, heads, held, d] of every layer that has any."""
        for layer in self.cache.layers:
            if layer.keys is not None:
                layer.keys, layer.values = moved(layer.keys), moved(layer.values)


def at_end(states: Tensor, width: int) -> Tensor:
    """States [n, heads, held, d] as the last columns of `width` ones, zeros before them."""
    return F.pad(states, (0, 0, width - states.shape[2], 0))


def rows_catcher(caught: dict[int, Tensor], layer: int) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        caught[layer] = output[0] if isinstance(output, tuple) else output  # [n, m, H]

    return hook


def single_reason(target: "HfTarget") -> str | None:
    """Why this target's texts can be decoded one at a time only, in a few words; None where a batch can be."""
    if target.facts.is_recurrent:
        return "recurrent target"
    rope = target.facts.rope.get("rope_type")
    if rope in LENGTH_BOUND_ROPES:
        return f"{rope} rotary angles depend on the longest text"
    text = target.model.config.get_text_config(decoder=True)
    if getattr(text, "attn_temperature_tuning", False) and target.facts.max_positions >= text.floor_scale:
        return "attention is scaled by places in the longest text"  # Llama 4 counts the cache (transformers 5.24)
    others = {type(layer).__name__ for layer in new_cache(target).layers} - MOVED_LAYERS
    return f"cache of {min(others)}" if others else None


@torch.no_grad()
def require_right_batch(target: "HfTarget") -> None:
    """Refuses a target whose batched forwards, rolled back row by row, are not those of a text alone.

    Raises UserError with the error and the tolerance.
    """
    tokens = min(target.facts.tokenizer_size, target.facts.vocab_size)
    texts = [(torch.arange(length) * step + 11) % tokens for length, step in ((21, 37), (14, 29), (24, 23))]
    begins, gained, refused = (9, 2, 12), (2, 1, 3), (4, 1, 0)  # tokens of the prompt, kept behind it, rolled back
    starts = [begin + count for begin, count in zip(begins, gained)]
    expected, advice = (
        "a batch whose texts do not change each other",
        "evaluate with batch=1, and report this architecture",
    )
    try:
        alone = [answered(target, *one) for one in zip(texts, starts)]
        batch = BatchSession(target, (0,))
        for number, (text, begin) in enumerate(zip(texts, begins)):
            session = Session(target, (0,))
            session.forward(text[:begin])
            batch.add(number, session)
        parts = [torch.cat([t[b:s], t[:r]]) for t, b, s, r in zip(texts, begins, starts, refused)]
        batch.forward([0, 1, 2], begins, parts)
        order = (2, 0, 1)
        results = batch.forward(order, [starts[i] for i in order], [texts[i][starts[i] :] for i in order])
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, RuntimeError) as error:
        happened = f"target {target.facts.name!r} cannot decode a batch: {type(error).__name__}: {error}"
        raise UserError(happened.replace("\n", " ")[:300], expected, advice) from error
    error = max(relative_error(logits, alone[i]) for i, (logits, _) in zip(order, results))
    if not error <= CACHE_TOLERANCE[target.facts.dtype]:
        raise UserError(
            f"target {target.facts.name!r} decodes a batch wrongly: relative error {error:.2g} of its logits",
            f"{expected}, within {CACHE_TOLERANCE[target.facts.dtype]:g}",
            advice,
        )


def answered(target: "HfTarget", text: Tensor, start: int) -> Tensor:
    """Logits [m, V] of the tokens from `start` on, by a session of the text alone."""
    session = Session(target, (0,))
    session.forward(text[:start])
    return session.forward(text[start:])[0]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Median over positions of the error of logits [m, V]."""
    norm = torch.linalg.vector_norm
    return float((norm(found - expected, dim=-1) / norm(expected, dim=-1)).median())
