"""How the writer of an answer ended it, in the words of servers and data sets: by itself, or cut by a limit.

OpenAI and its dialects say `finish_reason` (stop, length, tool_calls, function_call), Hugging Face's servers eos_token,
Anthropic `stop_reason` (end_turn, max_tokens, tool_use), Gemini STOP and MAX_TOKENS, Mistral model_length, Cohere
COMPLETE. Upper and lower case are one. Anything else is no ending that is known here: content_filter, abort, an error,
the number of a stop token.
"""

from collections.abc import Mapping
from typing import Any

from .json_lines import LeftOut
from .json_text import short

WHOLE = (
    "stop",
    "eos",
    "eos_token",
    "end_turn",
    "stop_sequence",
    "tool_calls",
    "function_call",
    "tool_use",
    "complete",
)
"""The writer ended the answer itself."""
CUT = ("length", "max_tokens", "max_output_tokens", "max_length", "model_length", "model_context_window_exceeded")
"""A limit ended it: the end that a template writes is not the writer's."""
KEYS = ("finish_reason", "stop_reason")
"""Keys of a message, or of a line for its last answer; each may hold any of the words."""


def is_cut_by(reason: Any) -> bool | None:
    """True for an ending by a limit, False for one of the writer's own or None; None for one that is not known."""
    if reason is None:
        return False
    word = reason.lower() if isinstance(reason, str) else ""
    return True if word in CUT else False if word in WHOLE else None


def is_same_ending(reason: Any, other: Any) -> bool:
    """True for two words of one meaning, or one unknown word given twice."""
    known = is_cut_by(reason)
    return reason == other if known is None else known is is_cut_by(other)


def is_cut(message: Mapping[str, Any]) -> bool:
    """Whether a limit ended this answer; without a word about it, none did.

    Raises LeftOut for an unknown word, and where the message's two say different things.
    """
    given = {key: message[key] for key in KEYS if message.get(key) is not None}
    if len(given) == 2 and not is_same_ending(*given.values()):
        raise LeftOut("shapes disagree", f"finish_reason {short(given[KEYS[0]])}, stop_reason {short(given[KEYS[1]])}")
    found = {key: is_cut_by(reason) for key, reason in given.items()}
    if unknown := [key for key, cut in found.items() if cut is None]:
        raise LeftOut("unknown finish reason", f"{unknown[0]} is {short(given[unknown[0]])}")
    return any(found.values())
