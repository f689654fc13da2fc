"""Which server takes the next request: the least loaded one that answers.

Knows counts and times, nothing of HTTP. An endpoint that cannot be reached is set aside and tried
again by one request at a time, after waits that double; one that asks for a pause gets it. Nobody
waits for ever: where no endpoint has answered for `give_up_s` seconds, `NoEndpoint` is raised.
"""

import asyncio
import re
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ...progress import say

LONGEST_ASIDE_S = 30.0
LOOK_AGAIN_S = 1.0  # a waiting request looks at the endpoints at least this often


class NoEndpoint(Exception):
    """No endpoint has answered for longer than is waited for; the text says which and why."""


@dataclass(slots=True)
class Endpoint:
    """One server and how it does."""

    url: str
    running: int = 0
    """Requests on their way."""
    replies: int = 0
    retries: int = 0
    """Requests that had to be tried again, here or elsewhere."""
    times_aside: int = 0
    misses: int = 0
    """Vain tries in a row; more than 0: set aside."""
    fault: str = ""
    free_at: float = 0.0
    """Monotonic time before which it gets nothing, seconds."""
    is_proven: bool = False
    """A prompt's length was compared here, and equal."""

    @property
    def shown_url(self) -> str:
        """The URL as it is written down: without a name and password."""
        return re.sub(r"//[^/@]*@", "//", self.url)


class EndpointPool:
    """Deals requests to endpoints, at most `concurrency` at once to each."""

    def __init__(self, urls: Sequence[str], *, concurrency: int, first_wait_s: float, give_up_s: float) -> None:
        self.endpoints = [Endpoint(url) for url in urls]
        self.concurrency = concurrency
        self.first_wait_s = first_wait_s
        self.give_up_s = give_up_s
        self.last_reply = time.monotonic()
        self.waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> Endpoint:
        """A place at an endpoint, to be given back by `release`. Raises NoEndpoint."""
        while True:
            now = time.monotonic()
            if free := [endpoint for endpoint in self.endpoints if self.has_place(endpoint, now)]:
                chosen = min(free, key=lambda endpoint: endpoint.running)
                chosen.running += 1
                return chosen
            self.check_give_up(now)
            await self.wait(now)

    def has_place(self, endpoint: Endpoint, now: float) -> bool:
        limit = 1 if endpoint.misses else self.concurrency
        return endpoint.running < limit and now >= endpoint.free_at

    def check_give_up(self, now: float) -> None:
        """Not while a request is on its way: it ends by its own limit, and may be answered."""
        is_over = now - self.last_reply > self.give_up_s
        if is_over and all(endpoint.misses and not endpoint.running for endpoint in self.endpoints):
            faults = ", ".join(f"{endpoint.url} ({endpoint.fault})" for endpoint in self.endpoints)
            raise NoEndpoint(f"no endpoint has answered for {self.give_up_s:g} s: {faults}")

    async def wait(self, now: float) -> None:
        """Until a place is given back, an endpoint's pause is over, or LOOK_AGAIN_S have passed."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(place)
        pauses = [endpoint.free_at - now for endpoint in self.endpoints if endpoint.free_at > now]
        with suppress(TimeoutError):
            await asyncio.wait_for(place, min([LOOK_AGAIN_S, *pauses]))

    def wake(self, count: int) -> None:
        while self.waiting and count > 0:
            place = self.waiting.popleft()
            if not place.done():
                place.set_result(None)
                count -= 1

    def release(self, endpoint: Endpoint) -> None:
        endpoint.running -= 1
        self.wake(1)

    def answered(self, endpoint: Endpoint) -> None:
        """A reply came, whatever it says: the server is there."""
        endpoint.replies += 1
        self.last_reply = time.monotonic()
        if endpoint.misses:
            endpoint.misses, endpoint.free_at = 0, 0.0
            self.wake(self.concurrency)

    def missed(self, endpoint: Endpoint, fault: str) -> None:
        """It could not be reached: sets it aside. Requests that fail together are one miss."""
        now = time.monotonic()
        endpoint.fault = fault
        if endpoint.misses and now < endpoint.free_at:
            return
        if not endpoint.times_aside:
            say(f"{endpoint.url} does not answer ({fault}): set aside, and tried again")
        endpoint.times_aside += not endpoint.misses
        endpoint.misses += 1
        endpoint.free_at = now + min(LONGEST_ASIDE_S, self.first_wait_s * 2.0 ** (endpoint.misses - 1))

    def pause(self, endpoint: Endpoint, wait_s: float) -> None:
        endpoint.free_at = max(endpoint.free_at, time.monotonic() + wait_s)
