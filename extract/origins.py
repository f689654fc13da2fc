"""Where the answers of a sample come from: written by this target, and how, or by somebody else.

A drafter learns to say what the target says. Answers of the target's own, greedy ones above all, are what it
will be asked for; those of others are not. So every sample names its origin, and later stages can tell them apart.
"""

import re

ELSEWHERE = "elsewhere"
GREEDY = "target greedy"
SAMPLED = re.compile(r"target T=(\d+(?:\.\d+)?)")
ORIGINS = f"'{ELSEWHERE}', '{GREEDY}' or 'target T=0.7' (the temperature it was sampled at)"


def target_origin(temperature: float) -> str:
    """The origin of answers that the target wrote at this temperature; 0 is greedy."""
    return GREEDY if temperature == 0 else f"target T={temperature:.6g}"


def is_origin(text: object) -> bool:
    return isinstance(text, str) and (text in (ELSEWHERE, GREEDY) or SAMPLED.fullmatch(text) is not None)
