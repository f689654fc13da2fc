"""vLLM's OpenAI-compatible server: its command, its replies, its counters. Written against 0.32.0.

Counters are Prometheus text at /metrics. `num_drafts` counts checked drafts, `num_accepted_tokens_per_pos` those whose
position was accepted, `position` from 0; drafts behind the end of a text count as accepted where the target would have
said them.
"""

import json
import re
import time
from collections.abc import Mapping
from typing import Any

from ... import UserError
from .engine import Serving
from .profile import Profile
from .server import HOST, Server

SERVED = "served"  # the name that the target is asked by
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
POSITION = re.compile(r'(?:^|,)position="(\d+)"')
SETTLE_S, SETTLE_LIMIT_S = 0.3, 15.0  # counters may be written a moment after a reply
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB; else it takes half of the memory


class Vllm:
    """See `engine.Engine`."""

    name = "vllm"
    health_path = "/health"

    def __init__(self) -> None:
        self.before = Profile(0, ())

    def command(self, python: str, serving: Serving) -> list[str]:
        command = [python, "-m", "vllm.entrypoints.openai.api_server"]
        if serving.layout == "speculators":
            command += ["--model", str(serving.folder)]  # names its target itself
        else:
            drafter = {
                "method": "dflash",
                "model": str(serving.folder),
                "num_speculative_tokens": serving.block_size - 1,
            }
            command += ["--model", serving.target, "--speculative-config", json.dumps(drafter)]
        command += ["--served-model-name", SERVED, "--host", HOST, "--port", str(serving.port)]
        command += ["--dtype", serving.dtype, "--max-model-len", str(serving.max_tokens)]
        command += ["--enforce-eager"] if serving.device_type == "cpu" else []
        return [*command, *serving.extra]

    def environment(self, serving: Serving) -> dict[str, str]:
        return CPU_ENVIRONMENT if serving.device_type == "cpu" else {}

    def begin(self, server: Server) -> None:
        self.before = read_counters(server.get_text("/metrics"))

    def answer(self, server: Server, ids: list[int], max_new_tokens: int) -> list[int]:
        body = {
            "model": SERVED,
            "prompt": ids,
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        reply = server.post("/v1/completions", body)
        try:
            return [int(token) for token in reply["choices"][0]["token_ids"]]
        except (LookupError, TypeError, ValueError) as error:
            raise server.fault("/v1/completions", f"a reply without token_ids: {str(reply)[:200]}") from error

    def profile(self, server: Server, num_drafts: int) -> Profile:
        found, limit = read_counters(server.get_text("/metrics")), time.monotonic() + SETTLE_LIMIT_S
        while time.monotonic() < limit:
            time.sleep(SETTLE_S)
            last, found = found, read_counters(server.get_text("/metrics"))
            if last == found:
                break
        return since(self.before, found, num_drafts)

    def chat_ids(self, server: Server, chat: Mapping[str, Any]) -> list[int] | None:
        return self.token_ids(server, {**chat, "add_generation_prompt": True})

    def text_ids(self, server: Server, text: str) -> list[int] | None:
        return self.token_ids(server, {"prompt": text, "add_special_tokens": False})

    def token_ids(self, server: Server, body: Mapping[str, Any]) -> list[int]:
        reply = server.post("/tokenize", {"model": SERVED, **body})
        try:
            return [int(token) for token in reply["tokens"]]
        except (LookupError, TypeError, ValueError) as error:
            raise server.fault("/tokenize", f"a reply without tokens: {str(reply)[:200]}") from error


def read_counters(text: str) -> Profile:
    """The drafts and accepted tokens of a metrics page, summed over engines; zero where it names none yet."""
    drafts, accepted = 0.0, dict[int, float]()
    for name, labels, value in SAMPLE.findall(text):
        if name == DRAFTS:
            drafts += float(value)
        elif name == ACCEPTED and (position := POSITION.search(labels)):
            accepted[int(position[1])] = accepted.get(int(position[1]), 0.0) + float(value)
    return Profile(int(drafts), tuple(int(accepted.get(k, 0)) for k in range(max(accepted, default=-1) + 1)))


def since(before: Profile, now: Profile, num_drafts: int) -> Profile:
    """What was counted between two readings. Raises UserError where positions are missing or too many."""
    if len(now.accepted) != num_drafts:
        raise UserError(
            f"vLLM counts {len(now.accepted)} positions of {ACCEPTED} for blocks of {num_drafts} drafts",
            "a server that drafts whole blocks and writes its counters at /metrics",
            "drop arguments from --engine-args that change drafting or switch statistics off",
        )
    earlier = [*before.accepted, *[0] * num_drafts]
    accepted = tuple(count - earlier[k] for k, count in enumerate(now.accepted))
    return Profile(now.num_cycles - before.num_cycles, accepted)
