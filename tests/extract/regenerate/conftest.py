"""A chat-completions server on loopback that answers, or misbehaves, as a test says."""

import asyncio
import json
import threading
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from dflash_offline.extract.regenerate.config import RegenerateConfig

Body = dict[str, Any]
Behave = Callable[[Body, int], Any]
LIMIT_S = 30.0


def completion(content: str | None, *, finish: str = "stop", prompt_tokens: int = 0, **message: Any) -> Body:
    """A reply as OpenAI's API describes it."""
    message = {"role": "assistant", "content": content, **message}
    return {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": len(content or "")},
    }


def error(status: int, words: str, **headers: str) -> web.Response:
    return web.json_response({"error": {"message": words}}, status=status, headers=headers)


def call(name: str, arguments: Any, number: int = 0) -> Body:
    return {"id": f"made-{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def sensible(body: Body, tries: int) -> Body:
    """An answer that the whole request decides: a different question, history or setting gives another."""
    said = "/".join(message["content"] for message in body["messages"])
    return completion(f"{len(body['messages'])} messages: {said[-40:]}")


class ChatServer:
    """Runs in a thread. `behave(body, tries)` gives a reply's JSON, or a web.Response; it may be awaitable.

    `tries` counts the requests with this very body, from 1. `behave` may be exchanged at any time.
    """

    def __init__(self, models: tuple[str, ...] = ("small",), port: int = 0) -> None:
        self.models = models
        self.port = port
        self.behave: Behave = sensible
        self.bodies: list[Body] = []
        self.keys: list[str | None] = []
        self.running = 0
        self.most_running = 0
        self.tries: Counter[str] = Counter()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> "ChatServer":
        self.thread.start()
        self.call(self.open())
        return self

    def stop(self) -> None:
        self.call(self.runner.cleanup())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(LIMIT_S)
        self.loop.close()

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(LIMIT_S)

    async def open(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_get("/v1/models", self.list_models)
        app.router.add_post("/v1/chat/completions", self.chat)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self.runner.addresses[0][1]

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        name = json.dumps(body, sort_keys=True)
        self.tries[name] += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            reply = self.behave(body, self.tries[name])
            reply = await reply if isinstance(reply, Awaitable) else reply
        finally:
            self.running -= 1
        if reply is None:  # the connection breaks
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return reply if isinstance(reply, web.StreamResponse) else web.json_response(reply)


@pytest.fixture
def replies() -> types.SimpleNamespace:
    """What a server may say: completion, error, call, and sensible, which behaves well."""
    return types.SimpleNamespace(completion=completion, error=error, call=call, sensible=sensible)


@pytest.fixture
def make_server() -> Iterator[Callable[..., ChatServer]]:
    made: list[ChatServer] = []

    def make(*models: str, port: int = 0) -> ChatServer:
        made.append(ChatServer(models or ("small",), port).start())
        return made[-1]

    yield make
    for server in made:
        if not server.loop.is_closed():
            server.stop()


@pytest.fixture
def server(make_server: Callable[..., ChatServer]) -> ChatServer:
    return make_server()


@pytest.fixture
def config(server: ChatServer, tmp_path: Path) -> Callable[..., RegenerateConfig]:
    """config(temperature=1.0, ...): settings for the server, with waits of milliseconds."""

    def make(**changes: Any) -> RegenerateConfig:
        given = {"endpoint": (server.url,), "out": str(tmp_path / "out"), "first_wait_s": 0.01, "longest_wait_s": 0.1}
        return RegenerateConfig(**{**given, **changes})

    return make


@pytest.fixture
def questions(tmp_path: Path) -> Callable[..., str]:
    """questions("a", "b"): a file of one chat each; a list of messages, or a whole line, is taken as it is."""

    def write(*lines: Any, name: str = "chats.jsonl") -> str:
        path = tmp_path / name
        with path.open("w") as file:
            for line in lines:
                line = [{"role": "user", "content": line}] if isinstance(line, str) else line
                file.write(json.dumps({"messages": line} if isinstance(line, list) else line) + "\n")
        return str(path)

    return write


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """rows(): the lines of responses.jsonl; rows("left-out.jsonl")."""
    return lambda name="responses.jsonl": read_lines(tmp_path / "out" / name)
