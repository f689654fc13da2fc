"""Which endpoint gets a request: the least loaded that answers; nobody waits for ever."""

import asyncio
import time

import pytest
from dflash_offline.extract.regenerate.client import seconds_of
from dflash_offline.extract.regenerate.config import RegenerateConfig, base_url
from dflash_offline.extract.regenerate.endpoints import EndpointPool, NoEndpoint
from dflash_offline.settings import UserError, resolve


def make_pool(num: int = 2, concurrency: int = 4, first_wait_s: float = 0.01, give_up_s: float = 60.0) -> EndpointPool:
    urls = [f"http://e{i}" for i in range(num)]
    return EndpointPool(urls, concurrency=concurrency, first_wait_s=first_wait_s, give_up_s=give_up_s)


def test_the_least_loaded_is_taken_up_to_the_limit() -> None:
    async def scenario() -> None:
        pool = make_pool(3, 2)
        taken = [await pool.acquire() for _ in range(6)]
        assert [endpoint.running for endpoint in pool.endpoints] == [2, 2, 2]
        waiting = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0)
        assert not waiting.done()
        pool.release(taken[4])
        assert await asyncio.wait_for(waiting, 5) is taken[4]

    asyncio.run(scenario())


def test_one_that_is_set_aside_is_tried_by_one_request_at_a_time() -> None:
    async def scenario() -> None:
        pool = make_pool(1)
        endpoint = await pool.acquire()
        pool.missed(endpoint, "refused")
        pool.release(endpoint)
        waiting = [asyncio.create_task(pool.acquire()) for _ in range(3)]
        done, _ = await asyncio.wait(waiting, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), endpoint.running, endpoint.misses) == (1, 1, 1)
        pool.answered(endpoint)
        await asyncio.wait_for(asyncio.gather(*waiting), 5)
        assert (endpoint.running, endpoint.misses) == (3, 0)

    asyncio.run(scenario())


def test_requests_that_fail_together_are_one_miss_and_waits_double() -> None:
    async def scenario() -> None:
        pool = make_pool(1, first_wait_s=1000.0)
        endpoint = pool.endpoints[0]
        for _ in range(64):
            pool.missed(endpoint, "refused")
        assert (endpoint.misses, endpoint.times_aside) == (1, 1)
        endpoint.free_at = 0.0
        pool.missed(endpoint, "refused")
        assert (endpoint.misses, endpoint.times_aside) == (2, 1)

    asyncio.run(scenario())


def test_giving_up_names_all_and_waits_for_what_is_on_its_way() -> None:
    async def scenario() -> None:
        pool = make_pool(2, give_up_s=0.05)
        first, second = await pool.acquire(), await pool.acquire()
        pool.missed(first, "refused")
        pool.release(first)
        pool.missed(second, "timed out")
        started = time.monotonic()
        while time.monotonic() - started < 0.1:  # the second is still on its way, longer than is waited for
            await asyncio.sleep(0.01)
        probe = await pool.acquire()
        assert probe is first
        pool.missed(probe, "refused again")
        pool.release(probe)
        pool.release(second)
        for endpoint in pool.endpoints:
            endpoint.free_at = time.monotonic() + 1000
        with pytest.raises(NoEndpoint, match=r"for 0.05 s: http://e0 \(refused again\), http://e1 \(timed out\)"):
            await asyncio.wait_for(pool.acquire(), 5)

    asyncio.run(scenario())


def test_a_reply_from_anywhere_starts_the_time_anew() -> None:
    async def scenario() -> None:
        pool = make_pool(2, concurrency=1, give_up_s=1000.0)
        pool.last_reply -= 2000
        endpoint = await pool.acquire()
        pool.answered(endpoint)
        other = await pool.acquire()
        for taken in (endpoint, other):
            pool.missed(taken, "refused")
            pool.release(taken)
        assert await asyncio.wait_for(pool.acquire(), 5) in pool.endpoints

    asyncio.run(scenario())


@pytest.mark.parametrize("given, wanted", [("7", 7.0), ("0.5", 0.5), ("-3", 0.0), ("soon", None), (None, None)])
def test_retry_after(given: str | None, wanted: float | None) -> None:
    assert seconds_of(given) == wanted


def test_retry_after_as_a_date() -> None:
    assert seconds_of("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    later = seconds_of("Fri, 31 Dec 2100 23:59:59 GMT")
    assert later is not None
    assert later > 1e9


@pytest.mark.parametrize(
    "given, base",
    [
        ("http://h:8000", "http://h:8000/v1"),
        ("http://h:8000/", "http://h:8000/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("https://h/openai/v2", "https://h/openai/v2"),
        ("http://h/v1/chat/completions", "http://h/v1"),
    ],
)
def test_the_url_that_paths_are_put_behind(given: str, base: str) -> None:
    assert base_url(given) == base


@pytest.mark.parametrize(
    "override",
    [
        "endpoint=localhost:8000",
        "endpoint=http://a,http://a/v1",
        "endpoint=",
        "temperature=-1",
        "top_p=0",
        "top_k=0",
        "top_p=0.9",
        "top_k=5",
        "seed=1",
        "concurrency=0",
        "give_up_s=0",
        "extra.model=other",
        "extra.temperature=1",
    ],
)
def test_settings_that_make_no_sense(override: str) -> None:
    with pytest.raises(UserError):
        resolve(RegenerateConfig, name="regenerate", overrides=[override])


def test_settings_as_they_are_typed() -> None:
    config = resolve(
        RegenerateConfig,
        name="regenerate",
        options={"endpoint": "http://a:1,http://b:2/v1", "top_p": None},
        overrides=["template.enable_thinking=false", "extra.min_p=0.1"],
    )
    assert config.endpoint == ("http://a:1", "http://b:2/v1")
    assert config.template == {"enable_thinking": False}
    assert config.extra == {"min_p": 0.1}
