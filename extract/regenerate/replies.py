"""What a chat-completions server says: its answer as a message, or its words of refusal.

Knows the JSON of OpenAI's API and its dialects (vLLM, SGLang, transformers serve), not how it is fetched.
"""

import json
from dataclasses import dataclass
from typing import Any

from ..lines.messages import Message, is_blank, short

WHOLE = ("stop", "tool_calls", "function_call", "eos", "eos_token")
"""Finish reasons of an answer that the model ended itself."""
CUT = "length"
THOUGHT_KEYS = ("reasoning_content", "reasoning")
SHOWN_WORDS = 300


class TurnFailed(Exception):
    """Why one request has no usable answer: a reason that is counted, and what was seen.

    `is_final`: the same request would fail again, whichever server takes it.
    """

    def __init__(self, reason: str, detail: str, *, is_final: bool = True) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
        self.is_final = is_final


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. `message` is as it is sent back with the history: tool arguments are text."""

    message: Message
    is_cut: bool
    prompt_tokens: int | None
    completion_tokens: int | None


def read_reply(raw: bytes) -> Reply:
    """The answer in a server's reply. Raises ValueError where the reply is no chat completion,

    TurnFailed where it is one without a usable answer: empty, a thought alone, broken calls, an
    end that is neither the model's own nor the limit.
    """
    try:
        body = json.loads(raw)
        choice = body["choices"][0]
        given, finish = choice["message"], choice.get("finish_reason")
        content, calls = given.get("content"), given.get("tool_calls") or []
        thought = next((given[key] for key in THOUGHT_KEYS if given.get(key)), "")
        usage = body.get("usage") or {}
        counts = [usage.get(key) for key in ("prompt_tokens", "completion_tokens")]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}; it begins {short(raw[:60])}") from error
    if not isinstance(content, str | None) or not isinstance(thought, str) or not isinstance(calls, list):
        raise ValueError(f"content, thought or tool calls of another type: {short(given)}")
    if finish not in (*WHOLE, CUT):
        raise TurnFailed(f"finish reason {short(finish)}", f"expected one of {', '.join(WHOLE)} or {CUT}")
    content = content or ""
    message: Message = {"role": "assistant", "content": content}
    if not is_blank(thought):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [as_sent_call(call) for call in calls]
    elif is_blank(content):
        said = "nothing" if is_blank(thought) else "a thought alone"
        reason = "cut before the answer" if finish == CUT else "empty answer"
        raise TurnFailed(reason, f"{said}, {tokens_text(counts[1])}")
    if finish == CUT:
        message["finish_reason"] = CUT
    prompt_tokens, completion_tokens = (count if type(count) is int else None for count in counts)
    return Reply(message, finish == CUT, prompt_tokens, completion_tokens)


def tokens_text(count: Any) -> str:
    return "of unknown length" if count is None else f"{count} tokens"


def as_sent_call(call: Any) -> dict[str, Any]:
    """A call as OpenAI writes it, its arguments the JSON text of an object. Raises TurnFailed."""
    try:
        function, arguments = call["function"], call["function"].get("arguments") or "{}"
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if not isinstance(function["name"], str) or not isinstance(json.loads(text), dict):
            raise ValueError("no name, or arguments that are no object")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise TurnFailed("broken tool calls", f"{short(call)}: {error}") from error
    known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**known, "type": "function", "function": {"name": function["name"], "arguments": text}}


def server_words(raw: bytes) -> str:
    """The message of an error reply, in one line of at most SHOWN_WORDS characters."""
    text = raw.decode("utf-8", "replace")
    try:
        body = json.loads(text)
        error = body.get("error", body) if isinstance(body, dict) else body
        found = error.get("message") or error.get("detail") if isinstance(error, dict) else error
        text = found if isinstance(found, str) else json.dumps(found or body)
    except (ValueError, RecursionError):
        pass
    words = " ".join(text.split())
    return (words if len(words) <= SHOWN_WORDS else f"{words[: SHOWN_WORDS - 3]}...") or "no words"
