"""One chat, asked turn by turn on the model's own earlier answers.

Knows messages and the order of turns; how a question reaches a server is the caller's. The
input's answers are replaced, its questions, system messages and tool results stay. A tool result
answers a call: it is given only where the model made the very calls that the input's assistant made.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..lines.json_lines import LeftOut
from ..lines.messages import Message, is_asked
from .replies import Reply, TurnFailed

SENT_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
RESULT_ROLES = ("tool", "function", "ipython")
Ask = Callable[[list[Message], int], Awaitable[Reply]]
"""ask(messages so far, number of the turn from 0): the answer. Raises TurnFailed."""


@dataclass(slots=True)
class Question:
    """Messages to give before an answer, and the calls that the input's own answer made."""

    given: list[Message]
    calls: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Conversation:
    """Messages as they were sent, with the model's answers; the last is an answer.

    `ended`: why questions of the input were left unasked, None where all were asked.
    """

    messages: list[Message] = field(default_factory=list)
    ended: str | None = None
    num_answers: int = 0
    num_cut: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, given: list[Message], reply: Reply) -> None:
        self.messages += [*given, reply.message]
        self.num_answers += 1
        self.num_cut += reply.is_cut
        self.prompt_tokens += reply.prompt_tokens or 0
        self.completion_tokens += reply.completion_tokens or 0


async def converse(messages: Sequence[Message], ask: Ask) -> Conversation:
    """Asks every question of a chat in order, until the model leaves the input's path or is cut.

    A turn that finally fails after others were answered ends the chat there, and these are kept.
    Raises LeftOut for a chat without a question, TurnFailed where no answer came at all, or
    where the failure may pass.
    """
    done = Conversation()
    questions = questions_of(messages)
    for turn, question in enumerate(questions):
        given = [as_sent(message) for message in question.given]
        if turn:
            made, expected = done.messages[-1].get("tool_calls", []), questions[turn - 1].calls
            if bool(made) != holds_results(given) or (made and not same_calls(made, expected)):
                done.ended = "at a tool turn"
                break
            given = answering(given, expected, made)
        try:
            reply = await ask([*done.messages, *given], turn)
        except TurnFailed as fault:
            if not turn or not fault.is_final:
                raise
            done.ended = fault.reason
            break
        done.add(given, reply)
        if reply.is_cut:
            done.ended = "cut at the limit" if question is not questions[-1] else None
            break
    return done


def questions_of(messages: Sequence[Message]) -> list[Question]:
    """What is asked, in order: the messages before each answer of the input, and those after the last.

    An answer to nothing (a greeting at the start) is given as it is, with the first question; answers in a row are
    one. Raises LeftOut where nothing is asked.
    """
    found: list[Question] = []
    given: list[Message] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or not is_asked(messages, turn):
            given.append(message)
            continue
        if given:
            found.append(Question(given))
            given = []
        found[-1].calls += message.get("tool_calls", [])
    if given and is_asked(messages, len(messages)):
        found.append(Question(given))
    if not found:
        raise LeftOut("no question", "the chat holds no user turn to answer")
    return found


def holds_results(given: Sequence[Message]) -> bool:
    return any(message["role"] in RESULT_ROLES for message in given)


def as_sent(message: Message) -> Message:
    """A message of the input with the keys that servers know, tool arguments as JSON text."""
    sent = {key: message[key] for key in SENT_KEYS if key in message}
    if "tool_calls" in sent:
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments_text(call)}} for call in sent["tool_calls"]
        ]
    return sent


def arguments_text(call: dict[str, Any]) -> str:
    arguments = call["function"].get("arguments", {})
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def same_calls(made: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Equal names and arguments, as JSON values, in the same order."""
    return [call_value(call) for call in made] == [call_value(call) for call in expected]


def call_value(call: dict[str, Any]) -> tuple[str, Any]:
    return call["function"]["name"], json.loads(arguments_text(call))


def answering(given: list[Message], expected: Sequence[Any], made: Sequence[Any]) -> list[Message]:
    """Tool results under the ids of the calls that the model made: by the input's ids, else by the results' order.

    An id that several calls of the input have tells none of them.
    """
    new_ids = [call.get("id") for call in made]
    old_ids = [call.get("id") for call in expected]
    answered: list[Message] = []
    place = 0
    for message in given:
        if message["role"] in RESULT_ROLES and new_ids:
            known = message.get("tool_call_id")
            at = old_ids.index(known) if old_ids.count(known) == 1 else min(place, len(new_ids) - 1)
            message = {**message, "tool_call_id": new_ids[at]} if new_ids[at] is not None else message
            place += 1
        answered.append(message)
    return answered
