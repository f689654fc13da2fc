"""What a chat-completions server says: its answer as a message, or its words of refusal.

Knows the JSON of OpenAI's API and its dialects (vLLM, SGLang, transformers serve), not how it is fetched.
"""

import json
from dataclasses import dataclass
from typing import Any

from ..lines.endings import CUT, WHOLE, is_cut_by
from ..lines.json_lines import DECODER, LeftOut, without_surrogates
from ..lines.json_text import is_blank, is_filled, short
from ..lines.messages import Message, as_message
from ..lines.thoughts import ALL_KEYS

CALLING = ("tool_calls", "tool_use", "function_call")
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
    model: str | None = None
    """The name that the reply gives its model."""


def read_reply(raw: bytes) -> Reply:
    """The answer in a server's reply. Raises ValueError where the reply is no chat completion,

    TurnFailed where it is one without a usable answer: empty, refused, a thought alone, two thoughts that differ,
    calls that are broken or missing, an end that is neither the model's own nor the limit, text that is none.
    """
    try:
        body = DECODER.decode(raw.decode("utf-8-sig"))
        choice = body["choices"][0]
        given, finish = choice["message"], choice.get("finish_reason")
        content, calls = given.get("content"), given.get("tool_calls") or []
        thoughts = {key: given[key] for key in ALL_KEYS if given.get(key)}
        usage = body.get("usage") or {}
        counts = [usage.get(key) for key in ("prompt_tokens", "completion_tokens")]
        model = body.get("model")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, LeftOut) as error:
        raise ValueError(f"{type(error).__name__}: {error}; it begins {short(raw[:60])}") from error
    if not isinstance(content, str | None) or not isinstance(calls, list):
        raise ValueError(f"content or tool calls of another type: {short(given)}")
    is_cut = is_cut_by(finish)
    if finish is None or is_cut is None:
        raise TurnFailed(f"finish reason {short(finish)}", f"expected one of {', '.join((*WHOLE, *CUT))}")
    check_parts(given, finish, calls)
    message = message_of({"role": "assistant", "content": content or "", **thoughts}, calls)
    if not calls and is_blank(message["content"]):
        said = "a thought alone" if "reasoning_content" in message else "nothing"
        raise TurnFailed("cut before the answer" if is_cut else "empty answer", f"{said}, {tokens_text(counts[1])}")
    if is_cut:
        message["finish_reason"] = finish
    prompt_tokens, completion_tokens = (count if type(count) is int else None for count in counts)
    model = model if isinstance(model, str) and not is_blank(model) else None
    return Reply(message, is_cut, prompt_tokens, completion_tokens, model)


def check_parts(given: dict[str, Any], finish: str, calls: list[Any]) -> None:
    """Raises TurnFailed for a refusal, and where the calls that the reply speaks of are not in `tool_calls`."""
    if is_filled(refusal := given.get("refusal")):
        raise TurnFailed("refused by the model", short(refusal))
    if is_filled(old := given.get("function_call")):
        raise TurnFailed("broken tool calls", f"function_call, the old form of a call: {short(old)}")
    if finish.lower() in CALLING and not calls:
        raise TurnFailed("no call in the answer", f"finish reason {short(finish)} and no tool_calls")


def message_of(said: Message, calls: list[Any]) -> Message:
    """The answer as `prepare` will read it, its calls as they are sent back. Raises TurnFailed where it would not."""
    sent = {"tool_calls": [as_sent_call(call) for call in calls]} if calls else {}
    try:
        message = as_message(said | sent)
        num_replaced = without_surrogates(message)[1]
    except LeftOut as fault:
        raise TurnFailed(fault.reason, fault.detail) from fault
    if num_replaced:
        raise TurnFailed("lone surrogates in the answer", f"{num_replaced}, in {short(said['content'])}")
    return message | sent


def tokens_text(count: Any) -> str:
    return "of unknown length" if count is None else f"{count} tokens"


def as_sent_call(call: Any) -> dict[str, Any]:
    """A call as OpenAI writes it, its arguments the JSON text of an object. Raises TurnFailed."""
    try:
        function, arguments = call["function"], call["function"].get("arguments") or "{}"
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        value = DECODER.decode(text)
        if not isinstance(function["name"], str) or not isinstance(value, dict):
            raise ValueError("no name, or arguments that are no object")
        if without_surrogates(value)[1]:
            raise ValueError("lone surrogates in the arguments")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, LeftOut) as error:
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
