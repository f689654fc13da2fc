"""Conversations turn by turn: each later turn is asked after the target's own plain answer to the earlier ones."""

from collections.abc import Callable

from .acceptance import Acceptance
from .evaluate_report import Comparison
from .prompts import IdsOf, Prompt, Prompts, next_turn, turn_name
from .target import Target

Examine = Callable[[list[Prompt]], tuple[Acceptance, Comparison]]


def examine_turns(
    examine: Examine, prompts: Prompts, ids_of: IdsOf | None, target: Target
) -> tuple[Acceptance, Comparison, Prompts]:
    """All first turns, then all second ones, and so on; the last is every prompt asked, in that order.

    `examine` decodes prompts with the target, `ids_of` renders chats (None where no prompt has a later turn). A turn
    that is blank, that leaves the target no room, or that its template has no form for, is left out by name, and with
    it those behind it.
    """
    acceptance, comparison = examine(prompts.prompts)
    asked, left_out = list(prompts.prompts), list(prompts.left_out)
    answered, number = list(zip(prompts.prompts, comparison.outcomes)), 1
    while any(prompt.follow_ups for prompt, _ in answered):
        number += 1
        assert ids_of is not None, "prompts with later turns, and nothing that renders them"
        turns = Prompts([], [])
        for prompt, outcome in answered:
            if prompt.follow_ups:
                said = target.tokenizer.decode(list(outcome.plain_tokens), skip_special_tokens=True)
                try:
                    turns.prompts.append(next_turn(prompt, said, number, ids_of))
                except ValueError as error:
                    turns.left_out.append((turn_name(prompt.conversation, number), str(error)))
        turns = fitting(turns, target.facts.max_positions)
        more, outcomes = examine(turns.prompts)
        answered = list(zip(turns.prompts, outcomes.outcomes))
        acceptance = Acceptance(acceptance.answers + more.answers, acceptance.block_size)
        comparison = Comparison(outcomes=comparison.outcomes + outcomes.outcomes)
        asked += turns.prompts
        left_out += turns.left_out
    return acceptance, comparison, Prompts(asked, left_out)


def fitting(prompts: Prompts, max_positions: int) -> Prompts:
    """The prompts that leave the target room for an answer; the others are left out by name."""
    fit, left_out = [], list(prompts.left_out)
    for prompt in prompts.prompts:
        if 0 < len(prompt.ids) < max_positions:
            fit.append(prompt)
        else:
            left_out.append((prompt.name, f"a prompt of {len(prompt.ids)} tokens, the target takes {max_positions}"))
    return Prompts(fit, left_out)
