"""From input lines to journal records: many chats at once, each line exactly once.

Knows lines, chats and the client; knows nothing of folders and reruns but what the journal says.
"""

import asyncio
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from ...progress import say
from ..lines.json_lines import InputLine, LeftOut
from ..lines.json_text import json_of
from ..lines.messages import Message
from ..lines.shapes import Chat, Line, line_meant, options_under, shown_id
from ..origins import target_origin
from .client import Client
from .config import RegenerateConfig
from .conversation import Conversation, as_sent, converse
from .journal import Journal
from .replies import Reply, TurnFailed
from .served import ServedModel
from .target_check import TargetCheck

LINES_AT_ONCE = 64  # that need no request, before requests on their way get their turn
Numbered = tuple[int, InputLine]
"""A line, with the place of its source among the inputs."""


class Asker:
    """Answers the lines that the journal does not hold yet. `shown` is a tqdm that counts lines."""

    def __init__(
        self,
        config: RegenerateConfig,
        client: Client,
        journal: Journal,
        *,
        names: Sequence[str],
        served: ServedModel,
        check: TargetCheck | None,
        shown: Any,
    ) -> None:
        self.config = config
        self.client = client
        self.journal = journal
        self.names = names
        self.served = served
        self.check = check
        self.shown = shown
        self.origin = target_origin(config.temperature)
        self.lines_in = 0
        self.tokens = 0
        self.taking = asyncio.Lock()
        self.said: set[str] = set()

    async def run(self, lines: Iterable[Numbered]) -> None:
        """Asks the first line alone, so that what is wrong for all is seen before many are asked."""
        rest = iter(lines)
        try:
            async with asyncio.TaskGroup() as group:
                syncing = group.create_task(self.sync_now_and_then())
                if (first := await self.take(rest)) is not None:
                    await self.answer(*first)
                    num_workers = self.config.concurrency * len(self.config.endpoint)
                    await asyncio.gather(*(group.create_task(self.work(rest)) for _ in range(num_workers)))
                syncing.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def work(self, lines: Iterable[Numbered]) -> None:
        while (taken := await self.take(lines)) is not None:
            await self.answer(*taken)

    async def take(self, lines: Iterable[Numbered]) -> tuple[int, InputLine, Line, Chat] | None:
        """The next line that is to be asked, None at the end; those that are none are skipped by name."""
        async with self.taking:
            for source, line in lines:
                self.lines_in += 1
                if self.lines_in % LINES_AT_ONCE == 0:
                    await asyncio.sleep(0)
                if self.journal.has(source, line.number):
                    continue
                try:
                    meant = line_meant(line)
                    return source, line, meant, self.chat_of(meant)
                except LeftOut as fault:
                    self.leave_out(source, line, "skipped", fault.reason, fault.detail)
        return None

    def chat_of(self, meant: Line) -> Chat:
        """The chat of a line under all its template options. Raises LeftOut where there is none to ask, or to send."""
        if not isinstance(meant.content, Chat):
            raise LeftOut(f"{type(meant.content).__name__.lower()}, no chat", "only chats are sent to a server")
        options = options_under(self.config.template, meant.content.options)
        messages = [as_sent(message) for message in meant.content.messages]
        for name, value in (("messages", messages), ("tools", meant.content.tools), ("template options", options)):
            json_of(value, "no JSON to send", name)
        return Chat(meant.content.messages, meant.content.tools, options)

    async def answer(self, source: int, line: InputLine, meant: Line, chat: Chat) -> None:
        """Asks all turns of one chat and writes what came of it."""
        num_checked = 0
        said: dict[str, str] = {}

        async def ask(messages: list[Message], turn: int) -> Reply:
            nonlocal num_checked
            if not self.config.send_thoughts:
                messages = [without_thought(message) for message in messages]
            prompt = self.check.prompt(messages, chat.tools, chat.options) if self.check else None
            endpoint, reply = await self.client.ask(self.body(messages, chat, (source, line.number, turn)))
            self.served.compare(endpoint, reply.model)
            if self.check and prompt:
                self.check.compare(endpoint, prompt, reply)
                num_checked += 1
            if reply.model is not None:
                said[endpoint.shown_url] = reply.model
            self.tokens += reply.completion_tokens or 0
            return reply

        try:
            done = await converse(chat.messages, ask)
        except LeftOut as fault:
            self.leave_out(source, line, "skipped", fault.reason, fault.detail)
        except TurnFailed as fault:
            self.leave_out(source, line, "failed", fault.reason, fault.detail)
        else:
            self.keep(source, line, meant, chat, done, num_checked, said)

    def body(self, messages: list[Message], chat: Chat, place: tuple[int, int, int]) -> dict[str, Any]:
        config = self.config
        body: dict[str, Any] = {
            "model": self.served.asked,
            "messages": [with_both_names(message) for message in messages],
            "temperature": config.temperature,
            "max_tokens": config.max_new_tokens,
        }
        optional = {
            "top_p": config.top_p,
            "top_k": config.top_k,
            "seed": seed_of(config.seed, place) if config.temperature else None,
            "tools": chat.tools,
            "chat_template_kwargs": chat.options or None,
        }
        return body | {key: value for key, value in optional.items() if value is not None} | config.extra

    def keep(
        self,
        source: int,
        line: InputLine,
        meant: Line,
        chat: Chat,
        done: Conversation,
        num_checked: int,
        said: dict[str, str],
    ) -> None:
        """Writes the answered chat. `said`: by endpoint, the name that its replies gave the model."""
        row = {
            "messages": done.messages,
            "tools": chat.tools,
            "chat_template_kwargs": chat.options,
            "response_origin": self.origin,
            "response_model": next(iter(said.values()), self.served.asked),
            "task": meant.task,
            "split": meant.split,
            "id": written_id((line.value or {}).get("id")),
            "source": self.names[source],
            "source_line": line.number,
            "ended": done.ended,
        }
        counts = {
            "answers": done.num_answers,
            "cut": done.num_cut,
            "checked": num_checked,
            "replaced": line.num_replaced,
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": done.completion_tokens,
        }
        self.write(source, line, "answered", {"row": row, "counts": counts, "said": said})

    def leave_out(self, source: int, line: InputLine, outcome: str, reason: str, detail: str) -> None:
        row = {
            "source": self.names[source],
            "line": line.number,
            "id": shown_id(line),
            "outcome": outcome,
            "reason": reason,
            "detail": detail,
        }
        if reason not in self.said:
            say(f"line {line.number} of {self.names[source]} {outcome}: {reason} ({detail}); more like it are counted")
        self.said.add(reason)
        self.write(source, line, outcome, {"row": row})

    def write(self, source: int, line: InputLine, outcome: str, record: dict[str, Any]) -> None:
        self.journal.add(source, line.number, outcome, record)
        self.shown.set_postfix_str(f"{self.journal.counts['failed']:,} failed, {self.tokens:,} tokens", refresh=False)
        self.shown.update()

    async def sync_now_and_then(self) -> None:
        """Until it is cancelled: a power cut takes no more than `sync_s` seconds of answers."""
        while True:
            await asyncio.sleep(self.config.sync_s)
            await asyncio.to_thread(self.journal.sync)


def written_id(known: Any) -> Any:
    """The line's own id; as text where JSON has no such value: NaN, infinity, a time or bytes of a table."""
    try:
        json.dumps(known, allow_nan=False)
    except (TypeError, ValueError):
        return str(known)
    return known


def without_thought(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def with_both_names(message: Message) -> Message:
    """A thought under both keys that servers read: vLLM takes `reasoning` alone (vllm-project/vllm#38488)."""
    thought = message.get("reasoning_content")
    return message if thought is None else {**message, "reasoning": thought}


def seed_of(seed: int, place: tuple[int, int, int]) -> int:
    """31 bits made of the run's seed, the source, the line and the turn: the same after any resume."""
    digest = hashlib.sha256(",".join(map(str, (seed, *place))).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
