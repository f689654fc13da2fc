"""Runs every alteration of our drafter along the engine's texts."""

from collections.abc import Sequence

from ...progress import bar
from ..evaluate.target import Target
from .alterations import alterations
from .profile import Profile
from .replay import EMBEDDING_LAYER, Drafting, replay
from .texts import read_text


def altered_profiles(
    drafting: Drafting, target: Target, answered: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> dict[str, Profile]:
    """fact -> the profile of our drafter with that fact altered; `answered` are prompts with the engine's answers.

    Texts are read one at a time, with every layer that an alteration looks at.
    """
    block_size, facts = drafting.drafter.spec.block_size, target.facts
    plain = {name: getattr(facts, name, None) for name in ("pad_id", "bos_id", "eos_ids")}
    altered = {one.fact: one.make(drafting) for one in alterations(drafting, plain)}
    layers = sorted({layer for one in altered.values() for layer in one.tap_layers} - {EMBEDDING_LAYER})
    cycles: dict[str, list[int]] = {fact: [] for fact in altered}
    for ids, answer in bar("causes", "prompt", answered):
        text = read_text(target, ids, answer, layers, max(0, block_size - 2))
        for fact, own in altered.items():
            cycles[fact] += replay(own, text)
    return {fact: Profile.of(counts, block_size - 1) for fact, counts in cycles.items()}
