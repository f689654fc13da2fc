"""Requests to OpenAI-compatible servers: tries again what may pass, gives up what will not.

Knows HTTP, its status codes and time limits; knows nothing of chats, files or resuming. What a
status means here:

    200                      the answer; another body than a chat completion: tried again
    400, 413, 422, other 4xx the line fails at once, with the server's words
    401, 403, 404            UserError at once: key, URL or model are wrong for every line
    408, 425, 429, 5xx       tried again, after doubling waits with jitter, or the server's Retry-After
    502, 503, 504            the same, and the endpoint is set aside: a proxy without its server
    no connection            the endpoint is set aside; no try of the line is used up
    lost, or no reply in time: tried again, and the endpoint is set aside
"""

import asyncio
import email.utils
import json
import os
import random
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from ... import UserError
from .config import RegenerateConfig, base_url
from .endpoints import Endpoint, EndpointPool
from .replies import Reply, TurnFailed, read_reply, server_words

KEY_NAME = "OPENAI_API_KEY"
WRONG_FOR_ALL = {
    401: f"set {KEY_NAME} to a key that the server takes",
    403: f"set {KEY_NAME} to a key that the server takes",
    404: "check --endpoint and --model",
}
MAY_PASS = (408, 425, 429)
IS_AWAY = (502, 503, 504)
IDLE_S = 2.0  # below the 5 s after which uvicorn closes an idle connection, perhaps under a request


@dataclass(frozen=True, slots=True)
class Setback:
    """A try that failed and may pass: `is_counted` against the line, `wait_s` as the server asked."""

    reason: str
    detail: str
    is_counted: bool = True
    wait_s: float | None = None


class Client:
    """Asks one of several servers. Use as an async context manager."""

    def __init__(self, config: RegenerateConfig) -> None:
        self.config = config
        self.key = os.environ.get(KEY_NAME, "")
        self.pool = EndpointPool(
            [base_url(url) for url in config.endpoint],
            concurrency=config.concurrency,
            first_wait_s=config.first_wait_s,
            give_up_s=config.give_up_s,
        )
        self.session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(total=self.config.request_s, sock_connect=self.config.connect_s),
            headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.session.close()

    async def find_model(self) -> str:
        """The model's id: the one asked for, else the only one that the endpoints serve.

        Raises UserError where none can be reached, several are served, or two endpoints differ. Those that cannot
        be reached are set aside.
        """
        served: dict[str, list[str]] = {}
        for endpoint in self.pool.endpoints:
            try:
                served[endpoint.url] = await self.models_at(endpoint)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                self.pool.missed(endpoint, error_text(error))
        if not served:
            faults = ", ".join(f"{endpoint.url} ({endpoint.fault})" for endpoint in self.pool.endpoints)
            raise UserError(f"no server answers at {faults}", "a served target", "start it, or correct --endpoint")
        if self.config.model is not None:
            return self.config.model
        names = sorted({name for found in served.values() for name in found})
        if len(names) != 1 or not all(served.values()):
            shown = "; ".join(
                f"{url} serves {', '.join(found) or 'none that it names'}" for url, found in served.items()
            )
            raise UserError(shown, "one model, the same everywhere", "choose with --model ID")
        return names[0]

    async def models_at(self, endpoint: Endpoint) -> list[str]:
        timeout = aiohttp.ClientTimeout(total=3 * self.config.connect_s, sock_connect=self.config.connect_s)
        async with self.session.get(f"{endpoint.url}/models", timeout=timeout) as response:
            raw = await response.read()
            self.require_access(endpoint, response.status, raw, known=(401, 403))
            if response.status in IS_AWAY:
                raise OSError(f"status {response.status}")
        try:
            return [str(model["id"]) for model in json.loads(raw)["data"]]
        except (ValueError, LookupError, TypeError, RecursionError):
            return []

    async def ask(self, body: dict[str, Any]) -> tuple[Endpoint, Reply]:
        """The answer to one request, and who gave it.

        Raises TurnFailed where it has none, UserError where no request would, NoEndpoint where nobody answers.
        """
        data = json.dumps(body, allow_nan=False).encode()
        tries = 0
        while True:
            endpoint = await self.pool.acquire()
            try:
                result = await self.post(endpoint, data)
            finally:
                self.pool.release(endpoint)
            if isinstance(result, Reply):
                return endpoint, result
            endpoint.retries += 1
            tries += result.is_counted
            if tries >= self.config.attempts:
                raise TurnFailed(result.reason, f"{result.detail} ({tries} tries)", is_final=False)
            if result.is_counted:
                await asyncio.sleep(self.wait_before(tries, result.wait_s))

    def wait_before(self, tries: int, asked_s: float | None) -> float:
        """Seconds before the next try; up to half of a doubled wait is taken off by chance, so that many spread."""
        if asked_s is not None:
            return asked_s + random.uniform(0, self.config.first_wait_s)
        wait_s = min(self.config.longest_wait_s, self.config.first_wait_s * 2.0 ** (tries - 1))
        return wait_s * random.uniform(0.5, 1.0)

    async def post(self, endpoint: Endpoint, data: bytes) -> Reply | Setback:
        """One try. Raises TurnFailed and UserError for what no further try would change."""
        headers = {"Content-Type": "application/json"}
        try:
            async with self.session.post(f"{endpoint.url}/chat/completions", data=data, headers=headers) as response:
                raw = await response.read()
                status, retry_after = response.status, response.headers.get("Retry-After")
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self.pool.missed(endpoint, error_text(error))
            return Setback("no connection", error_text(error), is_counted=False)
        except TimeoutError:
            self.pool.missed(endpoint, "timed out")
            return Setback("timed out", f"no reply within {self.config.request_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            self.pool.missed(endpoint, error_text(error))
            return Setback("connection lost", error_text(error))
        return self.judge(endpoint, status, retry_after, raw)

    def judge(self, endpoint: Endpoint, status: int, retry_after: str | None, raw: bytes) -> Reply | Setback:
        self.require_access(endpoint, status, raw, known=tuple(WRONG_FOR_ALL))
        words = f"{status}: {self.words(raw)}"
        if status in IS_AWAY:
            self.pool.missed(endpoint, f"status {status}")
        else:
            self.pool.answered(endpoint)
        if status == 200:
            try:
                return read_reply(raw)
            except ValueError as error:
                return Setback("reply is no chat completion", str(error))
        if status < 500 and status not in MAY_PASS:
            raise TurnFailed("refused by the server", words)
        wait_s = seconds_of(retry_after)
        if wait_s is not None:
            wait_s = min(wait_s, self.config.longest_wait_s)
            self.pool.pause(endpoint, wait_s)
        return Setback("too many requests" if status == 429 else "server error", words, wait_s=wait_s)

    def require_access(self, endpoint: Endpoint, status: int, raw: bytes, known: tuple[int, ...]) -> None:
        if status in known:
            raise UserError(
                f"{endpoint.url} answered {status}: {self.words(raw)}",
                "an endpoint that takes our requests",
                WRONG_FOR_ALL[status],
            )

    def words(self, raw: bytes) -> str:
        """The server's own words; our key, should it repeat it, is not among them."""
        words = server_words(raw)
        return words.replace(self.key, "***") if self.key else words


def seconds_of(retry_after: str | None) -> float | None:
    """A Retry-After header in seconds from now: a number or an HTTP date; None for neither."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return None


def error_text(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
