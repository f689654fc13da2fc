"""SGLang's server: its command and its replies, as documented; it has not been run with this package.

/generate takes `input_ids` and gives `output_ids`; its `meta_info` holds `spec_accept_histogram`, the number of checks
that accepted 0, 1, ... drafts (later versions call it `spec_correct_drafts_histogram`). It has no request that renders
a chat to tokens, so its template is not compared.
"""

from collections.abc import Mapping
from typing import Any

from .engine import Serving
from .profile import Profile
from .server import HOST, Server

HISTOGRAMS = ("spec_accept_histogram", "spec_correct_drafts_histogram")


class Sglang:
    """See `engine.Engine`."""

    name = "sglang"
    health_path = "/health"

    def __init__(self) -> None:
        self.checks: list[int] = []  # that accepted 0, 1, ... drafts

    def command(self, python: str, serving: Serving) -> list[str]:
        command = [python, "-m", "sglang.launch_server", "--model-path", serving.target, "--host", HOST]
        command += ["--port", str(serving.port), "--speculative-algorithm", "DFLASH"]
        command += ["--speculative-draft-model-path", str(serving.folder), "--dtype", serving.dtype]
        command += ["--context-length", str(serving.max_tokens), "--device", serving.device_type]
        return [*command, *serving.extra]

    def environment(self, serving: Serving) -> dict[str, str]:
        return {}

    def begin(self, server: Server) -> None:
        self.checks = []

    def answer(self, server: Server, ids: list[int], max_new_tokens: int) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
        reply = server.post("/generate", {"input_ids": ids, "sampling_params": sampling})
        try:
            histogram = next(reply["meta_info"][name] for name in HISTOGRAMS if name in reply["meta_info"])
            self.checks += [0] * (len(histogram) - len(self.checks))
            for accepted, count in enumerate(histogram):
                self.checks[accepted] += int(count)
            return [int(token) for token in reply["output_ids"]]
        except (LookupError, TypeError, ValueError, StopIteration) as error:
            words = f"a reply without output_ids or meta_info.{HISTOGRAMS[0]}: {str(reply)[:200]}"
            raise server.fault("/generate", words) from error

    def profile(self, server: Server, num_drafts: int) -> Profile:
        return Profile.of((k for k, count in enumerate(self.checks) for _ in range(count)), num_drafts)

    def chat_ids(self, server: Server, chat: Mapping[str, Any]) -> list[int] | None:
        return None

    def text_ids(self, server: Server, text: str) -> list[int] | None:
        return None
