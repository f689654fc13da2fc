"""The settings of `regenerate`. Light: imports nothing heavy."""

import re
from dataclasses import dataclass, field
from typing import Any

from ...settings import require, setting

DEFAULT_URL = "http://127.0.0.1:8000/v1"  # vLLM, SGLang (--port) and transformers serve alike
URL = re.compile(r"https?://[^\s/]+(/[^\s?#]*)?")
OWN_KEYS = (
    "model messages tools temperature top_p top_k seed max_tokens max_completion_tokens n stream chat_template_kwargs"
).split()


@dataclass(frozen=True, kw_only=True, slots=True)
class RegenerateConfig:
    """From chats to the same chats with the served target's own answers.

    The second block decides the answers: a run that goes on must find it unchanged, the others may change.
    """

    endpoint: tuple[str, ...] = setting(
        (DEFAULT_URL,), f"URL of the server, or several: URL,URL; default: {DEFAULT_URL}", flag="--endpoint"
    )
    out: str = setting("./responses", "folder to write responses.jsonl to", flag="--out")
    target: str | None = setting(
        None,
        "target to check the server against: every prompt must have as many tokens as its template gives",
        flag="--target",
    )

    model: str | None = setting(None, "the served model's id; default: the only one of the endpoint", flag="--model")
    temperature: float = setting(0.0, "0 is greedy: what a drafter is asked for", flag="--temperature")
    top_p: float | None = setting(
        None, "share of the likeliest tokens to sample from; default: the server's", flag="--top-p"
    )
    top_k: int | None = setting(
        None, "number of the likeliest tokens to sample from; default: the server's", flag="--top-k"
    )
    seed: int = setting(0, "a sampled request's seed is made of this, its line and its turn", flag="--seed")
    max_new_tokens: int = setting(2048, "longest answer, thought included, tokens", flag="--max-new-tokens")
    limit: int | None = setting(None, "take only the first input lines, count", flag="--limit")
    send_thoughts: bool = setting(True, "send earlier answers with their thoughts; the server's template may drop them")
    template: dict[str, Any] = field(
        default_factory=dict,
        metadata={"text": "options handed to the server's chat template, like enable_thinking", "flag": None},
    )
    extra: dict[str, Any] = field(
        default_factory=dict,
        metadata={"text": "more keys for the body of each request, like min_p or stop", "flag": None},
    )

    concurrency: int = setting(64, "requests at once to each URL, count", flag="--concurrency")
    retry_failed: bool = setting(
        False, "try the lines again that failed before", flag="--retry-failed/--no-retry-failed"
    )
    attempts: int = setting(8, "tries of one request before its line fails, count")
    first_wait_s: float = setting(1.0, "wait before the second try, doubled for each further one, seconds")
    longest_wait_s: float = setting(60.0, "longest wait before another try, a server's Retry-After included, seconds")
    connect_s: float = setting(10.0, "longest wait for a connection, seconds")
    request_s: float = setting(1800.0, "longest wait for one reply, seconds")
    give_up_s: float = setting(600.0, "longest time without any endpoint that answers, seconds")
    sync_s: float = setting(1.0, "answers of at most this long are lost in a power cut (none by a kill), seconds")

    def __post_init__(self) -> None:
        require(bool(self.endpoint), "endpoint", self.endpoint, "at least one URL")
        for url in self.endpoint:
            require(URL.fullmatch(url) is not None, "endpoint", url, "URLs like http://127.0.0.1:8000/v1")
        twice = len({base_url(url) for url in self.endpoint}) < len(self.endpoint)
        require(not twice, "endpoint", self.endpoint, "each URL once")
        require(0 <= self.temperature <= 100, "temperature", self.temperature, "0 or more")
        require(self.top_p is None or 0 < self.top_p <= 1, "top_p", self.top_p, "a share above 0, up to 1")
        require(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, "at least 1 token")
        require(self.seed >= 0, "seed", self.seed, "0 or more")
        for name in ("max_new_tokens", "concurrency", "attempts"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "at least 1 input line")
        for name, default in (("top_p", None), ("top_k", None), ("seed", 0)):
            value = getattr(self, name)
            require(self.temperature > 0 or value == default, name, value, f"a temperature above 0 beside {name}")
        for name in ("first_wait_s", "longest_wait_s", "connect_s", "request_s", "give_up_s", "sync_s"):
            require(getattr(self, name) > 0, name, getattr(self, name), "more than 0 seconds")
        for key in self.extra:
            require(key not in OWN_KEYS, f"extra.{key}", self.extra[key], "a key without a setting of its own")


def base_url(url: str) -> str:
    """What `/models` and `/chat/completions` are put behind; the path `/v1` is added where there is none."""
    base = url.rstrip("/").removesuffix("/chat/completions")
    return base if re.fullmatch(r"https?://[^/]+", base) is None else f"{base}/v1"
